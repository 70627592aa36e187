"""The rules that map each op on floats into a field, one rule per op.

A rule replaces the op, or leaves it if it means the same on residues. Ops without a rule are in
`UNCHANGED`, are uninterpreted functions, or have no form in the field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.custom_calls import is_annotation, is_top_k, target_of
from stablehlo_tools.dialect.dimension_numbers import conv_numbers, dot_numbers
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import BITCAST_CONVERT, CUSTOM_CALL, SHARDING_CONSTRAINT
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.dialect.traits import Trait, full_names, ops_with, ops_with_any
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.rewriter import replace
from stablehlo_tools.ir.values import CONSTANTS, producer, splat_of
from stablehlo_tools.ir.views import Combining
from stablehlo_tools.ir.walk import enclosing
from stablehlo_tools.verify.exact.constants import elements_of
from stablehlo_tools.verify.exact.field_builder import CENTRED_BITS, FieldBuilder
from stablehlo_tools.verify.exact.host_functions import TARGET, write_host_call
from stablehlo_tools.verify.exact.mapped_module import MappedModule, MappedOp, is_inexact

Rule = Callable[[MappedModule, MappedOp, FieldBuilder], None]

# The values of uninterpreted functions at 0, by the names of StableHLO, CHLO and custom calls.
_ZERO_AT_ZERO = (
    "asin asinh atan atanh bessel_i1e cbrt ceil erf erf_inv exponential_minus_one floor "
    "log_plus_one round_nearest_afz round_nearest_even sine sinh sqrt tan tanh"
)
_ONE_AT_ZERO = "cosh cosine erfc exponential"
_ANY_AT_ZERO = "acos acosh atan2 digamma lgamma log next_after polygamma power remainder rsqrt zeta"
_AT_ZERO: dict[str, float | None] = {
    **dict.fromkeys(_ZERO_AT_ZERO.split(" "), 0.0),
    **dict.fromkeys(_ONE_AT_ZERO.split(" "), 1.0),
    "logistic": 0.5,
    **dict.fromkeys(_ANY_AT_ZERO.split(" ")),
}
_SCALED_BITS = 9_437_069  # bit patterns of random floats are neighbours, which have one sign
_MOST_CONVOLVED = 2**15  # products of 46 bits in one sum
_MOST_MULTIPLIED = 64  # the largest exponent of a power that is written as products

SUMMING = ops_with_any(Trait.REDUCTION | Trait.ACROSS_DEVICES) | full_names(
    "scatter select_and_scatter"
)
UNCHANGED = (
    ops_with_any(Trait.BRANCH | Trait.LOOP | Trait.COMPUTATION | Trait.CALLS)
    | ops_with_any(Trait.TERMINATOR | Trait.TOKEN | Trait.TRANSFER | Trait.EXCHANGE)
    | ops_with_any(Trait.LAYOUT | Trait.PIECE | Trait.JOIN)
    | ops_with_any(Trait.SHARDING_ONLY | Trait.RESHARDING)
    | {f"sdy.{name}" for name in ("propagation_barrier", "sharding_group", "data_flow_edge")}
    | full_names(
        "select negate iota map optimization_barrier get_dimension_size tuple get_tuple_element"
    )
    | {"func.func"}
)
_COMPARING = CONSTANTS | full_names("compare select and or not negate return")
_SUMMED_CALL = re.compile(r"(reduce-scatter|all-reduce)-(start|done)")
_KNOWN_CALL = re.compile(r"(?:mhlo|chlo)\.(\w+)")
_SOLVING_CALL = re.compile(r"lapack_[sd]trsm_ffi")
_PASSING_CALL = re.compile(
    r"MoveTo(Host|Device)|Pin|Unpin|(all-gather|collective-permute|all-to-all)-(start|done)"
)


def is_sum(op: ir.Operation) -> bool:
    """Returns True if a reduction's last region adds its two arguments, converted or not."""
    if op.name not in SUMMING:
        return False
    block = op.regions[len(op.regions) - 1].blocks[0]
    if reducer_kind(block) == "add":
        return True
    names = [view.operation.name for view in block.operations]
    others = [n for n in names if n not in ("stablehlo.convert", "sdy.sharding_constraint")]
    return len(block.arguments) == 2 and others == ["stablehlo.add", "stablehlo.return"]


def is_extremum(op: ir.Operation) -> bool:
    """Returns True if a reduction's region returns the larger or smaller of its two arguments."""
    if op.name not in SUMMING or len(op.regions) > 1:
        return False
    return reducer_kind(Combining(op).combiner) in ("maximum", "minimum")


def is_sort(op: ir.Operation) -> bool:
    """Returns True if an op sorts real numbers only by comparisons.

    Then its operands can be replaced once by integers of the same order."""
    if op.name != "stablehlo.sort" or any(
        isinstance(_element(value.type), ir.ComplexType) for value in op.operands
    ):
        return False
    return {view.operation.name for view in op.regions[0].blocks[0].operations} <= _COMPARING


def rule_of(name: str) -> Rule | None:
    """Returns the rule of an op; None if it has no form in the field."""
    prefix, _, short = name.partition(".")
    if name in RULES:
        return RULES[name]
    if short in _AT_ZERO and prefix in ("stablehlo", "chlo"):
        return _replace_by_hash
    return (lambda module, each, builder: None) if name in UNCHANGED else None


def _replace_by_hash(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    name = each.name.partition(".")[2]
    if each.name == CUSTOM_CALL:
        name = target_of(each.op).partition(".")[2]

    def function(inner: FieldBuilder, *operands: ir.Value) -> ir.Value:
        return inner.hash_residues(name, _AT_ZERO[name], *operands)

    operands = [_as_residues(value, builder) for value in each.op.operands]
    each.replace(module.helper(each, builder, name, function, *operands))


# Field arithmetic.


def _constant(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    type_ = each.result_types[0]
    assert isinstance(type_, ir.RankedTensorType)
    elements = elements_of(each.op, type_)

    def table(numbers: np.ndarray) -> ir.Value:
        residues = module.field.residues(numbers)
        if each.plain:
            residues = module.field.to_ordered(residues)
        if residues.size == 1:
            return builder.splat(int(residues.reshape(-1)[0]), type_.shape, builder.i64)
        return builder.constant(np.ascontiguousarray(residues.reshape(type_.shape)))

    if np.iscomplexobj(elements):
        each.replace(builder.complex(table(np.real(elements)), table(np.imag(elements))))
    else:
        each.replace(table(elements))


def _pointwise(write: Callable[..., ir.Value]) -> Rule:
    """Returns the rule of an op that is replaced by `write(builder, *operands)`."""

    def rule(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
        each.replace(write(builder, *each.op.operands))

    return rule


def _ring(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    # In the region of a sum: `_centre_sums` reduces the total after the op.
    if each.plain and each.name == "stablehlo.add":
        return
    short = each.name.removeprefix("stablehlo.")
    each.replace(builder.centre_residues(builder.same(short, *each.op.operands)))


def _divide(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    dividend, divisor = each.op.operands
    number = splat_of(divisor)
    if isinstance(number, int):
        return each.replace(builder.times_number(dividend, module.field.inverse(number)))
    inverse = module.helper(each, builder, "inverse", FieldBuilder.inverse, divisor)
    return each.replace(builder.times(dividend, inverse))


def _power(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    """Writes products if the exponent is a small integer, else an uninterpreted function."""
    base, exponent = each.op.operands
    number = splat_of(exponent)
    if not isinstance(number, int) or abs(number) > _MOST_MULTIPLIED:
        return _replace_by_hash(module, each, builder)
    if number < 0:
        base = module.helper(each, builder, "inverse", FieldBuilder.inverse, base)
    return each.replace(builder.power(base, abs(number)) if number else builder.number(1, base))


def _dot(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    one, other = (_as_residues(value, builder) for value in each.op.operands)
    if builder.is_complex(one) != builder.is_complex(other):
        raise each.refusal()
    contracted = [len(shape_of(one)) - 1]
    if each.name == "stablehlo.dot_general":
        contracted = list(dot_numbers(each.op).lhs_contracting)
    terms = int(np.prod([shape_of(one)[dim] for dim in contracted]))
    try:
        each.replace(builder.product(each.op, one, other, terms))
    except ToolError as error:
        raise each.refusal(error.diagnostic.message) from None


def _convolution(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    kernel = shape_of(each.op.operands[1])
    terms = int(np.prod(kernel)) // max(1, kernel[conv_numbers(each.op).kernel_output_feature])
    if terms > _MOST_CONVOLVED or builder.is_complex(each.op.results[0]):
        raise each.refusal("complex, or a sum of too many products")
    for number, value in enumerate(each.op.operands):
        each.op.operands[number] = _as_residues(value, builder)
    if "precision_config" in each.op.attributes:
        del each.op.attributes["precision_config"]
    _centre_sums(module, each, builder)


def _as_residues(value: ir.Value, builder: FieldBuilder) -> ir.Value:
    """Converts an integer operand to residues; products of mixed types may have one."""
    return value if builder.is_complex(value) else builder.convert(value, builder.i64)


def _reduction(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    if is_sum(each.op):
        _centre_sums(module, each, builder)
    elif is_extremum(each.op):
        _by_order(module, each, builder)
    elif each.name in ("stablehlo.all_reduce", "stablehlo.reduce_scatter"):  # all of XLA:CPU
        raise each.refusal("only sums, maxima and minima across devices")


def _centre_sums(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    """Reduces sums of residues modulo p after the op that computes them."""
    _change_results(module, each, builder, FieldBuilder.centre_residues)


def _reduce_constraint(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    """Reduces the results of a constraint on unreduced values modulo p.

    At such a constraint, XLA adds up the partial sums of a manual computation."""
    maker = producer(each.op.operands[0])
    if maker and "unreduced=" in str(maker.attributes.get("out_shardings")):
        _centre_sums(module, each, builder)


def _change_results(
    module: MappedModule,
    each: MappedOp,
    builder: FieldBuilder,
    change: Callable[[FieldBuilder, ir.Value], ir.Value],
) -> None:
    after = FieldBuilder(module.field, ir.InsertionPoint.after(each.op), builder.location)
    for result, type_ in zip(each.op.results, each.result_types, strict=True):
        if is_inexact(type_):
            # Listed first, because `change` adds uses of the result.
            uses = [(use.owner.operation, use.operand_number) for use in result.uses]
            changed = change(after, result)
            for user, number in uses:
                user.operands[number] = changed


def _fourier(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    """Writes an FFT as contractions with powers of a root of unity, one dimension at a time."""
    kind = re.findall(r"I?R?FFT", str(each.op.attributes["fft_type"]))[0]
    sizes, field = integers(each.op, "fft_length"), module.field
    value = each.op.operands[0]
    last, inverse = len(shape_of(value)) - 1, kind.startswith("I")
    if not builder.is_complex(value):
        value = builder.complex(value, builder.number(0, value))
    dims = range(last + 1 - len(sizes), last + 1)
    # RFFT halves the last dimension first, and IRFFT restores it last.
    for dim, size in sorted(zip(dims, sizes, strict=True), reverse=not inverse):
        real, imaginary = field.fourier_matrix(size)
        if inverse:
            scale = field.inverse(size)
            real, imaginary = (field.centre_residues(m * scale) for m in (real, -imaginary))
        half = size // 2 + 1
        if dim == last and kind == "RFFT":
            real, imaginary = (m[:, :half] for m in (real, imaginary))
        if dim == last and kind == "IRFFT":  # two conjugates add up to twice their real part
            rows = np.arange(half)
            twice = np.where((rows == 0) | (2 * rows == size), 1, 2)[:, None]
            real, imaginary = (field.centre_residues(m[:half] * twice) for m in (real, imaginary))
        matrix = np.ascontiguousarray(real), np.ascontiguousarray(imaginary)
        value = builder.contract(value, dim, matrix)
    each.replace(builder.parts(value)[0] if kind == "IRFFT" else value)


# Types and predicates.


def _always(answer: bool) -> Rule:
    def rule(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
        boolean = ir.IntegerType.get_signless(1)
        each.replace(builder.splat(answer, shape_of(each.op.results[0]), boolean))

    return rule


def _compare(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    if not builder.is_complex(each.op.operands[0]):
        # Residues are i64, to which the types FLOAT and TOTALORDER do not apply.
        signed = ir.Attribute.parse("#stablehlo<comparison_type SIGNED>")
        each.op.attributes["compare_type"] = signed
        if not (each.plain and enclosing(each.op, "stablehlo.sort")):
            _order_operands(module, each, builder)


def _order_operands(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    for number, type_ in enumerate(each.operand_types):
        if is_inexact(type_):
            value = each.op.operands[number]
            constant = splat_of(value)
            if isinstance(constant, int):
                ordered = builder.number(int(module.field.to_ordered(np.array(constant))), value)
            else:
                ordered = module.helper(each, builder, "ordered", FieldBuilder.to_ordered, value)
            each.op.operands[number] = ordered


def _by_order(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    """Makes an op choose among integers that sort like the residues."""
    if not each.plain:
        _order_operands(module, each, builder)
        _change_results(module, each, builder, FieldBuilder.from_ordered)


def _sort(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    if is_sort(each.op):
        _by_order(module, each, builder)


def _size_or_sign(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    [value] = each.op.operands
    is_size = each.name == "stablehlo.abs"
    if builder.is_complex(value) and is_size:
        each.replace(builder.hash_residues("sqrt", 0.0, builder.norm(value)))
    elif builder.is_complex(value):
        each.replace(builder.hash_residues("sign", 0.0, value))
    elif is_size:
        _by_order(module, each, builder)
    else:
        _order_operands(module, each, builder)


def _convert(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    source, target = (_element(types[0]) for types in (each.operand_types, each.result_types))
    value = each.op.operands[0]
    from_complex, to_complex = (isinstance(e, ir.ComplexType) for e in (source, target))
    if from_complex and not to_complex:
        value = builder.parts(value)[0]
    if isinstance(source, ir.IntegerType):
        if source.width == 64:  # reduced in its own type: in i64 it might not be below 2**62
            prime = builder.splat(builder.field.prime, shape_of(value), source)
            value = builder.same("remainder", value, prime)
        value = builder.convert(value, builder.i64)
        if source.width >= CENTRED_BITS:
            value = builder.centre_residues(value)
    elif isinstance(target, ir.IntegerType):
        if target.width == 1:
            value = builder.compare("NE", value, builder.number(0, value))
        else:
            value = builder.convert(value, target)
    if to_complex and not from_complex:
        value = builder.complex(value, builder.number(0, value))
    each.replace(value)


def _bitcast(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    """Writes residues times a constant as integers of the float's width, and the inverse."""
    source, target = (_element(types[0]) for types in (each.operand_types, each.result_types))
    value, final = each.op.operands[0], each.result_types[0]
    if any(isinstance(element, ir.ComplexType) for element in (source, target)):
        raise each.refusal("complex")
    if isinstance(source, ir.FloatType):
        scaled = builder.times_number(value, _SCALED_BITS)
        value = builder.convert(scaled, ir.IntegerType.get_signless(source.width))
    if isinstance(target, ir.FloatType):
        integer = ir.IntegerType.get_signless(target.width)
        final = builder.tensor(ir.RankedTensorType(final).shape, integer)
    if value.type != final:
        value = builder.op("bitcast_convert", [value], final)
    if isinstance(target, ir.FloatType):
        wide = builder.centre_residues(builder.convert(value, builder.i64))
        value = builder.times_number(wide, module.field.inverse(_SCALED_BITS))
    each.replace(value)


def _conjugate(builder: FieldBuilder, value: ir.Value) -> ir.Value:
    if not builder.is_complex(value):
        return value
    real, imaginary = builder.parts(value)
    return builder.complex(real, builder.same("negate", imaginary))


def _element(type_: ir.Type) -> ir.Type:
    return ir.RankedTensorType(type_).element_type


# Functions of whole arrays.


def _host(kind: str) -> Rule:
    def rule(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
        types = [*each.operand_types, *each.result_types]
        if not all(isinstance(type_, ir.RankedTensorType) for type_ in types):
            raise each.refusal("it has operands or results that are tokens or tuples")
        inexact = tuple(map(is_inexact, each.result_types))
        number = len(module.host_functions)
        if kind == "top_k":
            _by_order(module, each, builder)
        if kind == "triangular_solve" and builder.is_complex(each.op.operands[0]):
            raise each.refusal("complex")
        try:
            function, made = write_host_call(kind, each.op, inexact, builder, number)
        except ToolError as error:
            raise each.refusal(error.diagnostic.message) from None
        module.host_functions.append(function)
        replace(each.op, made)

    return rule


def _custom_call(module: MappedModule, each: MappedOp, builder: FieldBuilder) -> None:
    target = target_of(each.op)
    if _SUMMED_CALL.fullmatch(target):
        if target.endswith("done"):
            _centre_sums(module, each, builder)
    elif target == TARGET or is_annotation(each.op) or _PASSING_CALL.fullmatch(target):
        return
    elif (known := _KNOWN_CALL.fullmatch(target)) and known[1] in _AT_ZERO:
        _replace_by_hash(module, each, builder)
    else:
        kind = "opaque"
        if is_top_k(each.op):
            kind = "top_k"
        elif _SOLVING_CALL.fullmatch(target):
            kind = "triangular_solve"
        _host(kind)(module, each, builder)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(CONSTANTS, _constant),
    **dict.fromkeys(("stablehlo.add", "stablehlo.subtract", "stablehlo.multiply"), _ring),
    "stablehlo.divide": _divide,
    "stablehlo.power": _power,
    "chlo.square": _pointwise(lambda builder, value: builder.times(value, value)),
    **dict.fromkeys(SUMMING, _reduction),
    **dict.fromkeys(("sdy.all_reduce", "sdy.reduce_scatter"), _centre_sums),
    SHARDING_CONSTRAINT: _reduce_constraint,
    **dict.fromkeys(("stablehlo.dot", "stablehlo.dot_general"), _dot),
    "stablehlo.convolution": _convolution,
    "stablehlo.fft": _fourier,
    "stablehlo.compare": _compare,
    **dict.fromkeys(("stablehlo.maximum", "stablehlo.minimum", "stablehlo.clamp"), _by_order),
    **dict.fromkeys(("stablehlo.abs", "stablehlo.sign"), _size_or_sign),
    "stablehlo.sort": _sort,
    "stablehlo.convert": _convert,
    BITCAST_CONVERT: _bitcast,
    **dict.fromkeys(
        full_names("reduce_precision uniform_quantize uniform_dequantize"),
        _pointwise(lambda _, value: value),
    ),
    "stablehlo.is_finite": _always(True),
    **dict.fromkeys(("chlo.is_inf", "chlo.is_pos_inf", "chlo.is_neg_inf"), _always(False)),
    "stablehlo.complex": _pointwise(FieldBuilder.complex),
    "stablehlo.real": _pointwise(lambda b, v: b.parts(v)[0] if b.is_complex(v) else v),
    "stablehlo.imag": _pointwise(lambda b, v: b.parts(v)[1] if b.is_complex(v) else b.number(0, v)),
    "chlo.conj": _pointwise(_conjugate),
    "chlo.top_k": _host("top_k"),
    "stablehlo.triangular_solve": _host("triangular_solve"),
    "stablehlo.cholesky": _host("opaque"),
    CUSTOM_CALL: _custom_call,
}
assert (
    not ops_with(Trait.ELEMENTWISE)
    - ops_with(Trait.BITWISE)
    - set(RULES)
    - UNCHANGED
    - {f"{dialect}.{name}" for dialect in ("stablehlo", "chlo") for name in _AT_ZERO}
    - ops_with(Trait.SHIFT)
    - {"stablehlo.popcnt", "stablehlo.count_leading_zeros", "stablehlo.not"}
)
