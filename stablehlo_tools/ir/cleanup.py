"""Rewrites that leave a program as it is, but plainer.

Ops that are not needed go: computed twice, used by nothing, reshapes that undo each other, carries
of a loop that it hands on as they came. And ops of MHLO that speak of memory, which XLA's
converter from HLO writes, become StableHLO's, which speak of values: a copy is its operand; a
bitcast reads the bytes of a tensor in one layout as those of another tensor in another layout, and
is a transpose to the order in which the elements lie, a reshape, and a transpose back.

    mhlo.bitcast %x {source_layout = [0, 1], result_layout = [1, 0]} : 2x3 -> 3x2
  ==>
    stablehlo.transpose %x, dims = [1, 0]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import (
    BARRIER,
    BROADCAST,
    DYNAMIC_UPDATE_SLICE,
    MANUAL_COMPUTATION,
    RESHAPE,
    SHARDING_CONSTRAINT,
    WHILE,
)
from stablehlo_tools.dialect.traits import Trait, ops_with_any
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.carriers import rebuild
from stablehlo_tools.ir.rewriter import Patterns
from stablehlo_tools.ir.values import has_uses, producer, unconstrained
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import ops_named, terminator, values_used, walk
from stablehlo_tools.ir.while_loop import WhileLoop

# Of these dialects an op has no effect but those below.
_PLAIN = ("stablehlo.", "chlo.", "sdy.sharding_constraint", "sdy.constant")
_KEPT = ops_with_any(
    Trait.TRANSFER | Trait.TOKEN | Trait.BRANCH | Trait.LOOP | Trait.RANDOM | Trait.OPAQUE
) | {"stablehlo.return"}
_AROUND_LOOPS = ops_with_any(Trait.LOOP | Trait.BRANCH) | {MANUAL_COMPUTATION}
_KEEPING = frozenset({SHARDING_CONSTRAINT, RESHAPE})


def share_common(module: ir.Module) -> None:
    """Runs MLIR's common subexpression elimination in each manual computation.

    Handles of ops in them must not be used afterwards.
    """
    computations: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name != MANUAL_COMPUTATION:
            return ir.WalkResult.ADVANCE
        computations.append(op)
        return ir.WalkResult.SKIP

    walk(module.operation, visit)
    manager = bindings.parse_pass_pipeline(f"{MANUAL_COMPUTATION}(cse)", module.context)
    for op in computations:
        manager.run(op)


def share_all(module: ir.Module) -> None:
    """Runs MLIR's common subexpression elimination; handles of ops must not be used afterwards."""
    bindings.parse_pass_pipeline("builtin.module(cse)", module.context).run(module.operation)


def erase_unused(block: ir.Block) -> None:
    """Erases the ops of a block, and of blocks in it, whose results nothing uses; those with
    an effect, or that may have one in a region, stay."""
    for view in reversed(list(block.operations)):
        op = view.operation
        if _only_computes(op) and not any(map(has_uses, op.results)):
            op.erase()
            continue
        for region in op.regions:
            for inner in region.blocks:
                erase_unused(inner)


def drop_unused_carries(block: ir.Block) -> None:
    """Takes from the loops of a block, and of blocks in it, what they carry for nothing: what is
    read by nothing but its own next value, also where loops in them hand it on; and erases what is
    unused then.

    Handles of these loops must not be used afterwards.
    """
    for view in reversed(list(block.operations)):
        op = view.operation
        if _may_lose_carries(op):
            _drop_carries(op)
        elif _only_computes(op) and not any(map(has_uses, op.results)):
            op.erase()
        else:
            for region in op.regions if op.name in _AROUND_LOOPS else ():
                for inner in region.blocks:
                    drop_unused_carries(inner)


def _only_computes(op: ir.Operation) -> bool:
    return bool(len(op.results)) and op.name.startswith(_PLAIN) and op.name not in _KEPT


def _may_lose_carries(op: ir.Operation) -> bool:
    return op.name == WHILE and "mhlo.sharding" not in op.attributes


def _live(loop: ir.Operation, wanted: set[int]) -> tuple[set[int], set[ir.Value]]:
    """The carries that a loop needs for some of them, and for what it does; and the values that its
    regions need for these."""
    body = WhileLoop(loop)
    live = wanted.union(filter(body.is_read_by_condition, range(len(loop.operands))))
    while True:
        needed = _needed(body.block, {body.ends[carry] for carry in live})
        more = {c for c, argument in enumerate(body.arguments) if argument in needed} - live
        if not more:
            break
        live |= more
    for view in body.condition.operations:
        needed.update(values_used(view.operation))
    return live, needed


def _needed(block: ir.Block, ends: set[ir.Value]) -> set[ir.Value]:
    """What the ops of a block need for some of what it hands on, and for what it does."""
    needed = set(ends)
    for view in reversed(list(block.operations)[:-1]):
        op = view.operation
        if _may_lose_carries(op):
            wanted = {carry for carry, result in enumerate(op.results) if result in needed}
            live, inside = _live(op, wanted)
            needed.update(inside, (op.operands[carry] for carry in live))
        elif not _only_computes(op) or any(result in needed for result in op.results):
            needed.update(values_used(op))
    return needed


def _drop_carries(loop: ir.Operation) -> None:
    """Drops what a loop carries for nothing, and what loops in it do."""
    wanted = {carry for carry, result in enumerate(loop.results) if has_uses(result)}
    kept = sorted(_live(loop, wanted)[0])
    condition, body = (region.blocks[0] for region in loop.regions)
    end = terminator(body)
    if len(kept) < len(loop.operands):
        rebuild(end, [end.operands[carry] for carry in kept], [])
    drop_unused_carries(body)
    if len(kept) == len(loop.operands):
        return
    for block in (condition, body):
        for carry in reversed(range(len(loop.operands))):
            if carry not in kept:
                block.erase_argument(carry)
    attributes = dict(loop.attributes.items())
    if "sdy.sharding" in attributes:
        stated = list(bindings.TensorShardingPerValueAttr(attributes["sdy.sharding"]).shardings)
        attributes["sdy.sharding"] = bindings.TensorShardingPerValueAttr.get(
            [stated[carry] for carry in kept], loop.context
        )
    keep_results(loop, kept, attributes)


def trim_barriers(block: ir.Block) -> None:
    """Takes from the barriers of a block what nothing uses behind them."""
    for view in list(block.operations):
        op = view.operation
        if op.name != BARRIER:
            continue
        used = [number for number, result in enumerate(op.results) if has_uses(result)]
        if not used or len(used) == len(op.results):
            continue
        keep_results(op, used, {})


def keep_results(
    op: ir.Operation, kept: Sequence[int], attributes: Mapping[str, ir.Attribute]
) -> None:
    """Puts an op whose result i is what becomes of operand i, with some of these and with its
    regions, in its place; nothing uses the other results."""
    operands = [op.operands[number] for number in kept]
    types = [op.results[number].type for number in kept]
    build = Builder(ir.InsertionPoint(op), op.location)
    new = build.create(op.name, operands, types, attributes, regions=len(op.regions))
    for source, target in zip(op.regions, new.regions, strict=True):
        source.blocks[0].append_to(target)
    for number, result in zip(kept, new.results, strict=True):
        op.results[number].replace_all_uses_with(result)
    op.erase()


def fold_reshapes(module: ir.Module) -> None:
    """Lets a value stand for what reshapes of it make, where that has its shape again."""
    for op in ops_named(module.operation, {RESHAPE}):
        result = op.results[0]
        source = producer(op.operands[0])
        while source is not None and source.name == RESHAPE:
            if source.operands[0].type == result.type:
                result.replace_all_uses_with(source.operands[0])
                break
            source = producer(source.operands[0])


def fold_broadcasts(module: ir.Module) -> None:
    """Lets a broadcast of a broadcast be one of what that repeats."""
    for op in ops_named(module.operation, {BROADCAST}):
        inner = producer(op.operands[0])
        if inner is None or inner.name != BROADCAST:
            continue
        dims = integers(op, "broadcast_dimensions")
        taken = [dims[dim] for dim in integers(inner, "broadcast_dimensions")]
        op.operands[0] = inner.operands[0]
        op.attributes["broadcast_dimensions"] = ir.DenseI64ArrayAttr.get(taken, op.context)


def link_loops(module: ir.Module) -> None:
    """Lets what a loop is given stand for a result that every iteration hands on as it came; and a
    stack that one loop has written stand for reshapes of it that another loop is given.

    Sharding constraints on the way are dropped.
    """

    for op in ops_named(module.operation, {WHILE}):
        for carry, value in enumerate(op.operands):
            source = _stack(value)
            if source is not None:
                op.operands[carry] = source
        for carry in sorted(WhileLoop(op).invariant):
            op.results[carry].replace_all_uses_with(op.operands[carry])


def _stack(value: ir.Value) -> ir.Value | None:
    """The result of a loop that a value is, if the loop wrote it row by row."""
    stack, maker = value, producer(value)
    while maker is not None and maker.name in _KEEPING:
        stack = maker.operands[0]
        maker = producer(stack)
    if maker is None or maker.name != WHILE or stack.type != value.type:
        return None
    carry = ir.OpResult(stack).result_number
    ends = terminator(While(maker).body).operands
    end = producer(unconstrained(ends[carry]))
    return stack if end is not None and end.name == DYNAMIC_UPDATE_SLICE else None


def write_as_values(module: ir.Module) -> None:
    """Rewrites the copies and bitcasts of a module; those that change element types stay."""
    _AS_VALUES.apply(module.operation)


_AS_VALUES = Patterns()


# mhlo.copy(x) -> x
# mhlo.bitcast(x) -> transpose(reshape(transpose(x)))
@_AS_VALUES.on("mhlo.copy", "mhlo.bitcast")
def _write_as_value(op: ir.Operation, build: Builder) -> ir.Value | None:
    given, result = op.operands[0].type, op.results[0].type
    for type_ in (given, result):
        if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
            return None
    if ir.RankedTensorType(given).element_type != ir.RankedTensorType(result).element_type:
        return None
    return op.operands[0] if op.name == "mhlo.copy" else reread(op)


def reread(op: ir.Operation) -> ir.Value:
    """What a bitcast gives, from the most to the least major dimension and back."""
    value, wanted = op.operands[0], shape_of(op.results[0])
    build = Builder(ir.InsertionPoint(op), op.location)
    lying = _transposed(build, value, major_first(op, "source_layout", len(shape_of(value))))
    order = major_first(op, "result_layout", len(wanted))
    shape = [wanted[dimension] for dimension in order]
    read = lying if shape_of(lying) == shape else build.reshape(lying, shape)
    return _transposed(build, read, [order.index(d) for d in range(len(order))])


def major_first(op: ir.Operation, name: str, rank: int) -> list[int]:
    """The dimensions of a layout, which lists the most minor first; by default it is the last."""
    layout = op.attributes.get(name)
    if layout is None:
        return list(range(rank))
    return [int(d) for d in np.array(ir.DenseElementsAttr(layout)).ravel()][::-1]


def _transposed(build: Builder, value: ir.Value, order: Sequence[int]) -> ir.Value:
    if list(order) == sorted(order):
        return value
    shape = shape_of(value)
    type_ = build.tensor([shape[d] for d in order], element_of(value))
    return build.op("transpose", [value], type_, permutation=build.integers(order))
