"""Cleans up a module without changing the values it computes.

Removes common subexpressions, unused ops, reshapes that undo each other, and dead and
loop-invariant carries. Rewrites the MHLO ops on memory that XLA's converter from HLO writes to ops
on values. A copy becomes its operand. A bitcast reads the bytes of a tensor in one layout as a
tensor in another layout. It becomes a transpose to the order of the elements in memory, a reshape,
and a transpose back.

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
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.ir.carriers import rebuild
from stablehlo_tools.ir.rewriter import Patterns
from stablehlo_tools.ir.values import has_uses, producer, skip_constraints
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import ops_named, terminator, values_used, walk
from stablehlo_tools.ir.while_loop import WhileLoop

# Ops of these dialects are pure, except those in _KEPT.
_PLAIN = ("stablehlo.", "chlo.", "sdy.sharding_constraint", "sdy.constant")
_KEPT = ops_with_any(
    Trait.TRANSFER | Trait.TOKEN | Trait.BRANCH | Trait.LOOP | Trait.RANDOM | Trait.OPAQUE
) | {"stablehlo.return"}
_AROUND_LOOPS = ops_with_any(Trait.LOOP | Trait.BRANCH) | {MANUAL_COMPUTATION}
_KEEPING = frozenset({SHARDING_CONSTRAINT, RESHAPE})


def share_common(module: ir.Module) -> None:
    """Runs MLIR's common subexpression elimination in each manual computation.

    Do not use handles of ops in the manual computations afterwards.
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
    """Runs MLIR's common subexpression elimination; do not use handles of ops afterwards."""
    bindings.parse_pass_pipeline("builtin.module(cse)", module.context).run(module.operation)


def erase_unused(block: ir.Block) -> None:
    """Erases the ops of a block, and of nested blocks, with unused results, in place.

    Ops that may have an effect, also in a region, stay.
    """
    for view in reversed(list(block.operations)):
        op = view.operation
        if _only_computes(op) and not any(map(has_uses, op.results)):
            op.erase()
            continue
        for region in op.regions:
            for inner in region.blocks:
                erase_unused(inner)


def drop_unused_carries(block: ir.Block) -> None:
    """Drops the dead carries of the loops of a block, and of nested blocks, in place.

    A carry is dead if only its own next value reads it, also through the carries of inner loops.
    Erases the ops that are unused afterwards. Do not use handles of these loops afterwards.
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
    """Returns the live carries of a loop, given the `wanted` results, and the values that its
    regions read to compute them."""
    body = WhileLoop(loop)
    live = wanted.union(filter(body.is_read_by_condition, range(len(loop.operands))))
    # A live carry's yield may read further carries, so repeat until none is added.
    while True:
        needed = _needed_values(body.block, {body.ends[carry] for carry in live})
        more = {c for c, argument in enumerate(body.arguments) if argument in needed} - live
        if not more:
            break
        live |= more
    for view in body.condition.operations:
        needed.update(values_used(view.operation))
    return live, needed


def _needed_values(block: ir.Block, ends: set[ir.Value]) -> set[ir.Value]:
    """Returns the values that a block needs for the given yielded values and for its effects."""
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
    """Drops the dead carries of a loop and of the loops in it."""
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
    """Drops the operands of a block's barriers whose results are unused."""
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
    """Replaces an op by one with only the operands and results `kept`, and its regions.

    Result i of the op must correspond to operand i, and the other results must be unused.
    """
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
    """Replaces a reshape by an earlier value of its chain of reshapes, if that has its type."""
    for op in ops_named(module.operation, {RESHAPE}):
        result = op.results[0]
        source = producer(op.operands[0])
        while source is not None and source.name == RESHAPE:
            if source.operands[0].type == result.type:
                result.replace_all_uses_with(source.operands[0])
                break
            source = producer(source.operands[0])


def fold_broadcasts(module: ir.Module) -> None:
    """Merges a broadcast of a broadcast into one broadcast."""
    for op in ops_named(module.operation, {BROADCAST}):
        inner = producer(op.operands[0])
        if inner is None or inner.name != BROADCAST:
            continue
        dims = integers(op, "broadcast_dimensions")
        taken = [dims[dim] for dim in integers(inner, "broadcast_dimensions")]
        op.operands[0] = inner.operands[0]
        op.attributes["broadcast_dimensions"] = ir.DenseI64ArrayAttr.get(taken, op.context)


def link_loops(module: ir.Module) -> None:
    """Replaces the results of loop-invariant carries by their initial values.

    If the initial value of a carry reshapes or constrains a stack that another loop wrote, and has
    the same type, the stack replaces it.
    """

    for op in ops_named(module.operation, {WHILE}):
        for carry, value in enumerate(op.operands):
            source = _stack(value)
            if source is not None:
                op.operands[carry] = source
        for carry in sorted(WhileLoop(op).invariant):
            op.results[carry].replace_all_uses_with(op.operands[carry])


def _stack(value: ir.Value) -> ir.Value | None:
    """Returns the stack that a value reshapes or constrains, if a loop wrote it row by row and the
    types match; otherwise None."""
    stack, maker = value, producer(value)
    while maker is not None and maker.name in _KEEPING:
        stack = maker.operands[0]
        maker = producer(stack)
    if maker is None or maker.name != WHILE or stack.type != value.type:
        return None
    carry = ir.OpResult(stack).result_number
    ends = terminator(While(maker).body).operands
    end = producer(skip_constraints(ends[carry]))
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
    return op.operands[0] if op.name == "mhlo.copy" else rewrite_bitcast(op)


def rewrite_bitcast(op: ir.Operation) -> ir.Value:
    """Rewrites a bitcast: transposes the operand to major-first order, reshapes it, and transposes
    the result back."""
    value, wanted = op.operands[0], shape_of(op.results[0])
    build = Builder(ir.InsertionPoint(op), op.location)
    lying = _maybe_transpose(build, value, major_first(op, "source_layout", len(shape_of(value))))
    order = major_first(op, "result_layout", len(wanted))
    shape = [wanted[dimension] for dimension in order]
    read = lying if shape_of(lying) == shape else build.reshape(lying, shape)
    return _maybe_transpose(build, read, [order.index(d) for d in range(len(order))])


def major_first(op: ir.Operation, name: str, rank: int) -> list[int]:
    """Returns the dimensions of a layout, most major first; row-major if the op has no layout."""
    layout = op.attributes.get(name)
    if layout is None:
        return list(range(rank))
    return [int(d) for d in np.array(ir.DenseElementsAttr(layout)).ravel()][::-1]


def _maybe_transpose(build: Builder, value: ir.Value, order: Sequence[int]) -> ir.Value:
    return value if list(order) == sorted(order) else build.transpose(value, order)
