"""Runs all detectors on a program, and ranks their items."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from stablehlo_tools.advice.advised_program import LEAST_SHARE, AdvisedProgram
from stablehlo_tools.advice.attention import spelled_out_attention
from stablehlo_tools.advice.devices import repeated_compute, small_kernels
from stablehlo_tools.advice.loops_and_batches import (
    batch_to_split,
    gathers_to_prefetch,
    reductions_in_every_iteration,
    repeated_for_microbatches,
    streams_in_flight,
)
from stablehlo_tools.advice.memory_advice import (
    does_not_fit,
    kept_for_the_backward,
    weights_gathered_again,
)
from stablehlo_tools.advice.precision import wide_collectives
from stablehlo_tools.advice.sharding_advice import batch_gathered_in_loops, reshards_not_asked_for
from stablehlo_tools.advice.updates import copied_for_loops, missing_donations, replicated_optimizer
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.diagnostics import ToolError, duration
from stablehlo_tools.report.document import Advice, Advised, ProgramReport
from stablehlo_tools.targets.chips import target_of

type Detector = Callable[[AdvisedProgram], Iterator[Advice]]


DETECTORS: tuple[Detector, ...] = (
    batch_gathered_in_loops,
    reshards_not_asked_for,
    reductions_in_every_iteration,
    repeated_for_microbatches,
    wide_collectives,
    replicated_optimizer,
    missing_donations,
    copied_for_loops,
    gathers_to_prefetch,
    batch_to_split,
    streams_in_flight,
    weights_gathered_again,
    kept_for_the_backward,
    repeated_compute,
    small_kernels,
    spelled_out_attention,
    does_not_fit,
)
# Share of the time: the times of partition's program are only predicted.
_MUCH_MORE = 0.1
# Detectors that gain only exposed time of collectives.
_HIDING = (gathers_to_prefetch, batch_to_split, streams_in_flight, weights_gathered_again)


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
    program = AdvisedProgram(given, explicit, clock, least)
    total = program.total_ns if compiled is None else compiled.total_ns
    items: list[Advice] = []
    for detect in DETECTORS:
        # No items if an analysis refuses the program.
        with suppress(ToolError):
            found = list(detect(program))
            items += [_as_compiled(item, detect, program, compiled) for item in found]
    items += _partitioned_worse(program, compiled)
    above = [
        item
        for item in items
        if item.share >= least and (item.pipeline is None or program.takes(item.pipeline))
    ]
    above.sort(key=lambda item: (-item.gain_ns, -item.gain_bytes, item.id, item.place))
    search = ""  # the command that compiles candidates, if a compiler targets the hardware
    target = target_of(clock.hardware)
    if target is not None:
        name = given.name if Path(given.name).is_file() else "INPUT"
        words = [name, "--target", target.value, "--hardware", clock.hardware.name]
        search = f"stablehlo-tools optimize {shlex.join(words)}"
    return Advised(total, least, tuple(above), program.total_ns, search)


def _partitioned_worse(program: AdvisedProgram, compiled: ProgramReport | None) -> Iterator[Advice]:
    """Detects a compiler's partitioner that sends much more than `partition` would."""
    if compiled is None or not compiled.total_ns or program.as_advised is program:
        return
    with suppress(ToolError):
        after = program.as_advised
        saved = compiled.communication_ns - sum(each.ns for each in after.collectives)
        gain = min(saved, compiled.total_ns - after.total_ns)
        if gain >= _MUCH_MORE * compiled.total_ns:
            yield replace(
                program.advice(
                    "partitioned-worse",
                    gain,
                    f"the compiler's partitioner adds {duration(compiled.communication_ns)} of "
                    f"collectives, and partition {duration(compiled.communication_ns - saved)}",
                    program.given.name,
                    "let partition write the collectives",
                    pipeline=program.pipeline("").rstrip(","),
                ),
                share=gain / compiled.total_ns,
            )


def _as_compiled(
    item: Advice, detect: Detector, program: AdvisedProgram, compiled: ProgramReport | None
) -> Advice:
    """Returns the item with its gain and share of a compiler's schedule."""
    if compiled is None or not compiled.total_ns:
        return item
    most = compiled.exposed_ns if detect in _HIDING else compiled.total_ns
    gain = min(item.gain_ns, most)
    share = max(gain / compiled.total_ns, item.gain_bytes / program.capacity)
    return replace(item, gain_ns=gain, share=share)
