"""Finds the dimensions of two programs that share an extent, from the ops along them.

`dialect/dimensions.py` describes most ops. This module adds the values that control flow passes on,
the dimensions that shardings divide, and attributes that count positions: the segments of a slice
or a pad.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.device_values import fold_value
from stablehlo_tools.analysis.shardings import MeshAxes, ValueShardings, sharding_axes
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.dialect.custom_calls import is_annotation, label
from stablehlo_tools.dialect.dimension_numbers import gather_numbers, scatter_numbers
from stablehlo_tools.dialect.dimensions import dimensions_of, integer, integers, static_shape
from stablehlo_tools.dialect.factors import Along, Factor, FactorRole, OpDimensions
from stablehlo_tools.dialect.names import (
    BARRIER,
    CONCATENATE,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    IOTA,
    PAD,
    SCATTER,
    SHARDING_CONSTRAINT,
    SLICE,
    WHILE,
)
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.dialect.traits import BRANCHES, COMPUTATIONS, TERMINATORS, Trait, ops_with
from stablehlo_tools.ir.builder import element_of
from stablehlo_tools.ir.values import CONSTANTS, describe_op, is_splat, producer, value_of
from stablehlo_tools.ir.views import Case, Combining, Function, While, WithBody
from stablehlo_tools.ir.walk import FUNCTION, MESH, entry_function, terminator, walk
from stablehlo_tools.verify.twin.extents import Extents, TwinExtent, divide, keep, unite

Segments = tuple[TwinExtent, ...]
_SAME_SIZE_WHOLE = frozenset({"stablehlo.sort", "stablehlo.batch_norm_grad"})
_HANDED_ON = ops_with(Trait.SHARDING_ONLY) | ops_with(Trait.RESHARDING) | {BARRIER}
_WITHOUT_DIMENSIONS = TERMINATORS | BRANCHES | COMPUTATIONS | {WHILE, FUNCTION, MESH}
_TILES = re.compile(r"devices=\[([\d,]+)\]")
_SMALL_TABLE = 16  # rows; all rows of a table of at most so many are kept
_FEW_BLOCKS = 16


@dataclass
class TwinDimensions:
    """The extents of the values of both programs, and the segments of slices and pads.

    `segments` maps a result and a dimension to segments of the op's operand or result: the
    positions before the slice, those of the slice, and those after it.
    """

    extents: Extents = field(default_factory=Extents)
    segments: dict[tuple[ir.Value, int], list[Segments]] = field(default_factory=dict)
    ends: list[list[TwinExtent]] = field(default_factory=list)  # of arguments and results
    _of: dict[ir.Value, list[TwinExtent]] = field(default_factory=dict)

    def extents_of(self, value: ir.Value) -> list[TwinExtent]:
        """Returns the extent of each dimension of a value; [] if it is not a tensor."""
        if value not in self._of:
            self._of[value] = [TwinExtent(size) for size in _shape(value)]
        return self._of[value]

    @property
    def known(self) -> list[list[TwinExtent]]:
        """The extents of all values for which `of` was called."""
        return list(self._of.values())

    def tie_programs(self, before: ir.Module, after: ir.Module) -> None:
        """Unites the extents of the arguments and results of both programs, and ties all ops.

        Raises ToolError if their shapes differ."""
        modules = [_TwinModule(self, module) for module in (before, after)]
        ends = [module.ends for module in modules]
        shapes = [[list(map(_shape, end)) for end in both] for both in ends]
        if shapes[0] != shapes[1]:
            raise ToolError(
                f"the programs have different input or output shapes: {_unlike(*ends)}",
                notes=tuple(
                    note(f"{which} program: {_types(arguments)} -> {_types(results)}")
                    for which, (arguments, results) in zip(("first", "second"), ends, strict=True)
                ),
                hint="a program, and its form after passes: opt PROGRAM -p PASSES -o AFTER",
            )
        for one, other in zip(*ends, strict=True):
            for mine, theirs in zip(one, other, strict=True):
                self.tie(mine, theirs)
        for module in modules:
            module.tie()
        self.ends = [self.extents_of(value) for end in ends[0] for value in end]

    def tie(self, one: ir.Value, other: ir.Value) -> None:
        """Unites the extents of two values; a larger dimension consists of shards of the smaller
        one's size."""
        if len(self.extents_of(one)) != len(self.extents_of(other)):
            self.keep([one, other], "shapes of different ranks")
            return
        for mine, theirs in zip(self.extents_of(one), self.extents_of(other), strict=True):
            large, small = (mine, theirs) if mine.size >= theirs.size else (theirs, mine)
            if large.size == small.size:
                unite(large, small)
            elif small.size and large.size % small.size == 0:
                shards, local = divide(large, [large.size // small.size, small.size])
                keep(shards, "each device holds a part")
                unite(local, small)
            else:
                keep(large, "divided unevenly")
                keep(small, "divided unevenly")

    def keep(self, values: Sequence[ir.Value], why: str) -> None:
        """Keeps all dimensions of values."""
        for value in values:
            for extent in self.extents_of(value):
                keep(extent, why)


class _TwinModule:
    def __init__(self, dims: TwinDimensions, module: ir.Module) -> None:
        self.dims = dims
        self.module = module
        self.meshes = {
            name: ValueShardings(MeshAxes(mesh), name)
            for name, mesh in ModuleFacts.from_module(module).meshes.items()
        }
        main = Function(entry_function(module))
        self.ends: list[list[ir.Value]] = [list(main.body.arguments), main.yields]

    def tie(self) -> None:
        def visit(op: ir.Operation) -> ir.WalkResult:
            if op.name == FUNCTION:
                self._tie_function(op)
            else:
                self._tie_op(op)
            return ir.WalkResult.ADVANCE

        walk(self.module.operation, visit)

    def _tie_function(self, function: ir.Operation) -> None:
        if not len(function.regions[0].blocks):
            return
        arguments, results = list(Function(function).body.arguments), Function(function).yields
        for name, values in (("arg_attrs", arguments), ("res_attrs", results)):
            if name not in function.attributes:
                continue
            for value, entry in zip(values, ir.ArrayAttr(function.attributes[name]), strict=True):
                for attribute in ir.DictAttr(entry):
                    if attribute.name == "tf.aliasing_output":
                        self.dims.tie(value, results[ir.IntegerAttr(attribute.attr).value])
                    elif attribute.name == "sdy.sharding":
                        self._divide(value, attribute.attr)
                    elif attribute.name == "mhlo.sharding":
                        tiles = _TILES.search(str(attribute.attr))
                        if tiles is not None:
                            counts = [int(count) for count in tiles[1].split(",")]
                            self._divide_by(value, counts[: len(self.dims.extents_of(value))])

    def _divide(self, value: ir.Value, sharding: ir.Attribute) -> None:
        name, axes = sharding_axes(sharding)
        if not axes:
            return
        if name not in self.meshes:
            self.dims.keep([value], "a sharding on an inline mesh")
            return
        shardings = self.meshes[name]
        self._divide_by(value, [shardings.axes.size(dim) for dim in shardings.read(sharding)])

    def _divide_by(self, value: ir.Value, counts: Sequence[int]) -> None:
        for extent, count in zip(self.dims.extents_of(value), counts, strict=True):
            if count > 1 and extent.size % count:
                keep(extent, "devices hold parts of different sizes")
            elif count > 1:
                shards, _ = divide(extent, [count, extent.size // count])
                keep(shards, "each device holds a part")

    def _tie_op(self, op: ir.Operation) -> None:
        for one, other in self._passed_pairs(op):
            self.dims.tie(one, other)
        if op.name in _WITHOUT_DIMENSIONS:
            return
        if op.name == SHARDING_CONSTRAINT:
            self._divide(op.results[0], op.attributes["sharding"])
        special = _SPECIAL.get(op.name)
        if special is not None:
            special(self.dims, op)
        elif op.name not in _HANDED_ON and not is_annotation(op):
            _tie_factors(self.dims, op)

    def _passed_pairs(self, op: ir.Operation) -> Iterator[tuple[ir.Value, ir.Value]]:
        """Yields pairs of a value and the value that an op passes it to, unchanged or in shards."""
        name, operands, results = op.name, list(op.operands), list(op.results)
        if name in _HANDED_ON or is_annotation(op):
            yield from zip(operands[: len(results)], results, strict=True)
        elif name == WHILE:
            loop = While(op)
            yield from zip(operands, loop.condition.arguments, strict=True)
            yield from zip(operands, loop.carries, strict=True)
            yield from zip(operands, loop.yields, strict=True)
            yield from zip(operands, results, strict=True)
        elif name in BRANCHES:
            for branch in Case(op).branches:
                yield from zip(terminator(branch).operands, results, strict=True)
        elif name in COMPUTATIONS:
            computation = WithBody(op)
            yield from zip(operands, computation.body.arguments, strict=True)
            yield from zip(computation.yields, results, strict=True)


def _tie_factors(dims: TwinDimensions, op: ir.Operation) -> None:
    """Ties the dimensions of an op that uses them whole, or as factors of one another."""
    relation = dimensions_of(op)
    if relation is None:
        dims.keep([*op.operands, *op.results], f"the effect of {label(op)} on it is unknown")
        return
    extents = {factor: TwinExtent(factor.size) for factor in relation.factors}
    fixed = {FactorRole.WINDOWED, FactorRole.INDEXED}
    if op.name not in _SAME_SIZE_WHOLE and not op.name.startswith("stablehlo.batch_norm"):
        fixed.add(FactorRole.WHOLE)
    sides = (
        (False, list(map(dims.extents_of, op.operands)), relation.along_operand),
        (True, list(map(dims.extents_of, op.results)), relation.along_result),
    )
    for is_result, tensors, along in sides:
        for tensor, extents_of_dims in enumerate(tensors):
            for dim, extent in enumerate(extents_of_dims):
                factors = along(tensor, dim)
                roles = {factor.role for factor in factors}
                if extent.size == 1:
                    continue
                if roles & fixed:
                    keep(extent, f"{describe_op(op)} needs it whole")
                elif FactorRole.EXCHANGED not in roles:
                    digits = [(_along(f, tensor, dim, is_result), f, extents[f]) for f in factors]
                    _tie_digits(extent, digits, op)
                elif not is_result:
                    _tie_pieces(extent, dims.extents_of(op.results[tensor])[dim], factors[0].size)


def _tie_pieces(operand: TwinExtent, result: TwinExtent, pieces: int) -> None:
    """Ties a dimension along which devices exchange pieces: the longer one is `pieces` times the
    shorter, major first."""
    large, small = (operand, result) if operand.size >= result.size else (result, operand)
    if large.size == small.size:
        unite(large, small)
    exchanged, own = divide(large, [pieces, large.size // pieces])
    keep(exchanged, "devices exchange pieces of it")
    if own.size == small.size:
        unite(own, small)


def _along(factor: Factor, tensor: int, dim: int, is_result: bool) -> Along:
    listed = factor.results if is_result else factor.operands
    return next(a for a in listed if (a.tensor, a.dim) == (tensor, dim))


def _tie_digits(
    extent: TwinExtent, digits: list[tuple[Along, Factor, TwinExtent]], op: ir.Operation
) -> None:
    """Divides a dimension into its factors, the one of the largest step first."""
    if not digits:
        keep(extent, f"{describe_op(op)} ignores it")
        return
    if len(digits) == 1 and digits[0][1].size == extent.size:
        unite(extent, digits[0][2])
        return
    ordered = sorted(digits, key=lambda digit: -abs(digit[0].step))
    sizes = [factor.size for _, factor, _ in ordered]
    if math.prod(sizes) != extent.size or any(along.start is None for along, _, _ in ordered):
        keep(extent, f"{describe_op(op)} uses only a part of it")
        return
    for part, (_, _, factor_extent) in zip(divide(extent, sizes), ordered, strict=True):
        unite(part, factor_extent)


# Ops with attributes that count positions.


def _slice(dims: TwinDimensions, op: ir.Operation) -> None:
    names = ("start_indices", "limit_indices", "strides")
    starts, limits, strides = (integers(op, name) for name in names)
    maker, of_sorted = producer(op.operands[0]), None
    if maker is not None and maker.name == "stablehlo.sort":
        of_sorted = integer(maker, "dimension", -1) % _rank(op.results[0])
    for d, (whole, part) in enumerate(_pairs(dims, op.operands[0], op.results[0])):
        if d == of_sorted and part.size < whole.size:
            keep(part, f"k of {describe_op(op)}, after a sort")
        if strides[d] == 1:
            _segment(dims, op, d, whole, part, starts[d], whole.size - limits[d])
        elif starts[d] < strides[d] and part.size * strides[d] == whole.size:
            places, step = divide(whole, [part.size, strides[d]])
            keep(step, "every few positions one is used")
            unite(places, part)
        else:
            keep(whole, f"{describe_op(op)} uses some positions of it")
            keep(part, f"{describe_op(op)} uses some positions of it")


def _segment(
    dims: TwinDimensions,
    op: ir.Operation,
    d: int,
    whole: TwinExtent,
    part: TwinExtent,
    low: int,
    high: int,
) -> None:
    segments = (TwinExtent(low), part, TwinExtent(high))
    dims.extents.join(whole, segments)
    dims.segments.setdefault((op.results[0], d), []).append(segments)


def _pad(dims: TwinDimensions, op: ir.Operation) -> None:
    lows, highs = integers(op, "edge_padding_low"), integers(op, "edge_padding_high")
    interiors = integers(op, "interior_padding")
    for d, (one, other) in enumerate(_pairs(dims, op.operands[0], op.results[0])):
        low, high, between = lows[d], highs[d], interiors[d]
        if between == 0 and min(low, high) > -one.size:
            cut_low, cut_high = max(-low, 0), max(-high, 0)
            left = TwinExtent(one.size - cut_low - cut_high)
            _segment(dims, op, d, one, left, cut_low, cut_high)
            _segment(dims, op, d, other, left, max(low, 0), max(high, 0))
        elif min(low, high) >= 0 and other.size == one.size * (1 + between):
            places, step = divide(other, [one.size, 1 + between])
            keep(step, "padding is inserted between its positions")
            unite(places, one)
        else:
            keep(one, f"{describe_op(op)} inserts positions into it")
            keep(other, f"{describe_op(op)} inserts positions into it")


def _concatenate(dims: TwinDimensions, op: ir.Operation) -> None:
    joined = integer(op, "dimension")
    for d, whole in enumerate(dims.extents_of(op.results[0])):
        parts = [dims.extents_of(operand)[d] for operand in op.operands]
        if d == joined:
            dims.extents.join(whole, parts)
            continue
        for part in parts:
            unite(part, whole)


def _dynamic_window(dims: TwinDimensions, op: ir.Operation) -> None:
    whole, *starts = op.operands
    part = op.results[0]
    if op.name == DYNAMIC_UPDATE_SLICE:
        dims.tie(whole, part)
        part = starts.pop(0)
    for d, (extent, taken) in enumerate(_pairs(dims, whole, part)):
        # A window of all positions is clamped to start at 0, so its start has no effect.
        start = fold_value(starts[d]) if extent.size != taken.size else None
        _tie_window(dims, extent, taken, None if start is None else int(start))


def _tie_window(
    dims: TwinDimensions, whole: TwinExtent, part: TwinExtent, start: int | None
) -> None:
    """Ties a window to its whole: as a block of it, or as a part at a known start."""
    beside = whole.size - part.size
    count = whole.size // part.size if part.size and whole.size % part.size == 0 else 0
    is_one_of_few = 0 < count <= _FEW_BLOCKS and not (start or 0) % part.size
    if beside == 0:
        unite(whole, part)
    elif start is not None and 0 <= start <= beside and not is_one_of_few:
        dims.extents.join(whole, (TwinExtent(start), part, TwinExtent(beside - start)))
    elif count:
        blocks, own = divide(whole, [count, part.size])
        keep(blocks, "a loop or a device uses one part at a time")
        unite(own, part)
    else:
        why = f"windows of {part.size} are anywhere in {whole.size}"
        keep(whole, why)
        keep(part, why)


def _known_starts(indices: ir.Value, index_map: Sequence[int]) -> dict[int, int]:
    """Returns the start, by dimension, of the only window of a gather or scatter, if constant."""
    known = fold_value(indices)
    if known is None or known.size != len(index_map):
        return {}
    return dict(zip(index_map, known.reshape(-1).tolist(), strict=True))


def _gather(dims: TwinDimensions, op: ir.Operation) -> None:
    """Ties a gather. Single rows of a large table are reduced; a twin reads the nearest row."""
    relation = dimensions_of(op)
    if relation is None:
        dims.keep([*op.operands, *op.results], f"{describe_op(op)} has dynamic shapes")
        return
    numbers = gather_numbers(op)
    sizes = integers(op, "slice_sizes")
    table, result = dims.extents_of(op.operands[0]), dims.extents_of(op.results[0])
    offsets = dict(zip(numbers.window_dims(len(table)), numbers.windows, strict=True))
    starts = _known_starts(op.operands[1], numbers.index_map)
    for d, whole in enumerate(table):
        if sizes[d] > 1:
            _tie_window(dims, whole, result[offsets[d]], starts.get(d))
        elif d not in numbers.operand_batching and whole.size <= _SMALL_TABLE:
            keep(whole, f"{describe_op(op)} reads single positions of it")
    _tie_beside(dims, op, relation)


def _scatter(dims: TwinDimensions, op: ir.Operation) -> None:
    """Ties a scatter like a gather, if it combines updates.

    If updates overwrite, all positions are kept, because two indices may become equal in a twin."""
    relation = dimensions_of(op)
    if relation is None:
        dims.keep([*op.operands, *op.results], f"{describe_op(op)} has dynamic shapes")
        return
    numbers = scatter_numbers(op)
    count = len(op.results)
    update = dims.extents_of(op.operands[count + 1])
    rank = len(dims.extents_of(op.operands[0]))
    windows = dict(zip(numbers.window_dims(rank), numbers.windows, strict=True))
    starts = _known_starts(op.operands[count], numbers.index_map)
    combines = count == 1 and reducer_kind(Combining(op).combiner) is not None
    for operand, result in zip(op.operands, op.results, strict=False):
        dims.tie(operand, result)
        for d, whole in enumerate(dims.extents_of(operand)):
            is_window = d in windows and update[windows[d]].size > 1
            if is_window:
                _tie_window(dims, whole, update[windows[d]], starts.get(d))
            if is_window and d in starts:
                continue
            if d in numbers.index_map and (not combines or whole.size <= _SMALL_TABLE):
                keep(whole, f"{describe_op(op)} writes single positions of it")
    _tie_beside(dims, op, relation)


def _tie_beside(dims: TwinDimensions, op: ir.Operation, relation: OpDimensions) -> None:
    """Ties the dimensions that number the windows: those of indices, results and updates."""
    for factor in relation.factors:
        if factor.role in (FactorRole.KEPT, FactorRole.REDUCED):
            along = [dims.extents_of(op.operands[a.tensor])[a.dim] for a in factor.operands]
            along += [dims.extents_of(op.results[a.tensor])[a.dim] for a in factor.results]
            for extent in along[1:]:
                unite(along[0], extent)
        elif factor.role is FactorRole.WHOLE:
            for a in factor.operands:
                keep(dims.extents_of(op.operands[a.tensor])[a.dim], "the parts of an index")


def _constant(dims: TwinDimensions, op: ir.Operation) -> None:
    if is_splat(op):
        return
    # Rows of some tables can be left out.
    numbers = isinstance(element_of(op.results[0]), ir.F32Type | ir.F64Type | ir.IntegerType)
    if not numbers or not isinstance(value_of(op), ir.DenseElementsAttr):
        dims.keep(list(op.results), f"{describe_op(op)} is a table of {op.results[0].type}")


def _reduce_window(dims: TwinDimensions, op: ir.Operation) -> None:
    """Ties cumulative sums, which mean the same at any size; keeps other windows."""
    for d in range(_rank(op.results[0])):
        along = [dims.extents_of(value)[d] for value in [*op.operands, *op.results] if _rank(value)]
        if not is_cumulative(op, d) and _stepped_window(op, d) != (1, 0, 0):
            for extent in along:
                keep(extent, f"windows of {describe_op(op)}")
            continue
        for extent in along[1:]:
            unite(along[0], extent)


def is_cumulative(op: ir.Operation, d: int) -> bool:
    """Returns True if each window has all positions up to its own, or all from it on."""
    size = _shape(op.operands[0])[d]
    return _stepped_window(op, d) in ((size, 0, size - 1), (size, size - 1, 0))


def _stepped_window(op: ir.Operation, d: int) -> tuple[int, int, int] | None:
    """Returns the size, low and high padding of windows with step 1 along a dimension, or None."""
    rank = _rank(op.results[0])
    names = ("window_strides", "base_dilations", "window_dilations")
    if any(integers(op, name, [1] * rank)[d] != 1 for name in names):
        return None
    low, high = integers(op, "padding", [0] * 2 * rank)[2 * d : 2 * d + 2]
    return integers(op, "window_dimensions")[d], low, high


def _pairs(
    dims: TwinDimensions, one: ir.Value, other: ir.Value
) -> Iterator[tuple[TwinExtent, TwinExtent]]:
    return zip(dims.extents_of(one), dims.extents_of(other), strict=True)


def _rank(value: ir.Value) -> int:
    return len(_shape(value))


def _shape(value: ir.Value) -> tuple[int, ...]:
    shape = static_shape(value.type)
    if shape is None and isinstance(value.type, ir.ShapedType) and "?" in str(value.type):
        raise ToolError(f"{value.type}: its sizes must be known to reduce it")
    return shape or ()


def _types(values: Iterable[ir.Value]) -> str:
    return f"({', '.join(str(value.type) for value in values)})"


def _unlike(before: list[list[ir.Value]], after: list[list[ir.Value]]) -> str:
    """Describes the first argument or result that differs between two programs."""
    for what, mine, theirs in zip(("argument", "result"), before, after, strict=True):
        if len(mine) != len(theirs):
            return f"{len(mine)} {what}s and {len(theirs)}"
        for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            if _shape(one) != _shape(other):
                return f"{what} {number} is {one.type} and {other.type}"
    return "none differs"


_SPECIAL: dict[str, Callable[[TwinDimensions, ir.Operation], None]] = {
    **dict.fromkeys(CONSTANTS, _constant),
    CONCATENATE: _concatenate,
    DYNAMIC_SLICE: _dynamic_window,
    DYNAMIC_UPDATE_SLICE: _dynamic_window,
    GATHER: _gather,
    IOTA: lambda dims, op: None,
    PAD: _pad,
    SCATTER: _scatter,
    SLICE: _slice,
    "stablehlo.get_dimension_size": lambda dims, op: None,
    "stablehlo.rng_bit_generator": lambda dims, op: dims.keep(
        [op.operands[0], op.results[0]], "the state of a random number generator"
    ),
    "stablehlo.reduce_window": _reduce_window,
}
