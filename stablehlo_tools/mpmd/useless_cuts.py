"""Says so where a set is predicted to take longer than its step takes on one rank, and what holds
it up: a loop that lies in one stage whole."""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.diagnostics import Diagnostic, Severity, note, to_place
from stablehlo_tools.mpmd.staging.staging import Staged
from stablehlo_tools.mpmd.staging.weights import Weigher
from stablehlo_tools.transforms.parts.split_layers.marks import range_of

_LOOP = "stablehlo.while"
_MILLI = 1e3


def useless_cut(
    staged: Staged, makespan: float, alone: float, ranks: int, hardware: Hardware
) -> Diagnostic | None:
    """A warning for a set of several ranks that is no faster than one; None for any other. Times in
    seconds: of a step of the set, and of the step on one rank as it is."""
    if ranks == 1 or makespan < alone:
        return None
    loop = _uncut_loop(staged, hardware)
    notes = () if loop is None else (_not_cut(*loop),)
    return Diagnostic(
        Severity.WARNING,
        f"expand-mpmd: this set is slower than one rank: {makespan * _MILLI:.3f} ms a step "
        f"predicted on {ranks} ranks, and {alone * _MILLI:.3f} ms for the step as it is on one; "
        "--compare times other schedules, fewer microbatches keep more work in each",
        to_place(staged.step.loop.op.location),
        notes,
    )


def _uncut_loop(staged: Staged, hardware: Hardware) -> tuple[ir.Operation, float] | None:
    """The heaviest loop of a microbatch that is in one stage, and its share of all work, where that
    is more than a stage should have."""
    weigher = Weigher(hardware)
    ops = [node.op for node in staged.step.staged]
    total = sum(map(weigher.ns, ops))
    whole = [op for op in ops if op.name == _LOOP and range_of(op) is None]
    heaviest = max(whole, key=weigher.ns, default=None)
    if heaviest is None or not total:
        return None
    share = weigher.ns(heaviest) / total
    return (heaviest, share) if share * staged.assignment.stages > 1 else None


def _not_cut(loop: ir.Operation, share: float) -> Diagnostic:
    return note(
        f"this loop is {share:.0%} of the work of a microbatch, and lies in one stage whole: no "
        "layers are found in it to be cut apart, a lax.scan over stacked weights in which each "
        "takes what the one before gave; write them so, or without a loop",
        loop.location,
    )
