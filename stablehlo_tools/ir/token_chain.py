"""Builds and reads the token chain that `thread-tokens` writes and `strip-tokens` removes.

Each op of the chain is marked, so that stripping is exact and never removes a user's own tokens or
barriers. Marks are discardable attributes with built-in values: they survive text, bytecode and
portable artifacts, and compilers ignore them.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import AFTER_ALL, COMPOSITE
from stablehlo_tools.ir.builder import Builder, barrier
from stablehlo_tools.ir.inline import inline_call
from stablehlo_tools.ir.values import stand_in
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import FUNCTION, callee_name, ops_where, symbol_name

LINK = "stablehlo_tools.token_link"  # unit: the chain added this op
CARRIED = "stablehlo_tools.tokens_carried"  # integer: number of trailing values that are tokens
COMPOSITE_PREFIX = "stablehlo_tools."

_EDGE = "sdy.data_flow_edge"  # exists within Shardy's propagation; must be its input's only user


def token_type(context: ir.Context) -> ir.Type:
    """Returns the type `!stablehlo.token`."""
    return bindings.TokenType.get(context)


def is_link(op: ir.Operation) -> bool:
    """Returns True if the chain added this op."""
    return LINK in op.attributes


def tokens_carried(op: ir.Operation) -> int:
    """Returns the number of an op's trailing operands, arguments and results that are tokens."""
    count = op.attributes.get(CARRIED)
    return count.value if isinstance(count, ir.IntegerAttr) else 0


def is_refined_by_jax(module: ir.Module) -> bool:
    """Returns True if jax refines the module's shapes at the call.

    It does for symbolic dimensions and several platforms. Its refinement crashes the process at a
    manual computation with a token operand. It fails at a call with symbolic dimensions inside of
    one.
    """
    polymorphic = module.operation.attributes.get("jax.uses_shape_polymorphism")
    return polymorphic is not None and ir.BoolAttr(polymorphic).value


def may_decide_platform(value: ir.Value) -> bool:
    """Returns True for integers of rank 0: possibly the platform index or a dimension's size.

    jax makes these constants at the call. A barrier would hide the constant from the compiler, and
    the code of other platforms would stay, which may not compile on this platform.
    """
    type_ = value.type
    return (
        isinstance(type_, ir.RankedTensorType)
        and type_.rank == 0
        and isinstance(type_.element_type, ir.IntegerType)
    )


def mark_carrier(op: ir.Operation, count: int) -> None:
    """Records on an op that its last `count` values are chain tokens."""
    op.attributes[CARRIED] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64, op.context), count)


def create_barrier(
    values: Sequence[ir.Value], token: ir.Value, ip: ir.InsertionPoint, location: ir.Location
) -> tuple[list[ir.Value], ir.Value]:
    """Creates a marked barrier over values and a token; returns the results of both."""
    operands = [*values, token]
    linked = barrier(operands, ip, location)
    linked.attributes[LINK] = ir.UnitAttr.get(location.context)
    *outputs, token_out = linked.results
    return list(outputs), token_out


def create_join(
    tokens: Sequence[ir.Value], ip: ir.InsertionPoint, location: ir.Location
) -> ir.Value:
    """Creates a marked token that joins `tokens`; without any, the root of a chain."""
    types, link = [token_type(location.context)], {LINK: ir.UnitAttr.get(location.context)}
    return Builder(ip, location).create(AFTER_ALL, tokens, types, link).results[0]


def tie_operands(
    op: ir.Operation, token: ir.Value, positions: Sequence[int] | None = None
) -> ir.Value:
    """Makes an op read its operands, or those at `positions`, only after a token.

    Returns the new token.
    """
    tied = range(len(op.operands)) if positions is None else positions
    operands = [op.operands[position] for position in tied]
    outputs, token = create_barrier(operands, token, ir.InsertionPoint(op), op.location)
    for position, output in zip(tied, outputs, strict=True):
        op.operands[position] = output
    return token


def tie_results(op: ir.Operation, token: ir.Value) -> ir.Value:
    """Creates a token after an op's results; their other users then wait for it too."""
    return tie_values(list(op.results), token, ir.InsertionPoint.after(op), op.location)


def tie_values(
    values: Sequence[ir.Value], token: ir.Value, ip: ir.InsertionPoint, location: ir.Location
) -> ir.Value:
    """Creates a token after some values; their other users then wait for it too."""
    outputs, token = create_barrier(values, token, ip, location)
    for value, output in zip(values, outputs, strict=True):
        stand_in(value, output)
    return token


def restore_collective(composite: ir.Operation, decomposition: ir.Operation) -> ir.Operation:
    """Copies a decomposition's collective before a composite, with its operands and location."""
    body = Function(decomposition).body
    inner = next(op.operation for op in body.operations if LINK not in op.attributes)
    collective = inner.clone(ip=ir.InsertionPoint(composite))
    for position in range(len(inner.operands)):
        collective.operands[position] = composite.operands[position]
    collective.location = composite.location
    return collective


def inline_composites(module: ir.Module) -> None:
    """Inlines the chain's composites; the ops get the location of their composite."""
    linked = ops_where(module.operation, is_link)
    functions = {symbol_name(op): op for op in linked if op.name == FUNCTION}
    composites = [op for op in linked if op.name == COMPOSITE]
    for composite in composites:
        location = composite.location
        for copy in inline_call(composite, functions[callee_name(composite)]):
            copy.location = location
    for function in functions.values():
        function.erase()


def refuse_tokens(module: ir.Module, name: str, precondition: str) -> None:
    """Raises a located ToolError if an op has a token, as passes that reorder run before.

    Also raises for an edge of Shardy's propagation, which breaks if its input gets another use.
    """
    for op in ops_where(module.operation, lambda _: True):
        if op.name == _EDGE:
            raise ToolError(
                f"{_EDGE} must be the only use of its value, but {name} may add others: run "
                f"sdy-sink-data-flow-edges before {name} ({precondition})",
                op.location,
            )
        if any(bindings.TokenType.isinstance(v.type) for v in (*op.operands, *op.results)):
            raise ToolError(
                f"{op.name} has a token, and tokens fix an order that {name} changes: run {name} "
                f"before thread-tokens, or strip-tokens first ({precondition})",
                op.location,
            )
