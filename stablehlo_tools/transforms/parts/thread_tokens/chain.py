"""The vocabulary that `thread-tokens` writes and `strip-tokens` reads back.

Everything the chain adds is marked, so that stripping is exact and a user's own tokens and
barriers are never taken for it. Marks are discardable attributes with built-in values: they
survive text, bytecode and portable artifacts, and compilers ignore them.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir

LINK = "stablehlo_tools.token_link"  # unit: this op was added by the chain
CARRIED = "stablehlo_tools.tokens_carried"  # integer: so many trailing values are chain tokens
COMPOSITE_PREFIX = "stablehlo_tools."

BARRIER = "stablehlo.optimization_barrier"
AFTER_ALL = "stablehlo.after_all"


def token_type(context: ir.Context) -> ir.Type:
    """`!stablehlo.token`."""
    return bindings.TokenType.get(context)


def is_link(op: ir.Operation) -> bool:
    """Whether the chain added this op."""
    return LINK in op.attributes


def tokens_carried(op: ir.Operation) -> int:
    """How many of the op's trailing operands, arguments and results are chain tokens."""
    count = op.attributes.get(CARRIED)
    return count.value if isinstance(count, ir.IntegerAttr) else 0


def is_refined_by_jax(module: ir.Module) -> bool:
    """Whether jax refines the module's shapes at the call: symbolic dimensions, several platforms.

    Its refinement ends the process at a manual computation with a token operand, and fails at a
    call with symbolic dimensions inside of one.
    """
    polymorphic = module.operation.attributes.get("jax.uses_shape_polymorphism")
    return polymorphic is not None and ir.BoolAttr(polymorphic).value


def may_decide_platform(value: ir.Value) -> bool:
    """Whether a value may be the platform index or a dimension's size: an integer of rank 0.

    jax makes these constants at the call, and a barrier would keep the compiler from seeing it:
    the code of the other platforms would stay, which this one cannot even compile.
    """
    kind = value.type
    return (
        isinstance(kind, ir.RankedTensorType)
        and kind.rank == 0
        and isinstance(kind.element_type, ir.IntegerType)
    )


def mark_carrier(op: ir.Operation, count: int) -> None:
    """Records on an op that its last `count` values are chain tokens."""
    op.attributes[CARRIED] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64, op.context), count)


def create_barrier(
    values: Sequence[ir.Value], token: ir.Value, ip: ir.InsertionPoint, location: ir.Location
) -> tuple[list[ir.Value], ir.Value]:
    """A marked barrier over the values and the token: what comes out for each."""
    operands = [*values, token]
    barrier = ir.Operation.create(
        BARRIER,
        results=[value.type for value in operands],
        operands=operands,
        attributes={LINK: ir.UnitAttr.get(location.context)},
        loc=location,
        ip=ip,
    )
    *outputs, token_out = barrier.results
    return list(outputs), token_out


def create_join(
    tokens: Sequence[ir.Value], ip: ir.InsertionPoint, location: ir.Location
) -> ir.Value:
    """A marked token after all of `tokens`; of none, the root of a chain."""
    join = ir.Operation.create(
        AFTER_ALL,
        results=[token_type(location.context)],
        operands=list(tokens),
        attributes={LINK: ir.UnitAttr.get(location.context)},
        loc=location,
        ip=ip,
    )
    return join.results[0]
