"""Finds how much to move to the host's memory so that a program fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import GIB, Diagnostic, ToolError, note, size
from stablehlo_tools.dialect.names import BROADCAST, RESHAPE
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.values import producer
from stablehlo_tools.overlap.compilers.expected import Expected
from stablehlo_tools.transforms.parts.offload.rows_to_host import bytes_of_rows, movable, move
from stablehlo_tools.transforms.parts.offload.state import move_state, state_groups


@dataclass(frozen=True)
class OffloadedProgram:
    """A program with the first `count` movable stacks and states moved, and its expected run."""

    count: int
    module: ir.Module
    run: Expected


def check_limits(
    name: str, memory_limit: float | None, margin: float, precondition: str, place: ir.Location
) -> None:
    """Raises a located ToolError if the limit is not positive, or the margin is not in [0, 1)."""
    wrong = ""
    if memory_limit is not None and not memory_limit > 0:
        wrong = "memory-limit must be a positive number of GiB"
    elif not 0.0 <= margin < 1.0:
        wrong = "margin must be at least 0 and less than 1"
    if wrong:
        raise ToolError(f"{name}: {wrong} ({precondition})", place)


def does_not_fit(
    name: str,
    least: float,
    limit: float,
    precondition: str,
    place: ir.Location,
    *,
    stated: float | None,
) -> ToolError:
    """Returns the error of a pass that finds no program within a limit.

    `least`: the fewest bytes that it found. `stated`: the limit of the option, if it has one.
    """
    # Three digits, rounded up.
    step = 10.0 ** (math.floor(math.log10(least / GIB)) - 2)
    enough = math.ceil(least / GIB / step) * step
    return ToolError(
        f"{name}: the least memory that was found is {size(least)} a device, but the limit "
        f"is {size(limit)} ({precondition})",
        place,
        instead=(f"memory-limit={stated:g}", f"memory-limit={enough:g}")
        if stated is not None
        else None,
    )


def check_host_link(name: str, hardware: str, precondition: str, place: ir.Location) -> None:
    """Raises a located ToolError if the hardware profile has no data on the link to the host."""
    if load_hardware(hardware).host is None:
        raise ToolError(
            f"{name}: the profile {hardware!r} has no [host] section with the speed of its link to "
            f"the host ({precondition})",
            place,
        )


def offload_to_fit(
    module: ir.Module, run: Callable[[ir.Module], Expected], safe: float, *, state: bool = False
) -> OffloadedProgram | None:
    """Returns a copy with as little moved as needed for at most `safe` peak bytes.

    If that is impossible, returns the copy with the lowest peak; None if there is nothing to move.
    `run` predicts a program's run. `state`: also moves the optimizer's state, and that first.
    """
    groups = len(state_groups(module)) if state else 0
    most = groups + len(movable(module))

    def offload_first(count: int) -> OffloadedProgram:
        draft = copy_module(module)
        of_state = min(count, groups)
        for rows in movable(draft)[: count - of_state]:
            move(rows)  # before the state: this replaces loops whose results are gradients
        if of_state:
            move_state(draft, state_groups(draft)[:of_state])
        return OffloadedProgram(count, draft, run(draft))

    low, high, best = 0, 1, None  # not enough, perhaps enough
    while low < most and high > low:
        tried = offload_first(min(high, most))
        if best is None or tried.run.peak_bytes < best.run.peak_bytes:
            best = tried
        if tried.run.peak_bytes <= safe:
            # Bisects for the smallest count that is enough, between `low` and `tried.count`.
            while tried.count - low > 1:
                fewer = offload_first((low + tried.count) // 2)
                if fewer.run.peak_bytes <= safe:
                    tried = fewer
                else:
                    low = fewer.count
            return tried
        low, high = tried.count, min(2 * high, most)
    return best


def how_to_run(name: str, place: ir.Location) -> Diagnostic:
    """Returns the note on the flag that lets XLA:GPU hide the copies.

    Inside a command buffer XLA:GPU serializes them with all compute (measured on an H100,
    docs/project/benchmarks.md).
    """
    return note(
        f"{name}: XLA:GPU overlaps host copies with compute only without command buffers: set "
        "XLA_FLAGS=--xla_gpu_enable_command_buffer=",
        place,
    )


def offload_notes(module: ir.Module, count: int, *, state: bool = False) -> list[Diagnostic]:
    """Returns notes on the moved stacks and states; `module` is the program before."""
    groups = state_groups(module)[:count] if state else []
    place = module.operation.location
    notes = [
        note(f"to the host's memory: {size(g.bytes)} of state, {g.path}", place) for g in groups
    ]
    for rows in movable(module)[: count - len(groups)]:
        whole = bytes_of_rows(rows)
        each = f"{size(whole / rows.trips)} of each of {rows.trips} iterations"
        value = rows.updates[0].operands[1]
        while (maker := producer(value)) is not None and maker.name in (RESHAPE, BROADCAST):
            value = maker.operands[0]
        notes.append(note(f"to the host's memory: {size(whole)}, {each}", value.location))
    return notes
