"""The token chain in the IR: what `thread-tokens` writes and `strip-tokens` reads back.

Everything the chain adds is marked, so that stripping is exact and a user's own tokens and
barriers are never taken for it. Marks are discardable attributes with built-in values: they
survive text, bytecode and portable artifacts, and compilers ignore them.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import COMPOSITE
from stablehlo_tools.ir.builder import Builder, barrier
from stablehlo_tools.ir.inline import inline_call
from stablehlo_tools.ir.walk import FUNCTION, callee_name, symbol_name, walk

LINK = "stablehlo_tools.token_link"  # unit: this op was added by the chain
CARRIED = "stablehlo_tools.tokens_carried"  # integer: so many trailing values are chain tokens
COMPOSITE_PREFIX = "stablehlo_tools."

BARRIER = "stablehlo.optimization_barrier"
AFTER_ALL = "stablehlo.after_all"
_EDGE = "sdy.data_flow_edge"  # of the middle of Shardy's propagation; nothing else uses its input


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
    """A marked barrier over the values and the token: what comes out for each."""
    operands = [*values, token]
    linked = barrier(operands, ip, location)
    linked.attributes[LINK] = ir.UnitAttr.get(location.context)
    *outputs, token_out = linked.results
    return list(outputs), token_out


def create_join(
    tokens: Sequence[ir.Value], ip: ir.InsertionPoint, location: ir.Location
) -> ir.Value:
    """A marked token after all of `tokens`; of none, the root of a chain."""
    types, link = [token_type(location.context)], {LINK: ir.UnitAttr.get(location.context)}
    return Builder(ip, location).create(AFTER_ALL, tokens, types, link).results[0]


def tie_operands(
    op: ir.Operation, token: ir.Value, positions: Sequence[int] | None = None
) -> ir.Value:
    """Lets an op read its operands, or those at `positions`, only after a token.

    Returns the token that comes out.
    """
    tied = range(len(op.operands)) if positions is None else positions
    operands = [op.operands[position] for position in tied]
    outputs, token = create_barrier(operands, token, ir.InsertionPoint(op), op.location)
    for position, output in zip(tied, outputs, strict=True):
        op.operands[position] = output
    return token


def tie_results(op: ir.Operation, token: ir.Value) -> ir.Value:
    """A token that comes after an op's results, which the others read beside it."""
    return tie_values(list(op.results), token, ir.InsertionPoint.after(op), op.location)


def tie_values(
    values: Sequence[ir.Value], token: ir.Value, ip: ir.InsertionPoint, location: ir.Location
) -> ir.Value:
    """A token that comes after some values, which all others read beside it."""
    outputs, token = create_barrier(values, token, ip, location)
    linked = token.owner
    assert not isinstance(linked, ir.Block)
    for value, output in zip(values, outputs, strict=True):
        value.replace_all_uses_except(output, linked.operation)
    return token


def restore_collective(composite: ir.Operation, decomposition: ir.Operation) -> ir.Operation:
    """Puts the collective of a decomposition where a composite stands, on its operands."""
    body = decomposition.regions[0].blocks[0]
    inner = next(op.operation for op in body.operations if LINK not in op.attributes)
    collective = inner.clone(ip=ir.InsertionPoint(composite))
    for position in range(len(inner.operands)):
        collective.operands[position] = composite.operands[position]
    collective.location = composite.location
    return collective


def inline_composites(module: ir.Module) -> None:
    """Puts the decompositions of the chain where its composites stand, each with its location."""
    composites: list[ir.Operation] = []
    functions: dict[str, ir.Operation] = {}

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == COMPOSITE and LINK in op.attributes:
            composites.append(op)
        elif op.name == FUNCTION and LINK in op.attributes:
            functions[symbol_name(op)] = op
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    for composite in composites:
        location = composite.location
        for copy in inline_call(composite, functions[callee_name(composite)]):
            copy.location = location
    for function in functions.values():
        function.erase()


def refuse_tokens(module: ir.Module, name: str, precondition: str) -> None:
    """Raises a located ToolError where an op has a token: a pass that reorders comes before.

    Or where one is an edge of Shardy's propagation, which a value that is used anew breaks.
    """

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == _EDGE:
            raise ToolError(
                f"{_EDGE} stands where {name} may use a value once more: end Shardy's propagation "
                f"with sdy-sink-data-flow-edges before {name} ({precondition})",
                op.location,
            )
        for value in (*op.operands, *op.results):
            if bindings.TokenType.isinstance(value.type):
                raise ToolError(
                    f"{op.name} has a token, which orders what {name} is to interleave: run "
                    f"{name} before thread-tokens, or strip-tokens first ({precondition})",
                    op.location,
                )
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
