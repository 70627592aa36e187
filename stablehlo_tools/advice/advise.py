"""Runs all detectors on a program, and ranks their items."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from stablehlo_tools.advice.devices import repeated_compute, small_kernels
from stablehlo_tools.advice.loops_and_batches import (
    batch_to_split,
    gathers_to_prefetch,
    reductions_in_every_iteration,
    repeated_for_microbatches,
    streams_in_flight,
)
from stablehlo_tools.advice.memory import (
    does_not_fit,
    kept_for_the_backward,
    weights_gathered_again,
)
from stablehlo_tools.advice.precision import wide_collectives
from stablehlo_tools.advice.program import LEAST_SHARE, Program
from stablehlo_tools.advice.shardings import batch_gathered_in_loops, reshards_not_asked_for
from stablehlo_tools.advice.updates import copied_for_loops, missing_donations, replicated_optimizer
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.report.document import Advice, Advised, ProgramReport
from stablehlo_tools.targets.chips import target_of

type Detector = Callable[[Program], Iterator[Advice]]


@dataclass(frozen=True, slots=True)
class Entry:
    """A detector. `hides` is True if it gains only exposed time of collectives."""

    detect: Detector
    hides: bool = False


DETECTORS: tuple[Entry, ...] = (
    Entry(batch_gathered_in_loops),
    Entry(reshards_not_asked_for),
    Entry(reductions_in_every_iteration),
    Entry(repeated_for_microbatches),
    Entry(wide_collectives),
    Entry(replicated_optimizer),
    Entry(missing_donations),
    Entry(copied_for_loops),
    Entry(gathers_to_prefetch, hides=True),
    Entry(batch_to_split, hides=True),
    Entry(streams_in_flight, hides=True),
    Entry(weights_gathered_again, hides=True),
    Entry(kept_for_the_backward),
    Entry(repeated_compute),
    Entry(small_kernels),
    Entry(does_not_fit),
)


def advise(
    given: Artifact,
    explicit: Artifact,
    clock: Clock,
    compiled: ProgramReport | None = None,
    *,
    least: float = LEAST_SHARE,
) -> Advised:
    """Returns the ranked advice for a program. Each gain is for one item; gains do not add up.

    `explicit` is the program with explicit collectives. `compiled` is a compiler's schedule. With
    it, shares are of its total, and items that hide communication gain at most its exposed time.
    Raises ToolError if the program cannot be timed.
    """
    program = Program(given, explicit, clock, least)
    total = program.total_ns if compiled is None else compiled.total_ns
    items = [
        _as_compiled(item, entry, program, compiled)
        for entry in DETECTORS
        for item in _detected(entry, program)
    ]
    above = [item for item in items if item.share >= least and _is_taken(item, program)]
    above.sort(key=lambda item: (-item.gain_ns, -item.gain_bytes, item.id, item.place))
    return Advised(total, least, tuple(above), program.total_ns, _search(given, clock))


def _search(given: Artifact, clock: Clock) -> str:
    """Returns the command that compiles candidates; "" if no compiler targets the hardware."""
    target = target_of(clock.hardware)
    if target is None:
        return ""
    name = given.name if Path(given.name).is_file() else "INPUT"
    words = [name, "--target", target.value, "--hardware", clock.hardware.name]
    return f"stablehlo-tools optimize {shlex.join(words)}"


def _is_taken(item: Advice, program: Program) -> bool:
    return item.pipeline is None or program.takes(item.pipeline)


def _detected(entry: Entry, program: Program) -> list[Advice]:
    """Returns the items of a detector; none if an analysis refuses the program."""
    try:
        return list(entry.detect(program))
    except ToolError:
        return []


def _as_compiled(
    item: Advice, entry: Entry, program: Program, compiled: ProgramReport | None
) -> Advice:
    if compiled is None or not compiled.total_ns:
        return item
    most = compiled.exposed_ns if entry.hides else compiled.total_ns
    gain = min(item.gain_ns, most)
    share = max(gain / compiled.total_ns, item.gain_bytes / program.capacity)
    return replace(item, gain_ns=gain, share=share)
