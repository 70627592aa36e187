"""Finds the loops of a module that may be those of pipelines, and prepares them for tracing.

A pipeline is recognised by its carries. In a manual computation, the loop permutes them between the
devices of an axis. In one program, it rotates them along a dimension.

`jax.value_and_grad` inside of `jax.shard_map` puts a pipeline and its backward into one manual
computation. It is split in two, as jax itself does if it differentiates the shard_map:

    %r = sdy.manual_computation(%x) { pipeline; ...; its backward; ... }
  ==>
    %rows = sdy.manual_computation(%x) { pipeline }
    %r = sdy.manual_computation(%x, %rows) { ...; its backward; ... }
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_carries import Trees
from stablehlo_tools.analysis.loops import FORMATTING, LoopBody
from stablehlo_tools.analysis.replica_groups import AxisRef
from stablehlo_tools.analysis.shardings import manual_axes, sharding_per_value, tensor_sharding
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integer
from stablehlo_tools.dialect.names import (
    ADD,
    ALL_REDUCE,
    COLLECTIVE_PERMUTE,
    DYNAMIC_SLICE,
    MANUAL_COMPUTATION,
    REDUCE_SCATTER,
    SCATTER,
    SELECT,
    SHARDING_CONSTRAINT,
    SLICE,
    WHILE,
)
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.inline import copy_with, rename
from stablehlo_tools.ir.rewriter import replace
from stablehlo_tools.ir.values import CONSTANTS, has_uses, is_float, producer, skip_constraints
from stablehlo_tools.ir.views import Combining, ManualComputation, While
from stablehlo_tools.ir.walk import ops_named, terminator, values_used
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import (
    LoopRegion,
    Ranks,
    manual_around,
    mesh_of,
    ticks_of,
)
from stablehlo_tools.transforms.parts.fold_pipeline.tracing import adds

# Concatenations, pads and updates: with slices, all ways to shift a tensor along a dimension.
_PUTTING = ops_with(Trait.JOIN) | {SCATTER}


def loops_of(block: ir.Block) -> Iterator[ir.Operation]:
    """Yields the loops of a block and of manual computations in it, in order; none inside of a
    loop."""
    for view in block.operations:
        op = view.operation
        if op.name == WHILE:
            yield op
        elif op.name == MANUAL_COMPUTATION:
            yield from loops_of(ManualComputation(op).body)


def permutes_of(loop: ir.Operation) -> list[ir.Operation]:
    """Returns the collective_permutes that are ops of a loop's body itself."""
    body = While(loop).body
    return [op.operation for op in body.operations if op.operation.name == COLLECTIVE_PERMUTE]


def rotations_of(loop: ir.Operation) -> list[ir.Operation]:
    """Returns the ops of a loop's body that shift a tensor along a dimension. A pipeline in one
    program shifts its state so: it concatenates, pads or scatters slices of the state."""
    body = While(loop).body
    changing = set(While(loop).carries) - set(While(loop).yields)
    return [
        op
        for op in (view.operation for view in body.operations)
        if op.name in _PUTTING
        and any(
            maker is not None
            and maker.name == SLICE
            and shape_of(maker.operands[0]) == shape_of(op.results[0]) != shape_of(maker.results[0])
            and (skip_constraints(maker.operands[0]) in changing or _is_carried(op))
            for maker in map(producer, op.operands)
        )
    ]


def _is_carried(op: ir.Operation) -> bool:
    """Returns True if a result reaches the next iteration through ops that only move elements."""
    pending = list(op.results)
    while pending:
        for use in pending.pop().uses:
            user = use.owner.operation
            if user.name == "stablehlo.return":
                return True
            if user.name in FORMATTING or user.name in _PUTTING | {SELECT}:
                pending += user.results
    return False


def may_be_pipeline(loop: ir.Operation) -> bool:
    """Returns True if a loop moves elements as a pipeline does: between ranks, or along a
    dimension."""
    return bool(rotations_of(loop) if manual_around(loop) is None else permutes_of(loop))


def backward_of(anchor: ir.Operation, ticks: int) -> ir.Operation | None:
    """Returns the loop of a pipeline's backward, which uses residuals of its ticks; None if there
    is none.

    `anchor` is the pipeline's loop, or the manual computation around it. Without a manual
    computation, a residual is stacked along dimension 0, of size `ticks`.
    """
    pending: list[ir.Value] = list(anchor.results)
    while pending:
        value = pending.pop()
        for use in value.uses:
            op = use.owner.operation
            loops: list[ir.Operation] = []
            if op.name == MANUAL_COMPUTATION:
                loops = [loop for loop in loops_of(ManualComputation(op).body) if permutes_of(loop)]
            elif op.name == WHILE:
                loops = [op] if ticks in shape_of(value)[:1] else []
            elif op.name in FORMATTING:
                pending += op.results
            if loops:
                return loops[0]
    return None


def axis_of(loop: ir.Operation, manual: ir.Operation, facts: ModuleFacts) -> Ranks | None:
    """Returns the ranks along the axis in which a loop's permutes move elements; None for no
    axis."""
    for axis in sorted(manual_axes(manual)):
        groups = Ranks.groups(axis, manual, facts)
        together = {device: number for number, g in enumerate(groups) for device in g}
        if not groups or len(groups[0]) < 2:
            continue
        for op in permutes_of(loop):
            pairs = facts.groups(Collective(op, op, "collective_permute")) or ()
            # The permute stays within groups that differ only along this axis.
            if pairs and all(together[a] == together[b] for a, b in pairs):
                return Ranks.from_groups(axis, groups, facts)
    return None


def region_of(loop: ir.Operation, ranks: Ranks, values: DeviceValues) -> LoopRegion | str:
    """Returns the loop as the ranks run it, or the reason why its number of trips is unknown."""
    ticks = ticks_of(loop, values)
    return ticks if isinstance(ticks, str) else LoopRegion(loop, ticks, ranks, values)


def hoist_slices(loop: ir.Operation) -> None:
    """Splits each slice in a stage's inner loop in two: one by the tick, one by the layer.

    A stage may select its chunk of the weights and its layer by one dynamic_slice in the loop over
    layers. The inner loop would then hold the weights of all chunks. Split in two, the slice of the
    chunk belongs to the tick.
    """
    for view in list(While(loop).body.operations):
        inner = view.operation
        if inner.name != WHILE:
            continue
        for slicing in list(While(inner).body.operations):
            if slicing.operation.name == DYNAMIC_SLICE:
                _hoist(slicing.operation, inner)


def take_from_outside(loop: ir.Operation) -> None:
    """Replaces uses of integer carries that a loop does not change by their initial values. Tensors
    too large to be evaluated, such as the predicate of a select between whole states, are then
    traced through the ops that make them."""
    body = While(loop).body
    end = terminator(body)
    for argument, operand, after in zip(body.arguments, loop.operands, end.operands, strict=True):
        if argument != after or not isinstance(element_of(argument), ir.IntegerType):
            continue
        for use in list(argument.uses):
            if use.owner.operation != end:
                use.owner.operation.operands[use.operand_number] = operand


def add_terms_first(loop: ir.Operation) -> None:
    """Makes each iteration add up its own terms before it adds them to an accumulator. The
    gradients of weights that a stage uses several times are then one term of each tick."""
    body = LoopBody(loop, Effects({}))
    trees = Trees(body)
    for carry, end in enumerate(body.ends):
        root = producer(end)
        if root is None or root.name != ADD or root.block != body.block or not is_float(end.type):
            continue
        tree = trees.over(root)
        if isinstance(tree, str) or tree.carry != carry or len(tree.leaves) < 2:
            continue
        if any(leaf.negative for leaf in tree.leaves):
            continue
        build = Builder(ir.InsertionPoint(root), root.location)
        first, *others = (leaf.value for leaf in tree.leaves)
        for term in others:
            first = build.same("add", first, term)
        end.replace_all_uses_with(build.same("add", body.arguments[carry], first))
        for node in tree.nodes:
            node.erase()


def entering_alike(forward: LoopRegion, backward: LoopRegion) -> set[ir.Value]:
    """Returns the arguments of a backward that are the same on all ranks, as the forward returned
    them. jax returns values of unchecked replication as one row for each device."""
    before, behind = forward.manual, backward.manual
    if before is None or behind is None:
        return set()
    differing = forward.differing_around()
    alike: set[ir.Value] = set()
    for number, operand in enumerate(behind.operands):
        source = skip_constraints(operand)
        maker = producer(source)
        if maker is None or maker != before:
            continue
        result = ir.OpResult(source).result_number
        stated = backward.sharding("in_shardings", number)
        if (
            stated == forward.sharding("out_shardings", result)
            and forward.yielded_shard(result) not in differing
        ):
            alike.add(ManualComputation(behind).body.arguments[number])
    return alike


def multiply_instead_of_adding_alike(region: LoopRegion, alike: Collection[ir.Value]) -> bool:
    """Replaces sums over all ranks of values that are equal on all ranks by products. jax writes
    such sums around a region's loop, for the cotangents of values that all ranks use. A
    reduce_scatter becomes a slice of the product. Returns True if there was one; do not use the
    region afterwards."""
    changed = False
    if region.manual is None:
        return changed
    differing = region.differing_around(alike)
    for view in list(ManualComputation(region.manual).body.operations):
        op = view.operation
        if op.name not in (ALL_REDUCE, REDUCE_SCATTER) or not adds(Combining(op).combiner):
            continue
        groups = region.groups(op)
        ranks, scatters = region.ranks, op.name == REDUCE_SCATTER
        joins_all = ranks.is_in_order if scatters else ranks.is_whole
        if groups is None or not all(map(joins_all, groups)):
            continue
        build = Builder(ir.InsertionPoint(op), op.location)
        for operand, result in zip(op.operands, op.results, strict=True):
            if operand in differing:
                continue
            product = build.same("multiply", operand, build.splat_like(ranks.count, operand))
            if scatters:
                # Slice out the part of the value that this rank keeps of the reduce_scatter.
                dim, sizes = integer(op, "scatter_dimension"), shape_of(op.results[0])
                table = build.table([rank * sizes[dim] for rank in region.ranks.rank_of])
                unsigned = ir.IntegerType.get_unsigned(32, build.context)
                device = build.op("partition_id", [], build.tensor([], unsigned))
                start = build.reshape(build.dynamic_slice(table, [device], [1]), [])
                zero = build.i32(0)
                starts = [start if place == dim else zero for place in range(len(sizes))]
                product = build.dynamic_slice(product, starts, sizes)
            result.replace_all_uses_with(product)
            changed = True
        if not any(map(has_uses, op.results)):
            op.erase()
    return changed


def part_integers(loop: ir.Operation) -> None:
    """Clones a loop after itself for results that depend on integers alone, such as random keys
    that a step counts on: no stage computes them. Results that another loop uses stay, as they
    control it."""
    body = While(loop).body
    apart = [
        number
        for number, value in enumerate(loop.results)
        if has_uses(value)
        and not any(use.owner.operation.name == WHILE for use in value.uses)
        and _follows_from_integers(body, number)
    ]
    if not apart:
        return
    operations = list(loop.block.operations)
    place = next(n for n, view in enumerate(operations) if view.operation == loop)
    # `drop_unused_carries` later leaves each of the two loops only its own carries.
    copy = loop.clone(ip=ir.InsertionPoint(operations[place + 1].operation))
    for number in apart:
        loop.results[number].replace_all_uses_with(copy.results[number])


def _follows_from_integers(body: ir.Block, carry: int) -> bool:
    """Returns True if a carry of a loop depends on integers alone."""
    ends = list(terminator(body).operands)
    numbers: dict[ir.Value, int] = {a: n for n, a in enumerate(body.arguments)}
    pending, seen = [ends[carry], body.arguments[carry]], set[ir.Value]()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        type_ = value.type
        if not isinstance(type_, ir.RankedTensorType):
            return False
        if not isinstance(type_.element_type, ir.IntegerType):
            return False
        op = producer(value)
        if op is None and value in numbers:
            pending.append(ends[numbers[value]])
        elif op is not None and op.block == body:
            pending += values_used(op)
    return True


def _hoist(op: ir.Operation, inner: ir.Operation) -> None:
    """Splits a slice in a loop: positions that are known outside of the loop are sliced before
    it."""
    whole, *starts = op.operands
    early = [d for d, start in enumerate(starts) if _is_outside(start, inner)]
    makers = {d: producer(starts[d]) for d in early}
    moving = [d for d, maker in makers.items() if maker is None or maker.name not in CONSTANTS]
    if not _is_outside(whole, inner) or not moving or len(early) == len(starts):
        return
    shape, sizes = shape_of(whole), shape_of(op.results[0])
    outer = Builder(ir.InsertionPoint(inner), op.location)
    zero = outer.splat_like(0, starts[moving[0]])
    first = outer.dynamic_slice(
        whole,
        [starts[d] if d in moving else zero for d in range(len(starts))],
        [sizes[d] if d in moving else shape[d] for d in range(len(starts))],
    )
    op.operands[0] = first
    for dim in moving:
        op.operands[1 + dim] = zero


def _is_outside(value: ir.Value, loop: ir.Operation) -> bool:
    """Returns True if a value is defined before a loop, or is an argument of a block around it."""
    owner = value.owner
    block = owner if isinstance(owner, ir.Block) else owner.operation.block
    around = loop.block
    while True:
        if block == around:
            return True
        parent = around.owner.operation
        if parent.name in ("func.func", "builtin.module"):
            return False
        around = parent.block


def erase_open_constraints(root: ir.Operation) -> None:
    """Erases sharding constraints that leave all dimensions open. jax writes them wherever an axis
    of the mesh is automatic."""
    for op in ops_named(root, {SHARDING_CONSTRAINT}):
        sharding = bindings.TensorShardingAttr(op.attributes["sharding"])
        dims = [bindings.SdyDimensionShardingAttr(dim) for dim in sharding.dimension_shardings]
        says_more = len(sharding.replicated_axes) or len(sharding.unreduced_axes)
        if not says_more and not any(len(dim.axes) or dim.is_closed for dim in dims):
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()


_AGAIN = CONSTANTS | ops_with(Trait.DEVICE_ID)


def separate_backward(region: LoopRegion) -> bool:
    """Splits the manual computation after a region's loop, if a later loop in it permutes and uses
    stacked residuals of the ticks. Returns True if it did.

    Later ops may use values of earlier ones. Constants and the like are computed again, and
    arguments are passed to both. Any other value is returned as one device's row of a whole value,
    whose first dimension all axes divide:

    %whole = sdy.manual_computation ... { ... sdy.return %row : tensor<1x2xf32> }
             out_shardings=[[{"data", "stage"}, {}]] ... -> tensor<8x2xf32>
    """
    manual = region.manual
    if manual is None:
        return False
    block: ir.Block = ManualComputation(manual).body
    ops = [view.operation for view in block.operations]
    place = ops.index(region.loop) + 1
    later = ops[place:]
    if not any(
        op.name == WHILE
        and permutes_of(op)
        and any(
            producer(value) == region.loop and shape_of(value)[:1] == [region.ticks]
            for value in op.operands
        )
        for op in later
    ):
        return False
    earlier = set(ops[:place])
    used = [
        value
        for value in dict.fromkeys(value for op in later for value in values_used(op))
        if (value.owner == block if (op := producer(value)) is None else op in earlier)
    ]
    again = [value for value in used if _is_made_again(value)]
    arguments = [value for value in used if producer(value) is None]
    others = {*again, *arguments}
    handed = [value for value in used if value not in others]
    build = Builder(ir.InsertionPoint(later[0]), manual.location)
    rows = [build.reshape(value, [1, *shape_of(value)]) for value in handed]

    # Types and shardings of the rows of all devices.
    axes = [(name, size) for name, size in region.mesh_axes() if name in manual_axes(manual)]
    count, refs = prod(size for _, size in axes), tuple(AxisRef(name) for name, _ in axes)
    types: list[ir.Type] = []
    shardings: list[ir.Attribute] = []
    for row in rows:
        shape = [count, *shape_of(row)[1:]]
        types.append(ir.RankedTensorType.get(shape, element_of(row), loc=manual.location))
        dims = [(refs, False), *[((), False)] * (len(shape) - 1)]
        shardings.append(tensor_sharding(mesh_of(manual), dims, row.context))

    first = _like(manual, types, list(manual.operands), "out_shardings", shardings)
    numbers = [ir.BlockArgument(value).arg_number for value in arguments]
    listed = sharding_per_value(manual.attributes["in_shardings"])
    second = _like(
        manual,
        [result.type for result in manual.results],
        [*(manual.operands[number] for number in numbers), *first.results],
        "in_shardings",
        [*(listed[number] for number in numbers), *shardings],
    )
    given = [value.type for value in (*arguments, *rows)]
    inner = second.regions[0].blocks.append(*given, arg_locs=[manual.location] * len(given))
    end = later[-1].clone(ip=ir.InsertionPoint(inner))
    for op in later[:-1]:
        op.move_before(end)
    later[-1].erase()

    # Values of the first block, and their replacements in the second.
    start = ir.InsertionPoint.at_block_begin(inner)
    build = Builder(start, manual.location)
    values: dict[ir.Value, ir.Value] = dict(zip(arguments, inner.arguments, strict=False))
    for value, row in zip(handed, list(inner.arguments)[len(arguments) :], strict=True):
        values[value] = build.reshape(row, shape_of(value))
    for value in again:
        _make_again(value, values, start)
    for view in inner.operations:
        rename(view.operation, values)
    Builder(ir.InsertionPoint(block), manual.location).create("sdy.return", rows, [])
    block.append_to(first.regions[0])
    replace(manual, second.results)
    return True


def _like(
    manual: ir.Operation,
    types: list[ir.Type],
    operands: list[ir.Value],
    name: str,
    shardings: list[ir.Attribute],
) -> ir.Operation:
    """Creates a manual computation with the attributes of another one, but for one of per-value
    shardings, and with other operands and results. Its body is still to be written."""
    per_value = bindings.TensorShardingPerValueAttr.get(shardings, manual.context)
    attributes = {**dict(manual.attributes.items()), name: per_value}
    build = Builder(ir.InsertionPoint(manual), manual.location)
    return build.create(MANUAL_COMPUTATION, operands, types, attributes, regions=1)


def _is_made_again(value: ir.Value) -> bool:
    """Returns True if a value is a constant or a device id, or an integer scalar computed from
    them."""
    op = producer(value)
    if op is None or len(op.regions) or len(op.results) != 1:
        return False
    if op.name in _AGAIN:
        return True
    is_integer = isinstance(element_of(value), ir.IntegerType) and not shape_of(value)
    return is_integer and all(map(_is_made_again, op.operands))


def _make_again(value: ir.Value, made: dict[ir.Value, ir.Value], point: ir.InsertionPoint) -> None:
    """Computes a value again at a point, and notes it in `made`."""
    if value not in made:
        op = producer(value)
        assert op is not None
        for operand in op.operands:
            _make_again(operand, made, point)
        made[value] = copy_with(op, made, point).results[0]
