"""Sharding rules: the dimensions along which an op can run on parts, if Shardy's rules are not
exact.

`widen_rules` writes better rules on ops that can run on parts, although Shardy's rules exclude it:

slice, pad, concatenate,   along every dimension: each device gets the elements that it lacks from
reverse, windows           the devices that have them (`operand_needs`)
convolution                along spatial dimensions, too; if the kernel is longer than the result
                           (the gradient of a kernel), each device sums a part of the result
dynamic_update_slice       along a dimension if it writes some of its rows: each device writes the
                           rows in its part
custom_call                along the dimensions that it treats independently (`dialect/kernels`)

`undividable` lists the dimensions that must be whole on every device although a rule divides them.
Some ops (`is_whole_op`) have no rule that is correct. `fitting` returns how many parts an op can
have of those that a rule allows; `BorderExchanges` has the bytes that it sends for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Literal

from stablehlo_tools.analysis.captured_constants import starts_idempotent
from stablehlo_tools.analysis.sharding_import import call_rule, rule_attribute
from stablehlo_tools.analysis.shardings import (
    RULE,
    Axes,
    Dims,
    Factors,
    MeshAxes,
    ShardingRule,
    ValueShardings,
    rank_of,
    rule_of,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.dialect.dimension_numbers import conv_numbers, gather_numbers, scatter_numbers
from stablehlo_tools.dialect.dimensions import dimensions_of, integer, integers
from stablehlo_tools.dialect.factors import FactorRole
from stablehlo_tools.dialect.names import (
    BROADCAST,
    CONCATENATE,
    CONVOLUTION,
    CUSTOM_CALL,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    PAD,
    REDUCE,
    REVERSE,
    SCATTER,
    SLICE,
)
from stablehlo_tools.dialect.reducers import identity_of, reducer_kind
from stablehlo_tools.dialect.traits import full_names
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.values import is_identity_of, producer, splat_of
from stablehlo_tools.ir.views import Combining
from stablehlo_tools.ir.walk import ops_named, walk
from stablehlo_tools.transforms.parts.partition.halo_writing import MovedTarget, seen_through
from stablehlo_tools.transforms.parts.partition.operand_needs import (
    REDUCE_WINDOW,
    SELECT_AND_SCATTER,
    Shapes,
    known_start,
    need_of,
    needs_of,
    reduced_window,
)

# A dimension of a tensor: the tensor's number, operands first and then results, and the dimension.
TensorDim = tuple[int, int]

# Ops whose results depend on all elements of their operands, even if a rule divides them. Every
# device has to compute all of the result.
_WHOLE_OPS = full_names(
    "rng_bit_generator batch_norm_training batch_norm_grad batch_norm_inference"
)
# Custom calls that compute each row of the last dimension, or each element, on its own.
_BATCHED_TARGETS = frozenset({"mhlo.topk", "mhlo.erf", "mhlo.erf_inv", "mhlo.tan"})


def is_whole_op(op: ir.Operation) -> bool:
    """Returns True if an op must run on whole tensors."""
    if op.name == CUSTOM_CALL:
        target = ir.StringAttr(op.attributes["call_target_name"]).value
        return target not in _BATCHED_TARGETS and dimensions_of(op) is None
    return op.name in _WHOLE_OPS


def shapes_of(op: ir.Operation) -> list[list[int]]:
    """Returns the shapes of an op's operands, then of its results."""
    return [shape_of(value) for value in (*op.operands, *op.results)]


def undividable(op: ir.Operation) -> set[TensorDim]:
    """Returns the dimensions that must be whole, beyond those of the op's rule."""
    find = _FINDERS.get(op.name)
    return set(find(op)) if find else set()


def _moved_along(op: ir.Operation) -> list[int]:
    """Returns the dimensions of the first operand along which elements are moved, indexed or
    windowed."""
    relation = dimensions_of(op)
    assert relation is not None, "these ops have static shapes here (P2)"
    by_place = (FactorRole.MOVED, FactorRole.INDEXED, FactorRole.WINDOWED)
    along = (f.in_operand(0) for f in relation.factors if f.role in by_place)
    return sorted({a.dim for a in along if a is not None})


def _of_all_tensors(op: ir.Operation, dims: Iterable[int]) -> Iterable[TensorDim]:
    """Yields these dimensions for every tensor of an op that has them."""
    listed = list(dims)
    for number, value in enumerate((*op.operands, *op.results)):
        yield from ((number, dim) for dim in listed if dim < rank_of(value))


def _dynamic_update(op: ir.Operation) -> Iterable[TensorDim]:
    """The dimensions along which the update is shorter than the operand; none if all of its starts
    there are known."""
    shapes = shapes_of(op)
    known = starts_known(op, shapes)
    yield from ((1, dim) for dim in differing(shapes) if not known)


def _window(op: ir.Operation) -> Iterable[TensorDim]:
    """The dimensions along which each window may read all elements, as in a prefix sum."""
    shapes = shapes_of(op)
    every = [(dim, reduced_window(op, dim, shapes)) for dim in _moved_along(op)]
    long = [dim for dim, window in every if window.size >= shapes[0][dim] or not window.places]
    return _of_all_tensors(op, long)


def _stays_inside(op: ir.Operation, dim: int) -> bool:
    """Returns True if a select_and_scatter adds, and its windows along a dimension are all within
    its operand."""
    window = reduced_window(op, dim, shapes_of(op))
    adds = reducer_kind(op.regions[1].blocks[0]) == "add"
    return adds and not (window.low or window.high) and window.places > 0


def _convolution(op: ir.Operation) -> Iterable[TensorDim]:
    """The shorter of kernel and result along each spatial dimension."""
    numbers = conv_numbers(op)
    for kernel, result in zip(numbers.kernel_spatial, numbers.output_spatial, strict=True):
        yield (2, result) if _sums_over_space(op, kernel, result) else (1, kernel)


def _sums_over_space(conv: ir.Operation, kernel: int, result: int) -> bool:
    """Returns True if the kernel is longer than the result along a spatial dimension.

    Each element of the result is then a sum over all of the image. Each device computes a part of
    it.
    """
    return shape_of(conv.operands[1])[kernel] > shape_of(conv.results[0])[result]


def _reduce(op: ir.Operation) -> Iterable[TensorDim]:
    """The reduced dimensions, if partial results cannot be combined."""
    if combines_by(op) is None:
        for dim in integers(op, "dimensions"):
            yield from ((number, dim) for number in range(len(op.operands) // 2))


def combines_by(reduce: ir.Operation) -> Literal["all_reduce", "all_gather"] | None:
    """Returns the collective that completes a reduce's partial results; None if there is none.

    It is an all_reduce with the same reducer. For several values at once (an argmax), it is an
    all_gather, followed by the same reduce.
    """
    reducer = reducer_kind(Combining(reduce).combiner) if len(reduce.results) == 1 else None
    if reducer is not None and is_identity_of(reducer, reduce.operands[1]):
        return "all_reduce"
    if not starts_idempotent(reduce):
        return None
    return "all_reduce" if reducer is not None else "all_gather"


def _gather(op: ir.Operation) -> Iterable[TensorDim]:
    """The dimensions of the result and of the operand that are sliced, unless the operand's are
    indexed by element."""
    numbers = gather_numbers(op)
    sizes = integers(op, "slice_sizes")
    shape = ir.RankedTensorType(op.operands[0].type).shape
    # Rows of other devices become the identity of the sum that follows.
    maskable = identity_of("add", element_of(op.operands[0])) is not None
    for dim, size in enumerate(sizes):
        indexed = size == 1 and dim in numbers.index_map and maskable
        if size != shape[dim] and dim not in numbers.operand_batching and not indexed:
            yield (0, dim)
    for dim, result_dim in zip(numbers.window_dims(len(shape)), numbers.windows, strict=True):
        if sizes[dim] != shape[dim]:
            yield (2, result_dim)


def _scatter(op: ir.Operation) -> Iterable[TensorDim]:
    """The window dimensions that are written in part; for a scatter into several tensors, all
    dimensions."""
    if len(op.results) > 1:
        # Every dimension of every tensor.
        for number, value in enumerate((*op.operands, *op.results)):
            yield from ((number, dim) for dim in range(rank_of(value)))
        return
    numbers = scatter_numbers(op)
    operand = ir.RankedTensorType(op.operands[0].type).shape
    update = ir.RankedTensorType(op.operands[2].type).shape
    window_dims = numbers.window_dims(len(operand))
    for dim, update_dim in zip(window_dims, numbers.windows, strict=True):
        if operand[dim] != update[update_dim]:
            yield from ((0, dim), (2, update_dim), (3, dim))
    reducer = reducer_kind(Combining(op).combiner)
    if reducer is None or identity_of(reducer, element_of(op.operands[0])) is None:
        # Several updates along these dimensions may write the same element.
        indexed = numbers.index_dims(rank_of(op.operands[1]))
        for dim, source in zip(numbers.batch_dims(len(update)), indexed, strict=True):
            if source not in numbers.indices_batching:
                yield (2, dim)
    for dim in numbers.omitted:
        if dim not in numbers.index_map:
            yield from ((0, dim), (3, dim))


def differing(shapes: Shapes) -> list[int]:
    """Returns the dimensions along which a dynamic_update_slice writes some of the rows."""
    return [dim for dim, (all_, some) in enumerate(zip(*shapes[:2], strict=True)) if all_ != some]


def starts_known(update: ir.Operation, shapes: Shapes) -> bool:
    """Returns True if a dynamic_update_slice has known starts along all dimensions that it updates
    partly."""
    return all(known_start(update, dim, 0) is not None for dim in differing(shapes))


def _broadcast(op: ir.Operation) -> Iterable[TensorDim]:
    """The dimensions of size 1 that are broadcast to a larger size: divided, all parts but one are
    empty."""
    result = shape_of(op.results[0])
    places = integers(op, "broadcast_dimensions")
    for dim, (size, place) in enumerate(zip(shape_of(op.operands[0]), places, strict=True)):
        if size != result[place]:
            yield (0, dim)


_FINDERS: dict[str, Callable[[ir.Operation], Iterable[TensorDim]]] = {
    BROADCAST: _broadcast,
    DYNAMIC_SLICE: lambda op: _of_all_tensors(op, _moved_along(op)),  # those that it shortens
    DYNAMIC_UPDATE_SLICE: _dynamic_update,
    REDUCE_WINDOW: _window,
    # A window may reach over the edge, where it must not select an element.
    SELECT_AND_SCATTER: lambda op: _of_all_tensors(
        op, (dim for dim in _moved_along(op) if not _stays_inside(op, dim))
    ),
    CONVOLUTION: _convolution,
    REDUCE: _reduce,
    GATHER: _gather,
    SCATTER: _scatter,
}


_PUT_TOGETHER = frozenset({SLICE, PAD, CONCATENATE, REVERSE})
_ALONG = _PUT_TOGETHER | {REDUCE_WINDOW}
# Ops that may need elements of other devices' parts.
MOVING = _ALONG | {CONVOLUTION, DYNAMIC_UPDATE_SLICE, SELECT_AND_SCATTER}


def is_seen_through(op: ir.Operation) -> bool:
    """Returns True if ops that are divided in the same way read the sources of an op, not it."""
    users = [use.owner.operation.name for use in op.results[0].uses]
    return op.name in _PUT_TOGETHER and bool(users) and _ALONG.issuperset(users)


class BorderExchanges:
    """The exchanges of border elements that ops need on parts.

    An op reads the sources that its operand was put together from, as `write_target` writes it.
    """

    def __init__(self, axes: MeshAxes) -> None:
        self._axes = axes
        self._targets: dict[tuple[ir.Operation, int, int], MovedTarget | None] = {}

    def sent(self, op: ir.Operation, divided: Dims) -> list[tuple[int, float]]:
        """Returns the dimension and the bytes of each permute that lets an op run with its first
        operand divided as given; [] if each device needs its own elements only."""
        shapes, size, found = shapes_of(op), self._axes.size, list[tuple[int, float]]()
        # Slices and pads along undivided dimensions run first. Each exchange reads the result of
        # the exchange before it.
        first = shapes[-1] if op.name in (SLICE, PAD) else shapes[0]
        held = [
            -(-whole // size(over)) if over else cut
            for whole, cut, over in zip(shapes[0], first, divided, strict=True)
        ]
        for dim, over in enumerate(divided):
            if not over:
                continue
            if op.name == SELECT_AND_SCATTER:
                plans = [need.plan for need in needs_of(op, dim, size(over), shapes)]
            else:
                target = self._target(op, dim, size(over))
                plans = [] if target is None else [target.plan]
            row = math.prod(held[:dim] + held[dim + 1 :]) * element_bytes(op.operands[0])
            found += [(dim, message.size * row) for each in plans for message in each.messages]
            held[dim] = plans[0].target.length if plans else held[dim]
        return found

    def _target(self, op: ir.Operation, dim: int, parts: int) -> MovedTarget | None:
        """Returns how the elements that devices need along a dimension are put together."""
        key = (op, dim, parts)
        if key not in self._targets:
            need = need_of(op, dim, parts, shapes_of(op))
            if need is None:
                self._targets[key] = None
                return None
            first = 1 if op.name == DYNAMIC_UPDATE_SLICE else 0
            sources = tuple(islice(op.operands, first, first + len(need.parts)))
            pieces = [p for p in need.pieces if splat_of(sources[p.source]) is None]
            target = MovedTarget(sources, need.parts, tuple(pieces), need.target)
            if need.spread == 1:
                target = seen_through(target, lambda value: self._origin(value, dim, parts))
            self._targets[key] = target
        return self._targets[key]

    def _origin(self, value: ir.Value, dim: int, parts: int) -> MovedTarget | None:
        """Returns how a value was put together along a dimension; None if it was not."""
        op = producer(value)
        if op is None or op.name not in _PUT_TOGETHER:
            return None
        target = self._target(op, dim, parts)
        # An op along other dimensions is written after the exchange along this one.
        stays = target is None and op.name != CONCATENATE
        return self._origin(op.operands[0], dim, parts) if stays else target


def element_bytes(value: ir.Value) -> float:
    """Returns the bytes of an element; 8 if its width is unknown, as that of a complex number."""
    element = element_of(value)
    if isinstance(element, ir.IntegerType) and element.width == 1:
        return 1.0  # a byte, as XLA stores truth values
    return element.width / 8 if isinstance(element, ir.IntegerType | ir.FloatType) else 8


def fitting(
    op: ir.Operation, rule: ShardingRule, chosen: dict[int, Axes], axes: MeshAxes
) -> tuple[dict[int, Axes], set[int]]:
    """Returns the axes on an op's factors that it can have, and the factors that must be whole.

    A factor must be whole if halo exchanges send more than an all_gather would. A dimension that
    does not divide evenly is padded if it has no other factors. A custom call never gets padding,
    because its results could depend on it.
    """
    divided = {factor for factor, over in chosen.items() if over}
    if not divided:
        return chosen, set()
    shapes, kept = shapes_of(op), dict(chosen)
    sizes = {factor: [rule.sizes[factor]] for factor in divided}
    joined: set[int] = set()  # factors that share a dimension
    for dims, shape in zip(rule.tensors, shapes, strict=True):
        for factors, size in zip(dims, shape, strict=True):
            if len(factors) > 1:
                joined.update(factors)
            for factor in divided.intersection(factors):
                sizes[factor].append(size)
    for factor in divided & joined if op.name != CUSTOM_CALL else divided:
        each = sizes[factor][:1] if factor in joined else sizes[factor][1:]
        while any(size % axes.size(kept[factor]) for size in each):
            kept[factor] = kept[factor][:-1]
    far: set[int] = set()
    for dim, factors in enumerate(rule.tensors[0] if op.name in MOVING else ()):
        over = kept.get(factors[0], ()) if len(factors) == 1 else ()
        needs = needs_of(op, dim, axes.size(over), shapes) if over else []
        gathered = sum(parts.length for need in needs for parts in need.parts)
        if sum(need.plan.sent for need in needs) > (axes.size(over) - 1) * gathered:
            far.add(factors[0])
    return kept, far


def sums_over_space(module: ir.Module) -> bool:
    """Returns True if a module has convolutions whose better rules Shardy needs before
    propagation."""
    convolutions = ops_named(module.operation, {CONVOLUTION})
    return any(tensor == 2 for op in convolutions for tensor, _ in _convolution(op))


def warn_of_wrong_gradients(
    module: ir.Module, shardings: ValueShardings, diagnostics: Diagnostics
) -> None:
    """Warns of gradients of grouped convolutions that XLA's partitioner computes wrongly.

    If axes of the mesh divide no dimension of the image, it adds up the same parts several times.
    Seen on XLA:CPU of jax 0.12, for any number of groups, samples and spatial dimensions.
    """
    for op in ops_named(module.operation, {CONVOLUTION}):
        if integer(op, "batch_group_count") == 1:
            continue
        dims, numbers = shardings.axes_by_dim(op.operands[0]), conv_numbers(op)
        summed = any(dims[dim] for dim in (numbers.input_feature, *numbers.input_spatial))
        devices = shardings.axes.size([axis for axes in dims for axis in axes])
        times = shardings.axes.mesh.size // devices
        if summed and times > 1:
            diagnostics.warn(
                f"jax computes this gradient of a grouped convolution wrongly, {times} times as "
                "large, because XLA's partitioner does; the program that partition writes is right",
                op.location,
            )


def widen_rules(module: ir.Module) -> None:
    """Writes better rules on ops, after Shardy has written its own."""

    def visit(op: ir.Operation) -> ir.WalkResult:
        rule: ShardingRule | None = None
        if op.name == DYNAMIC_UPDATE_SLICE:
            rule = _update(op)
        elif op.name == CUSTOM_CALL:
            rule = call_rule(op)
        elif op.name == SELECT_AND_SCATTER:
            rule = _pooling_rule(op)
        elif op.name == CONVOLUTION:
            rule = _convolution_rule(op)
        elif op.name in _ALONG:
            known = rule_of(op)  # its dimensions need not be whole
            rule = replace(known, whole=frozenset()) if known and known.whole else None
        if rule is not None:
            op.attributes[RULE] = rule_attribute(rule, op.context)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)


def _update(op: ir.Operation) -> ShardingRule | None:
    """Returns the rule of a dynamic_update_slice; None if it updates all rows.

    Dimensions along which the update is shorter become factors of its own, which must be whole,
    unless the starts are known.
    """
    whole, update = shape_of(op.operands[0]), shape_of(op.operands[1])
    if whole == update:
        return None
    sizes = list(whole)
    operand = tuple((dim,) for dim in range(len(whole)))
    if starts_known(op, shapes_of(op)):
        tensors = (operand, operand, *([()] * len(whole)), operand)
        return ShardingRule(tensors, len(op.operands), tuple(sizes), frozenset(), frozenset())
    updated: list[Factors] = []
    for dim, (all_rows, rows) in enumerate(zip(whole, update, strict=True)):
        updated.append((dim if all_rows == rows else len(sizes),))
        if all_rows != rows:
            sizes.append(rows)
    starts = [()] * (len(op.operands) - 2)
    tensors = (operand, tuple(updated), *starts, operand)
    needed = frozenset(range(len(whole), len(sizes)))
    return ShardingRule(tensors, len(op.operands), tuple(sizes), frozenset(), needed)


def _convolution_rule(op: ir.Operation) -> ShardingRule | None:
    """Returns the rule of a convolution whose spatial dimensions can be divided."""
    rule = rule_of(op)
    if rule is None:
        return None
    numbers = conv_numbers(op)
    image, kernel, result = (list(tensor) for tensor in rule.tensors)
    reduced, whole = set(rule.reduced), set(rule.whole)
    spatial = (numbers.input_spatial, numbers.kernel_spatial, numbers.output_spatial)
    for one, window, other in zip(*spatial, strict=True):
        if _sums_over_space(op, window, other):
            image[one] = kernel[window]
            reduced.update(kernel[window])
            whole.difference_update(kernel[window])
            whole.update(result[other])
        else:
            image[one] = result[other]
            whole.difference_update(result[other])
    tensors = (tuple(image), tuple(kernel), tuple(result))
    return _drop_unused_factors(
        replace(rule, tensors=tensors, reduced=frozenset(reduced), whole=frozenset(whole - reduced))
    )


def _pooling_rule(op: ir.Operation) -> ShardingRule | None:
    """Returns the rule of a select_and_scatter, whose source has an element for each window."""
    rule = rule_of(op)
    if rule is None:
        return None
    operand, source, init, result = rule.tensors
    free = [dim for dim in _moved_along(op) if _stays_inside(op, dim)]
    joined = tuple(operand[dim] if dim in free else source[dim] for dim in range(len(source)))
    return _drop_unused_factors(
        ShardingRule(
            (operand, joined, init, result),
            rule.operands,
            rule.sizes,
            rule.reduced,
            rule.whole - {factor for dim in free for factor in operand[dim]},
        )
    )


def _drop_unused_factors(rule: ShardingRule) -> ShardingRule:
    """Returns a rule without the factors that no tensor has."""
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
