"""Finds integer arguments that are indices, with their limits, and those that decide control flow.

A label is compared with the positions of a dimension and must be below its size. Limits are found
backwards from such ops, through ops that move elements:

    %s = dynamic_slice %x, (convert %i), sizes = [4] : tensor<16xf32>    ==>  %i is below 16

It is a heuristic, for inputs that reach both sides of a limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stablehlo_tools.analysis.loops import is_integer_scalar
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import target_of
from stablehlo_tools.dialect.dimension_numbers import gather_numbers, scatter_numbers
from stablehlo_tools.dialect.names import (
    BARRIER,
    CONVERT,
    CUSTOM_CALL,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    PAD,
    SCATTER,
    SELECT,
    SHARDING_CONSTRAINT,
    WHILE,
)
from stablehlo_tools.dialect.traits import (
    BRANCHES,
    CALLS,
    COMPUTATIONS,
    Trait,
    full_names,
    ops_with_any,
)
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.values import is_float, maker_of, producer
from stablehlo_tools.ir.views import Function, While
from stablehlo_tools.ir.walk import (
    FUNCTION,
    callee_name,
    entry_function,
    functions_by_name,
    ops_where,
    symbol_name,
    terminator,
)

# The operands that a result's elements come from. For other ops in a table, all operands.
_MOVED_FIRST = ops_with_any(Trait.LAYOUT | Trait.PIECE | Trait.EXCHANGE) | {
    CONVERT,
    CUSTOM_CALL,
    SHARDING_CONSTRAINT,
    *full_names("real reduce_precision"),
}
_MOVED_FROM = {
    **dict.fromkeys((DYNAMIC_UPDATE_SLICE, PAD), (0, 1)),
    SCATTER: (0, 2),
    SELECT: (1, 2),
    "stablehlo.clamp": (1,),
}
_BY_POSITION = ops_with_any(Trait.ACROSS_DEVICES | Trait.REDUCTION) | {"stablehlo.sort"}
_ALL_MOVED = frozenset({"stablehlo.concatenate", "stablehlo.maximum", "stablehlo.minimum"})
_ANNOTATIONS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")


def index_limits(module: ir.Module) -> list[int]:
    """Returns the limit of each argument of the entry function; 0 if it is not an index.

    As indices, its integers are below the limit.
    """
    origins = RangeOrigins(_copy_without_calls(module))
    limits: dict[int, int] = {}
    pending = [wanted for op in origins.ops for wanted in _indices_of(op)]
    seen = set(pending)
    while pending:
        value, limit = pending.pop()
        number = origins.argument(value)
        if number is not None:
            # An argument may index several dimensions; the smallest is valid for all.
            limits[number] = min(limit, limits.get(number, limit))
            continue
        handed = origins.forwarding_sources(value)
        sources = _sources(value) if handed is None else handed
        fresh = [(source, limit) for source in sources if (source, limit) not in seen]
        seen.update(fresh)
        pending += fresh
    return [limits.get(number, 0) for number in range(origins.arguments)]


def _copy_without_calls(module: ir.Module) -> ir.Module:
    """Returns a copy without calls, so that each call of a function has its own arguments."""
    copy = copy_module(module)
    inline_all_calls(copy)
    return copy


def _indices_of(op: ir.Operation) -> Iterator[tuple[ir.Value, int]]:
    """Yields the operands of an op that are indices, each with its limit."""
    if op.name in (DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE):
        starts = list(op.operands)[1 if op.name == DYNAMIC_SLICE else 2 :]
        for start, size in zip(starts, shape_of(op.operands[0]), strict=True):
            if size > 0:
                yield start, size
    elif op.name in (GATHER, SCATTER):
        # The indices are below the smallest dimension that they index.
        gathers = op.name == GATHER
        numbers = gather_numbers(op) if gathers else scatter_numbers(op)
        sizes = [shape_of(op.operands[0])[dim] for dim in numbers.index_map]
        if sizes and min(sizes) > 0:
            yield op.operands[1 if gathers else len(op.results)], min(sizes)
    elif op.name == "stablehlo.compare":
        # A label of one-hot vectors is compared with the positions of a dimension.
        for one, other in ((0, 1), (1, 0)):
            maker = producer(op.operands[other])
            while maker is not None and maker.name in _MOVED_FIRST:
                maker = producer(maker.operands[0])
            if maker is None or maker.name != "stablehlo.iota":
                continue
            dimension = ir.IntegerAttr(maker.attributes["iota_dimension"]).value
            size = shape_of(maker.results[0])[dimension]
            if size > 0 and not is_float(op.operands[one].type):
                yield op.operands[one], size


def _sources(value: ir.Value) -> list[ir.Value]:
    """Returns the operands that the elements of a computed value come from."""
    op = maker_of(value)
    name, operands = op.name, list(op.operands)
    if name in _MOVED_FIRST or (name == CUSTOM_CALL and target_of(op) in _ANNOTATIONS):
        # Booleans are no indices.
        element = element_of(operands[0])
        return (
            operands[:1] if (not isinstance(element, ir.IntegerType) or element.width > 1) else []
        )
    if name in _MOVED_FROM:
        return [operands[place] for place in _MOVED_FROM[name] if place < len(operands)]
    if name in _BY_POSITION:
        return [operands[ir.OpResult(value).result_number]]
    return operands if name in _ALL_MOVED else []


def steering_arguments(module: ir.Module, *, of_loops: bool = False) -> list[int]:
    """Returns the integer scalar arguments that decide loops or branches.

    With `of_loops`, only those that decide a trip count.
    """
    origins = RangeOrigins(_copy_without_calls(module))
    pending: list[ir.Value] = []
    for op in origins.ops:
        if op.name == WHILE:
            pending.append(terminator(While(op).condition).operands[0])
        elif op.name in BRANCHES and not of_loops:
            pending.append(op.operands[0])
    seen, numbers = set(pending), set[int]()
    while pending:
        value = pending.pop()
        number = origins.argument(value)
        if number is not None:
            numbers.add(number)
            continue
        op, handed = producer(value), origins.forwarding_sources(value)
        sources = handed if handed is not None else list(op.operands) if op is not None else []
        fresh = [v for v in sources if v not in seen and is_integer_scalar(v.type)]
        seen.update(fresh)
        pending += fresh
    return sorted(numbers)


class RangeOrigins:
    """Follows the values of one module backwards, across calls, loops, branches and computations.

    Control flow passes on the same value; other ops compute a new one.
    """

    def __init__(self, module: ir.Module) -> None:
        self._module = module  # its ops are valid only while it lives
        self._entry = entry_function(module)
        self._functions = functions_by_name(module)
        self._calls: dict[str, list[ir.Operation]] = {}
        self.ops = ops_where(module.operation, lambda _: True)
        for op in self.ops:
            if op.name in CALLS:
                self._calls.setdefault(callee_name(op), []).append(op)

    @property
    def arguments(self) -> int:
        """The number of the program's arguments."""
        return len(Function(self._entry).body.arguments)

    def argument(self, value: ir.Value) -> int | None:
        """Returns the number of the program's argument that a value is; None for other values."""
        if producer(value) is not None:
            return None
        argument = ir.BlockArgument(value)
        return argument.arg_number if argument.owner.owner.operation == self._entry else None

    def forwarding_sources(self, value: ir.Value) -> Sequence[ir.Value] | None:
        """Returns the values that this one may be equal to; None if an op computes it."""
        op = producer(value)
        if op is None:
            # The operands for an argument of a region; none for a reduction's.
            argument = ir.BlockArgument(value)
            op, number = argument.owner.owner.operation, argument.arg_number
            if op.name == FUNCTION:
                calls = self._calls.get(symbol_name(op), [])
                return [call.operands[number] for call in calls if number < len(call.operands)]
            if op.name == WHILE:
                return _initial_and_yield(op, number)
            return [op.operands[number]] if op.name in COMPUTATIONS else []
        number = ir.OpResult(value).result_number
        if op.name == BARRIER:
            return [op.operands[number]]
        if op.name == WHILE:
            return _initial_and_yield(op, number)
        if op.name in BRANCHES or op.name in COMPUTATIONS:
            return [terminator(region.blocks[0]).operands[number] for region in op.regions]
        if op.name not in CALLS:
            return None
        callee = self._functions.get(callee_name(op))
        if callee is None or not len(callee.regions[0].blocks):
            return []
        return [Function(callee).yield_of(number)]


def _initial_and_yield(loop: ir.Operation, number: int) -> list[ir.Value]:
    return [loop.operands[number], While(loop).yield_of(number)]
