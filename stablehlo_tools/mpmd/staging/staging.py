"""Cuts a training step into stages: loops over layers by ranges, all else by what it depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.dataflow import Dataflow
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.entry import entry_function
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.collectives import transfer_time
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.transfers import Transfer
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, Severity, ToolError, note, to_place
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.ir.symbols import functions_by_name
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.mpmd.staging.assignment import Assignment, assign
from stablehlo_tools.mpmd.staging.cutting import cut_units, layer_loops_by_node, units_of
from stablehlo_tools.mpmd.staging.forward import (
    Forward,
    find_forward,
    mark,
    marked,
    marked_forward,
    named_by_user,
)
from stablehlo_tools.mpmd.staging.microbatches import MicrobatchLoop, find_microbatch_loop
from stablehlo_tools.mpmd.staging.op_times import Weigher, kernel_times
from stablehlo_tools.mpmd.staging.split_stage_sums import own_spreads, take_apart
from stablehlo_tools.mpmd.staging.step import TrainingStep
from stablehlo_tools.transforms.parts.split_layers.cut_loops import uncut_loops
from stablehlo_tools.transforms.parts.split_layers.marks import range_of
from stablehlo_tools.transforms.parts.split_weight_gradients.backward_loops import (
    backward_loops,
    layer_chains,
)
from stablehlo_tools.transforms.split_layers import SplitLayersPass
from stablehlo_tools.transforms.split_weight_gradients import SplitWeightGradientsPass

_MUCH = 1e9  # bytes
_NAME = "stablehlo_tools.cut"  # tells a loop that is to be cut from others
_MILLI = 1e3


@dataclass(frozen=True)
class Staged:
    """A step, every op of which has its stage and its phase; it lives as long as its module."""

    module: ir.Module
    step: TrainingStep
    forward: Forward
    assignment: Assignment


def read_step(module: ir.Module) -> TrainingStep:
    """The training step of a module without calls. Raises a located ToolError."""
    block = _block(module)
    effects = Effects(functions_by_name(module))
    loop = find_microbatch_loop(block, effects)
    return TrainingStep(loop, Dataflow.of(block, opened=()), effects)


def own_loop(module: ir.Module, weigher: Weigher) -> MicrobatchLoop | None:
    """The loop over microbatches that a module without calls has already; None without one."""
    try:
        step = read_step(module)
        find_forward(step, weigher)
    except ToolError:
        return None
    return step.loop


def stage_step(module: ir.Module, stages: int, clock: Clock) -> Staged:
    """Rewrites a module so that stages stand apart, and assigns its ops to them.

    Raises a located ToolError where it cannot be cut into so many stages.
    """
    step = read_step(module)
    forward = find_forward(step, Weigher(clock.hardware))
    by_user = named_by_user(step, forward, stages)
    if by_user is not None:
        mark(step, {index: [stage] for index, stage in by_user.items()})
    else:
        _cut(module, step, forward, stages, clock)
    if _has_backward_loops(module):
        SplitWeightGradientsPass().run(module, Diagnostics())
    own_spreads(_block(module))
    staged = _assigned(module, stages)
    while take_apart(staged.step, staged.assignment):
        staged = _assigned(module, stages)
    return staged


def _assigned(module: ir.Module, stages: int) -> Staged:
    step = read_step(module)
    forward = marked_forward(step)
    return Staged(module, step, forward, assign(step, forward, marked(step, forward), stages))


def _cut(
    module: ir.Module, step: TrainingStep, forward: Forward, stages: int, clock: Clock
) -> None:
    """Marks the ops of the forward with balanced stages, and cuts the loops over layers."""
    effects = Effects(functions_by_name(module))
    loops = layer_loops_by_node(step, uncut_loops(entry_function(module), effects))
    units = units_of(step, forward, loops, kernel_times(module, step, clock))
    cuts = cut_units(units, stages, _ns_per_byte(clock), step.loop.op.location)
    marks: dict[int, Sequence[int]] = {}
    wanted: list[tuple[int, ...]] = []
    for index, span in units.spans.items():
        backwards = index in loops and loops[index].reverse
        way = -1 if backwards else 1
        marks[index] = cuts.stages_of(span)[::way]
        if len(marks[index]) > 1:
            _name(step.flow.nodes[index].op, len(wanted))
            wanted.append(cuts.counts(span)[::way])
    mark(step, marks)
    for name, counts in enumerate(wanted):
        number = _number_of(module, name, counts)
        if number is not None:
            SplitLayersPass(counts=counts, loop=number).run(module, Diagnostics())


def _ns_per_byte(clock: Clock) -> float:
    """What a byte more takes between two ranks."""
    some, more = (
        transfer_time(
            Transfer("collective_permute", size, ((0, clock.devices),)),
            clock.hardware,
            2 * clock.devices,
        ).ns
        for size in (_MUCH, 2 * _MUCH)
    )
    return (more - some) / _MUCH


def _name(loop: ir.Operation, name: int) -> None:
    i64 = ir.IntegerType.get_signless(64, loop.context)
    loop.attributes[_NAME] = ir.IntegerAttr.get(i64, name)


def _number_of(module: ir.Module, name: int, counts: tuple[int, ...]) -> int | None:
    """The number of a loop among those that have not been cut; None where it has been cut so, with
    another one. Raises a located ToolError where it has been cut otherwise."""
    block = _block(module)
    named: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if _NAME in op.attributes and ir.IntegerAttr(op.attributes[_NAME]).value == name:
            named.append(op)
        return ir.WalkResult.ADVANCE

    walk(block.owner.operation, visit)
    main = entry_function(module)
    uncut = [key_of(loop.op) for loop in uncut_loops(main, Effects(functions_by_name(module)))]
    numbers = [uncut.index(key_of(op)) for op in named if key_of(op) in uncut]
    if numbers:
        return numbers[0]
    if len(named) != len(counts):
        raise ToolError(
            "expand-mpmd: two loops go over these layers, and balanced stages would cut them "
            "differently; name the stages with jax.named_scope (P5)",
            named[0].location,
        )
    return None


def _has_backward_loops(module: ir.Module) -> bool:
    block = _block(module)
    effects = Effects(functions_by_name(module))
    return bool(backward_loops(layer_chains(block, effects), block, effects))


def _block(module: ir.Module) -> ir.Block:
    return entry_function(module).regions[0].blocks[0]


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
    whole = [op for op in ops if op.name == WHILE and range_of(op) is None]
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
