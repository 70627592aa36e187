"""Cuts a training step into stages: loops over layers by ranges, all else by what it depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.entry import entry_function
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.collectives import transfer_time
from stablehlo_tools.cost.work import Transfer
from stablehlo_tools.diagnostics import Diagnostics, ToolError
from stablehlo_tools.ir.symbols import functions_by_name
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.mpmd.staging.assignment import Assignment, assign
from stablehlo_tools.mpmd.staging.cutting import cut_units
from stablehlo_tools.mpmd.staging.dataflow import Dataflow
from stablehlo_tools.mpmd.staging.kernel_times import kernel_times
from stablehlo_tools.mpmd.staging.marks import mark, marked, marked_forward, named_by_user
from stablehlo_tools.mpmd.staging.microbatches import MicrobatchLoop, find_microbatch_loop
from stablehlo_tools.mpmd.staging.spreads import own_spreads
from stablehlo_tools.mpmd.staging.step import Forward, Step, find_forward
from stablehlo_tools.mpmd.staging.units import layer_loops_by_node, units_of
from stablehlo_tools.mpmd.staging.untying import take_apart
from stablehlo_tools.mpmd.staging.weights import Weigher
from stablehlo_tools.transforms.parts.split_layers.cut_loops import uncut_loops
from stablehlo_tools.transforms.parts.split_weight_gradients.backward_loops import (
    backward_loops,
    layer_chains,
)
from stablehlo_tools.transforms.split_layers import SplitLayersPass
from stablehlo_tools.transforms.split_weight_gradients import SplitWeightGradientsPass

_MUCH = 1e9  # bytes
_NAME = "stablehlo_tools.cut"  # tells a loop that is to be cut from others


@dataclass(frozen=True)
class Staged:
    """A step, every op of which has its stage and its phase; it lives as long as its module."""

    module: ir.Module
    step: Step
    forward: Forward
    assignment: Assignment


def read_step(module: ir.Module) -> Step:
    """The training step of a module without calls. Raises a located ToolError."""
    block = _block(module)
    effects = Effects(functions_by_name(module))
    loop = find_microbatch_loop(block, effects)
    return Step(loop, Dataflow.of(block), effects)


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


def _cut(module: ir.Module, step: Step, forward: Forward, stages: int, clock: Clock) -> None:
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
    kind = ir.IntegerType.get_signless(64, loop.context)
    loop.attributes[_NAME] = ir.IntegerAttr.get(kind, name)


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
    found = [uncut.index(key_of(op)) for op in named if key_of(op) in uncut]
    if found:
        return found[0]
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
