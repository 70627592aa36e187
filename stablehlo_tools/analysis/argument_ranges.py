"""In which range a program wants its arguments, by what it does with them.

A second moment stands under a square root and must not be negative; a label is compared with the
positions of a dimension and must be below its size. Found backwards from such ops, through what
moves elements and through arithmetic that keeps a sign:

    %v1 = add (multiply 0.9, %v), (multiply 0.1, (multiply %g, %g))      // %g may be anything
    %s  = sqrt %v1                                            ==>  %v is positive

It is a heuristic: an argument that is put in its range is one that the program can live with, and
nothing follows from one that is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import (
    BARRIER,
    CONVERT,
    DYNAMIC_UPDATE_SLICE,
    PAD,
    POWER,
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
    ops_with,
    ops_with_any,
)
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.values import is_float, producer, splat_of
from stablehlo_tools.ir.walk import (
    FUNCTION,
    callee_name,
    entry_function,
    functions_by_name,
    symbol_name,
    terminator,
    walk,
)

Sign = Literal["any", "positive", "unit"]  # unit: between 0 and 1
_NARROWER: tuple[Sign, ...] = ("any", "positive", "unit")


@dataclass(frozen=True)
class Range:
    """Of what numbers an argument is; integers are below `below`, if it is not 0."""

    sign: Sign = "any"
    below: int = 0

    def narrowed(self, other: Range) -> Range:
        """What is in both ranges."""
        below = min((b for b in (self.below, other.below) if b), default=0)
        return Range(_NARROWER[max(_NARROWER.index(r.sign) for r in (self, other))], below)


ANY, POSITIVE, UNIT = Range(), Range("positive"), Range("unit")

# Ops that are not numbers where their operand is out of range, and the range.
_WANTED = {
    **dict.fromkeys(ops_with(Trait.OF_POSITIVE), POSITIVE),
    **dict.fromkeys(ops_with(Trait.OF_UNIT), UNIT),
}
_MULTIPLY, _NEGATE = "stablehlo.multiply", "stablehlo.negate"
_INTEGER_DIVISION = frozenset({"stablehlo.divide", "stablehlo.remainder"})

# Which operands the elements of a result are; of all others in a table, those in all places.
_MOVED_FIRST = ops_with_any(Trait.LAYOUT | Trait.PIECE | Trait.EXCHANGE) | {
    CONVERT,
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
_SUMS = frozenset({"stablehlo.add", "stablehlo.divide"})  # positive where their operands are
_ANNOTATIONS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")


def argument_ranges(module: ir.Module) -> list[Range]:
    """The range of each argument of the entry function."""
    origins = Origins(_inlined(module))
    ranges: dict[int, Range] = {}
    pending = [wanted for op in origins.ops for wanted in _wanted(op)]
    seen = set(pending)
    while pending:
        value, wanted = pending.pop()
        number = origins.argument(value)
        if number is not None:
            ranges[number] = ranges.get(number, ANY).narrowed(wanted)
            continue
        handed = origins.handed(value)
        sources = _sources(value, wanted) if handed is None else [(v, wanted) for v in handed]
        fresh = [source for source in sources if source not in seen]
        seen.update(fresh)
        pending += fresh
    return [ranges.get(number, ANY) for number in range(origins.arguments)]


def _inlined(module: ir.Module) -> ir.Module:
    """A copy without calls: a function that several call says nothing of any one's argument."""
    copy = copy_module(module)
    inline_all_calls(copy)
    return copy


def _wanted(op: ir.Operation) -> Iterator[tuple[ir.Value, Range]]:
    """The operands of an op that it wants in a range."""
    name = op.name
    if name == "stablehlo.log_plus_one" and is_float(op.operands[0].type):
        yield _above_minus_one(op.operands[0])
    elif name in _WANTED and is_float(op.operands[0].type):
        yield op.operands[0], _WANTED[name]
    elif name == POWER and is_float(op.operands[0].type):
        exponent = splat_of(op.operands[1])
        if not isinstance(exponent, float) or not exponent.is_integer():
            yield op.operands[0], POSITIVE
    elif name in _INTEGER_DIVISION and not is_float(op.operands[1].type):
        yield op.operands[1], POSITIVE
    elif name == "stablehlo.dynamic_slice":
        sizes = shape_of(op.operands[0])
        yield from _below(list(op.operands)[1:], sizes)
    elif name == "stablehlo.dynamic_update_slice":
        yield from _below(list(op.operands)[2:], shape_of(op.operands[0]))
    elif name in ("stablehlo.gather", "stablehlo.scatter"):
        yield from _indices(op)
    elif name == "stablehlo.compare":
        yield from _positions(op)


def _above_minus_one(value: ir.Value) -> tuple[ir.Value, Range]:
    """What has to be in which range for the logarithm of 1 + `value`: of 1 - p, a probability, and
    of 1 - x * x, which functions like the inverse of erf take."""
    maker = producer(value)
    if maker is not None and maker.name == _NEGATE:
        return maker.operands[0], UNIT
    if maker is not None and maker.name == _MULTIPLY:
        one, other = maker.operands
        for factor, negated in ((one, other), (other, one)):
            negate = producer(negated)
            if negate is not None and negate.name == _NEGATE and negate.operands[0] == factor:
                return factor, UNIT
    return value, POSITIVE


def _below(starts: Sequence[ir.Value], sizes: Sequence[int]) -> Iterator[tuple[ir.Value, Range]]:
    for start, size in zip(starts, sizes, strict=True):
        if size > 0:
            yield start, Range(below=size)


def _indices(op: ir.Operation) -> Iterator[tuple[ir.Value, Range]]:
    """The indices of a gather or scatter: below the smallest dimension that they index."""
    gathers = op.name == "stablehlo.gather"
    number = 1 if gathers else len(op.results)
    text = str(op.attributes["dimension_numbers" if gathers else "scatter_dimension_numbers"])
    name = "start_index_map" if gathers else "scatter_dims_to_operand_dims"
    _, _, listed = text.partition(f"{name} = [")
    dims = [int(part) for part in listed.partition("]")[0].split(",") if part.strip()]
    sizes = [shape_of(op.operands[0])[dim] for dim in dims]
    if sizes and min(sizes) > 0:
        yield op.operands[number], Range(below=min(sizes))


def _positions(op: ir.Operation) -> Iterator[tuple[ir.Value, Range]]:
    """What is compared with the positions of a dimension, as a label of one-hot vectors is."""
    for one, other in ((0, 1), (1, 0)):
        maker = producer(op.operands[other])
        while maker is not None and maker.name in _MOVED_FIRST:
            maker = producer(maker.operands[0])
        if maker is None or maker.name != "stablehlo.iota":
            continue
        dimension = ir.IntegerAttr(maker.attributes["iota_dimension"]).value
        size = shape_of(maker.results[0])[dimension]
        if size > 0 and not is_float(op.operands[one].type):
            yield op.operands[one], Range(below=size)


def _sources(value: ir.Value, wanted: Range) -> list[tuple[ir.Value, Range]]:
    """What has to be in which range for a computed value to be in one."""
    op = producer(value)
    assert op is not None, "an argument of a block is handed, not computed"
    name, operands = op.name, list(op.operands)
    if name in _MOVED_FIRST:
        return [(operands[0], wanted)] if _is_number(operands[0], wanted) else []
    if name in _MOVED_FROM:
        return [(operands[place], wanted) for place in _MOVED_FROM[name] if place < len(operands)]
    if name in _BY_POSITION:
        return [(operands[ir.OpResult(value).result_number], wanted)]
    if name == "stablehlo.maximum" and wanted.sign == "positive" and _is_bounded_below(operands):
        return []
    if name in _ALL_MOVED:
        return [(operand, wanted) for operand in operands]
    if name == "stablehlo.custom_call":
        target = ir.StringAttr(op.attributes["call_target_name"]).value
        return [(operands[0], wanted)] if target in _ANNOTATIONS else []
    return [] if wanted.sign == "any" else _arithmetic(op, replace(wanted, below=0))


def _arithmetic(op: ir.Operation, wanted: Range) -> list[tuple[ir.Value, Range]]:
    operands = list(op.operands)
    if op.name == _MULTIPLY:
        is_square = wanted.sign == "positive" and _is_square(operands)
        return [] if is_square else [(operand, wanted) for operand in operands]
    if op.name in _SUMS and wanted == POSITIVE:
        return [(operand, wanted) for operand in operands]
    if op.name in (POWER, "stablehlo.sqrt"):
        return [(operands[0], wanted)]
    if op.name == "stablehlo.subtract":  # 1 - p, a probability or its complement
        minuend = splat_of(operands[0])
        return [(operands[1], UNIT)] if minuend == 1 and is_float(operands[0].type) else []
    return []


def _is_square(factors: Sequence[ir.Value]) -> bool:
    """Whether a product is that of a value and itself, or of a constant's multiple of it."""
    one, other = (_without_constant(factor) for factor in factors)
    return one == other


def _without_constant(value: ir.Value) -> ir.Value:
    op = producer(value)
    if op is not None and op.name == _MULTIPLY:
        for factor, constant in ((0, 1), (1, 0)):
            number = splat_of(op.operands[constant])
            if isinstance(number, float) and number > 0:
                return op.operands[factor]
    return value


def _is_bounded_below(operands: Sequence[ir.Value]) -> bool:
    """Whether a maximum is not negative whatever its other operand is."""
    numbers = [splat_of(operand) for operand in operands]
    return any(isinstance(number, float) and number >= 0 for number in numbers)


def _is_number(value: ir.Value, wanted: Range) -> bool:
    """Whether a range says something of a value before it was converted."""
    element = element_of(value)
    if isinstance(element, ir.IntegerType):
        return element.width > 1 and wanted.sign != "unit"
    return not wanted.below or isinstance(element, ir.FloatType)


def steering_arguments(module: ir.Module) -> list[int]:
    """The arguments, integer scalars, that decide how often a loop runs or which branch does."""
    origins = Origins(_inlined(module))
    pending = [value for op in origins.ops for value in _deciding(op)]
    seen, numbers = set(pending), set[int]()
    while pending:
        value = pending.pop()
        number = origins.argument(value)
        if number is not None:
            numbers.add(number)
            continue
        op, handed = producer(value), origins.handed(value)
        sources = handed if handed is not None else list(op.operands) if op is not None else []
        fresh = [v for v in sources if v not in seen and _is_integer_scalar(v)]
        seen.update(fresh)
        pending += fresh
    return sorted(numbers)


def _deciding(op: ir.Operation) -> list[ir.Value]:
    if op.name == "stablehlo.while":
        condition = op.regions[0].blocks[0]
        return [list(condition.operations)[-1].operation.operands[0]]
    return [op.operands[0]] if op.name in ("stablehlo.if", "stablehlo.case") else []


def _is_integer_scalar(value: ir.Value) -> bool:
    type_ = value.type
    return (
        isinstance(type_, ir.RankedTensorType)
        and not type_.rank
        and isinstance(type_.element_type, ir.IntegerType)
    )


class Origins:
    """Follows the values of one module backwards, across calls, loops, branches and computations.

    What control flow hands on is the same value elsewhere; what an op computes is another one.
    """

    def __init__(self, module: ir.Module) -> None:
        self._module = module  # which ends its ops when nobody holds it
        self._entry = entry_function(module)
        self._functions = functions_by_name(module)
        self._calls: dict[str, list[ir.Operation]] = {}
        self.ops: list[ir.Operation] = []

        def visit(op: ir.Operation) -> ir.WalkResult:
            self.ops.append(op)
            if op.name in CALLS:
                self._calls.setdefault(callee_name(op), []).append(op)
            return ir.WalkResult.ADVANCE

        walk(module.operation, visit)

    @property
    def arguments(self) -> int:
        """How many arguments the program has."""
        return len(self._entry.regions[0].blocks[0].arguments)

    def argument(self, value: ir.Value) -> int | None:
        """Which argument of the program a value is; None for all others."""
        if producer(value) is not None:
            return None
        argument = ir.BlockArgument(value)
        return argument.arg_number if argument.owner.owner.operation == self._entry else None

    def handed(self, value: ir.Value) -> Sequence[ir.Value] | None:
        """The values that this one may be elsewhere; None for what an op computes."""
        op = producer(value)
        if op is None:
            argument = ir.BlockArgument(value)
            return self._into(argument.owner.owner.operation, argument.arg_number)
        number = ir.OpResult(value).result_number
        if op.name == BARRIER:
            return [op.operands[number]]
        if op.name == WHILE:
            return _carried(op, number)
        if op.name in BRANCHES or op.name in COMPUTATIONS:
            return [terminator(region.blocks[0]).operands[number] for region in op.regions]
        if op.name not in CALLS:
            return None
        callee = self._functions.get(callee_name(op))
        if callee is None or not len(callee.regions[0].blocks):
            return []
        return [terminator(callee.regions[0].blocks[0]).operands[number]]

    def _into(self, op: ir.Operation, number: int) -> Sequence[ir.Value]:
        """What an argument of an op's region is given; nothing for those of a reduction."""
        if op.name == FUNCTION:
            calls = self._calls.get(symbol_name(op), [])
            return [call.operands[number] for call in calls if number < len(call.operands)]
        if op.name == WHILE:
            return _carried(op, number)
        return [op.operands[number]] if op.name in COMPUTATIONS else []


def _carried(loop: ir.Operation, number: int) -> list[ir.Value]:
    return [loop.operands[number], terminator(loop.regions[1].blocks[0]).operands[number]]
