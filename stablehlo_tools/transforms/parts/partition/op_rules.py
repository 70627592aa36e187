"""Along which dimensions an op can run on parts, where Shardy's sharding rules do not say it right.

`widen_rules` writes better rules on ops that can run on parts although Shardy's say otherwise:

dynamic_update_slice    along a dimension of which one row is written: each device looks whether
                        the row is in its part
slice, windows          along a dimension that is cut into equal pieces, none of which crosses
                        from one part into the next: x[::2], pooling without overlap
slice, pad,             along a dimension of a few equal pieces, of which one is taken, put among
concatenate             others, or joined with others: split(x, 3) and its gradient
custom_call             along the batch dimensions that jax says it has (`num_batch_dims`)

`undividable` lists the dimensions that must be whole on every device although a rule lets them be
divided: Shardy passes a dimension through wherever its size stays, also where a pad adds as much as
it takes away. Some ops (`is_whole_op`) have no rule that can be trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from stablehlo_tools import bindings
from stablehlo_tools.analysis.reducers import starts_idempotent
from stablehlo_tools.analysis.shardings import RULE, Factors, ShardingRule, rank_of, rule_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import conv_numbers, gather_numbers, scatter_numbers
from stablehlo_tools.dialect.dimensions import dimensions_of, integers
from stablehlo_tools.dialect.factors import FactorRole, OpDimensions
from stablehlo_tools.dialect.names import (
    CONCATENATE,
    CONVOLUTION,
    CUSTOM_CALL,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    PAD,
    REDUCE,
    SCATTER,
    SLICE,
)
from stablehlo_tools.dialect.reducers import identity_of, reducer_kind
from stablehlo_tools.dialect.traits import full_names
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.values import is_identity_of
from stablehlo_tools.ir.walk import walk

# A dimension of a tensor: the tensor's number, operands first and then results, and the dimension.
TensorDim = tuple[int, int]

# Ops whose result depends on more than its operands' elements at the same place, whatever a rule
# says: every device has to make all of it.
_WHOLE_OPS = full_names(
    "rng_bit_generator batch_norm_training batch_norm_grad batch_norm_inference"
)
_REDUCE_WINDOW = "stablehlo.reduce_window"
_SELECT_AND_SCATTER = "stablehlo.select_and_scatter"
_DILATIONS = ("base_dilations", "window_dilations")
_MOST_PIECES = 4  # the rounds that moving one of them takes, at most
_BATCH_DIMS = "num_batch_dims"
# Custom calls that compute each row of the last dimension, or each element, on its own.
_BATCHED_TARGETS = frozenset({"mhlo.topk", "mhlo.erf", "mhlo.erf_inv", "mhlo.tan"})


def is_whole_op(op: ir.Operation) -> bool:
    """Whether an op must run on whole tensors."""
    if op.name == CUSTOM_CALL:
        target = ir.StringAttr(op.attributes["call_target_name"]).value
        return target not in _BATCHED_TARGETS and not batch_dims(op)
    return op.name in _WHOLE_OPS


def batch_dims(call: ir.Operation) -> int:
    """The leading dimensions along which jax says that a custom call computes each on its own."""
    frontend = call.attributes.get("mhlo.frontend_attributes")
    if not isinstance(frontend, ir.DictAttr) or _BATCH_DIMS not in frontend:
        return 0
    count = int(ir.StringAttr(frontend[_BATCH_DIMS]).value)
    batched = all(rank_of(value) >= count for value in (*call.operands, *call.results))
    return count if batched else 0


def is_row_update(update: ir.Operation, dim: int) -> bool:
    """Whether a dynamic_update_slice writes one row of a longer dimension."""
    return shape_of(update.operands[1])[dim] == 1 < shape_of(update.operands[0])[dim]


def moved_dim(op: ir.Operation) -> int | None:
    """The first dimension of a slice that takes one of several equal pieces, or of a pad that puts
    such a piece among others; None where there is none."""
    relation = _relation(op)
    for factor in relation.factors:
        if factor.role is not FactorRole.MOVED or not factor.size:
            continue
        (taken,), (put,) = factor.operands, factor.results
        along, whole = (
            (taken, relation.operands[0]) if op.name == SLICE else (put, relation.results[0])
        )
        pieces, rest = divmod(whole[along.dim], factor.size)
        equal = 1 < pieces <= _MOST_PIECES and not rest and along.step == 1
        is_cut = op.name == PAD and factor.size < relation.operands[0][taken.dim]
        if equal and not is_cut and (along.start or 0) % factor.size == 0:
            return along.dim
    return None


def joins_pieces(concatenate: ir.Operation) -> bool:
    """Whether a concatenate joins few operands, of one size and a type that has a plain zero."""
    types = {str(value.type) for value in concatenate.operands}
    element = element_of(concatenate.results[0])
    few = len(concatenate.operands) <= _MOST_PIECES
    return few and len(types) == 1 and isinstance(element, ir.FloatType | ir.IntegerType)


def is_piecewise(op: ir.Operation, dim: int) -> bool:
    """Whether a slice or window takes one element or window of each of the equal, adjacent pieces
    of a dimension."""
    whole = shape_of(op.operands[0])[dim]
    if op.name == SLICE:
        (factor,) = _relation(op).along_operand(0, dim)
        taken = factor.operands[0]
        every = factor.size * taken.step == whole
        return every and taken.step > 1 and (taken.start or 0) < taken.step
    # Of a window the relation does not say whether some places of it lie in padding: a window that
    # reaches past the end is cut off there on a device, too, and needs the next one's zeros.
    rank = rank_of(op.operands[0])
    window, stride = (
        integers(op, name, [1] * rank)[dim] for name in ("window_dimensions", "window_strides")
    )
    padded = any(integers(op, "padding", [0] * (2 * rank))[2 * dim : 2 * dim + 2])
    dilated = any(integers(op, name, [1] * rank)[dim] != 1 for name in _DILATIONS)
    return window == stride > 1 and whole % stride == 0 and not padded and not dilated


def undividable(op: ir.Operation) -> set[TensorDim]:
    """The dimensions that must be whole, beyond what the op's rule says."""
    find = _FINDERS.get(op.name)
    return set(find(op)) if find else set()


_BY_PLACE = frozenset({FactorRole.MOVED, FactorRole.INDEXED, FactorRole.WINDOWED})


def _relation(op: ir.Operation) -> OpDimensions:
    relation = dimensions_of(op)
    assert relation is not None, "these ops have static shapes here (P2)"
    return relation


def _moved_along(op: ir.Operation) -> list[int]:
    """The dimensions of the first operand along which elements go elsewhere, or into windows."""
    relation = _relation(op)
    along = (f.in_operand(0) for f in relation.factors if f.role in _BY_PLACE)
    return sorted({a.dim for a in along if a is not None})


def _of_all_tensors(op: ir.Operation, dims: Iterable[int]) -> Iterable[TensorDim]:
    """The same dimensions of every tensor of an op that has them."""
    listed = list(dims)
    for number, value in enumerate((*op.operands, *op.results)):
        yield from ((number, dim) for dim in listed if dim < rank_of(value))


def _pad(op: ir.Operation) -> Iterable[TensorDim]:
    """The dimensions that it grows or cuts, but for one that a few equal pieces make up."""
    return _of_all_tensors(op, (dim for dim in _moved_along(op) if dim != moved_dim(op)))


def _slice(op: ir.Operation) -> Iterable[TensorDim]:
    """The dimensions that it shortens, but for those cut into equal pieces."""
    cut = [dim for dim in _moved_along(op) if not is_piecewise(op, dim)]
    return _of_all_tensors(op, (dim for dim in cut if dim != moved_dim(op)))


def _dynamic_slice(op: ir.Operation) -> Iterable[TensorDim]:
    """The dimensions that it shortens."""
    return _of_all_tensors(op, _moved_along(op))


def _dynamic_update(op: ir.Operation) -> Iterable[TensorDim]:
    """The update must be whole where it is shorter; so must all where it is longer than 1."""
    for dim in _differing(op.operands[0].type, op.operands[1].type):
        yield (1, dim)
        if not is_row_update(op, dim):
            yield from ((0, dim), (len(op.operands), dim))


def _window(op: ir.Operation) -> Iterable[TensorDim]:
    """The dimensions that windows of several elements move along, or past the edges of."""
    return _of_all_tensors(op, (dim for dim in _moved_along(op) if not is_piecewise(op, dim)))


def _convolution(op: ir.Operation) -> Iterable[TensorDim]:
    """The spatial dimensions."""
    numbers = conv_numbers(op)
    yield from ((0, dim) for dim in numbers.input_spatial)
    yield from ((1, dim) for dim in numbers.kernel_spatial)
    yield from ((2, dim) for dim in numbers.output_spatial)


def _reduce(op: ir.Operation) -> Iterable[TensorDim]:
    """The reduced dimensions, where parts of them cannot be combined."""
    if combines_by(op) is None:
        for dim in integers(op, "dimensions"):
            yield from ((number, dim) for number in range(len(op.operands) // 2))


def combines_by(reduce: ir.Operation) -> Literal["all_reduce", "all_gather"] | None:
    """What makes the whole of a reduce's partial results: an all_reduce with the same reducer, or
    for several values at once (an argmax) an all_gather and the reduce once more."""
    reducer = reducer_kind(reduce.regions[0].blocks[0]) if len(reduce.results) == 1 else None
    if reducer is not None and is_identity_of(reducer, reduce.operands[1]):
        return "all_reduce"
    if not starts_idempotent(reduce):
        return None
    return "all_reduce" if reducer is not None else "all_gather"


def _gather(op: ir.Operation) -> Iterable[TensorDim]:
    """Dimensions that are cut: in the result, and in the operand unless indexed by element."""
    numbers = gather_numbers(op)
    sizes = integers(op, "slice_sizes")
    shape = ir.RankedTensorType(op.operands[0].type).shape
    maskable = identity_of("add", element_of(op.operands[0])) is not None
    for dim, size in enumerate(sizes):
        indexed = size == 1 and dim in numbers.index_map and maskable
        if size != shape[dim] and dim not in numbers.operand_batching and not indexed:
            yield (0, dim)
    for dim, result_dim in zip(numbers.window_dims(len(shape)), numbers.offset_dims, strict=True):
        if sizes[dim] != shape[dim]:
            yield (2, result_dim)


def _scatter(op: ir.Operation) -> Iterable[TensorDim]:
    """Window dimensions that are written in part; all of a scatter into several tensors."""
    if len(op.results) > 1:
        yield from _all_dims(op)
        return
    numbers = scatter_numbers(op)
    operand = ir.RankedTensorType(op.operands[0].type).shape
    update = ir.RankedTensorType(op.operands[2].type).shape
    window_dims = numbers.window_dims(len(operand))
    for dim, update_dim in zip(window_dims, numbers.update_window_dims, strict=True):
        if operand[dim] != update[update_dim]:
            yield from ((0, dim), (2, update_dim), (3, dim))
    reducer = reducer_kind(op.regions[0].blocks[0])
    if reducer is None or identity_of(reducer, element_of(op.operands[0])) is None:
        yield from ((2, dim) for dim in _free_update_dims(op, len(update)))
    for dim in numbers.inserted:
        if dim not in numbers.index_map:
            yield from ((0, dim), (3, dim))


def _free_update_dims(op: ir.Operation, rank: int) -> list[int]:
    """The dimensions of a scatter's update along which several updates may meet in one element."""
    numbers = scatter_numbers(op)
    indexed = numbers.index_dims(rank_of(op.operands[1]))
    each = zip(numbers.batch_dims(rank), indexed, strict=True)
    return [dim for dim, source in each if source not in numbers.indices_batching]


def _all_dims(op: ir.Operation) -> Iterable[TensorDim]:
    """Every dimension of every tensor."""
    for number, value in enumerate((*op.operands, *op.results)):
        yield from ((number, dim) for dim in range(rank_of(value)))


def _differing(one: ir.Type, other: ir.Type) -> list[int]:
    shapes = ir.RankedTensorType(one).shape, ir.RankedTensorType(other).shape
    return [dim for dim, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b]


_FINDERS: dict[str, Callable[[ir.Operation], Iterable[TensorDim]]] = {
    PAD: _pad,
    SLICE: _slice,
    DYNAMIC_SLICE: _dynamic_slice,
    DYNAMIC_UPDATE_SLICE: _dynamic_update,
    _REDUCE_WINDOW: _window,
    _SELECT_AND_SCATTER: _window,
    CONVOLUTION: _convolution,
    REDUCE: _reduce,
    GATHER: _gather,
    SCATTER: _scatter,
}


_CUT = frozenset({SLICE, PAD, CONCATENATE, _REDUCE_WINDOW})


def widen_rules(module: ir.Module) -> None:
    """Writes better rules on the ops of a module whose rules Shardy has written."""

    def visit(op: ir.Operation) -> ir.WalkResult:
        rule: ShardingRule | None = None
        if op.name == DYNAMIC_UPDATE_SLICE:
            rule = _row_update(op)
        elif op.name == CUSTOM_CALL and batch_dims(op):
            rule = _batched(op, batch_dims(op))
        elif op.name == _SELECT_AND_SCATTER:
            rule = _pooled(op)
        elif op.name in _CUT:
            rule = _piecewise(op)
        if rule is not None:
            op.attributes[RULE] = _attribute(rule, op.context)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)


def _row_update(op: ir.Operation) -> ShardingRule | None:
    whole, update = shape_of(op.operands[0]), shape_of(op.operands[1])
    if not any(is_row_update(op, dim) for dim in range(len(whole))):
        return None
    sizes = list(whole)
    operand = tuple((dim,) for dim in range(len(whole)))
    updated: list[Factors] = []
    needed: set[int] = set()
    for dim, (all_rows, rows) in enumerate(zip(whole, update, strict=True)):
        if all_rows == rows:
            updated.append((dim,))
            continue
        if is_row_update(op, dim):
            updated.append((len(sizes),))
            sizes.append(rows)
        else:
            updated.append((dim,))
        needed.add(updated[-1][0])
    starts = [()] * (len(op.operands) - 2)
    tensors = (operand, tuple(updated), *starts, operand)
    return ShardingRule(tensors, len(op.operands), tuple(sizes), frozenset(), frozenset(needed))


def _piecewise(op: ir.Operation) -> ShardingRule | None:
    rule = rule_of(op)
    if rule is None:
        return None
    rank = rank_of(op.operands[0])
    dims = [d for d in range(rank) if _goes_by_pieces(op, d)]
    free = {factor for dim in dims for factor in rule.tensors[0][dim]}
    if not free & rule.whole:
        return None
    return ShardingRule(rule.tensors, rule.operands, rule.sizes, rule.reduced, rule.whole - free)


def _goes_by_pieces(op: ir.Operation, dim: int) -> bool:
    """Whether a dimension that is cut, padded or joined can stay divided."""
    if op.name == CONCATENATE:
        return joins_pieces(op) and dim == ir.IntegerAttr(op.attributes["dimension"]).value
    if op.name != _REDUCE_WINDOW and dim == moved_dim(op):
        return True
    return op.name != PAD and is_piecewise(op, dim)


def _pooled(op: ir.Operation) -> ShardingRule | None:
    """A select_and_scatter, whose source has an element for each piece."""
    rule = rule_of(op)
    if rule is None:
        return None
    operand, source, init, result = rule.tensors
    free = [dim for dim in range(len(operand)) if is_piecewise(op, dim)]
    joined = tuple(operand[dim] if dim in free else source[dim] for dim in range(len(source)))
    return _renumbered(
        ShardingRule(
            (operand, joined, init, result),
            rule.operands,
            rule.sizes,
            rule.reduced,
            rule.whole - {factor for dim in free for factor in operand[dim]},
        )
    )


def _renumbered(rule: ShardingRule) -> ShardingRule:
    """A rule without the factors that no tensor has."""
    used = sorted({f for t in range(len(rule.tensors)) for f in rule.factors_of(t)})
    number = {factor: new for new, factor in enumerate(used)}
    return ShardingRule(
        tuple(
            tuple(tuple(number[f] for f in factors) for factors in tensor)
            for tensor in rule.tensors
        ),
        rule.operands,
        tuple(rule.sizes[factor] for factor in used),
        frozenset(number[f] for f in rule.reduced if f in number),
        frozenset(number[f] for f in rule.whole if f in number),
    )


def _batched(op: ir.Operation, count: int) -> ShardingRule:
    sizes = shape_of(op.operands[0])[:count]
    tensors: list[tuple[Factors, ...]] = []
    for value in (*op.operands, *op.results):
        own = shape_of(value)[count:]
        first = len(sizes)
        sizes += own
        batch = range(min(count, rank_of(value)))
        tensors.append(tuple((f,) for f in (*batch, *range(first, first + len(own)))))
    whole = frozenset(range(count, len(sizes)))
    return ShardingRule(tuple(tensors), len(op.operands), tuple(sizes), frozenset(), whole)


def _attribute(rule: ShardingRule, context: ir.Context) -> ir.Attribute:
    mappings = [_mapping(tensor, context) for tensor in rule.tensors]
    return bindings.OpShardingRuleAttr.get(
        list(rule.sizes),
        mappings[: rule.operands],
        mappings[rule.operands :],
        reduction_factors=sorted(rule.reduced),
        need_replication_factors=sorted(rule.whole),
        context=context,
    )


def _mapping(tensor: Sequence[Factors], context: ir.Context) -> ir.Attribute:
    dims = [bindings.DimMappingAttr.get(list(factors), context) for factors in tensor]
    return bindings.TensorMappingAttr.get(dims, context)
