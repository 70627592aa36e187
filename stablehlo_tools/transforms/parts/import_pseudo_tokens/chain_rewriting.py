"""Removes planned chains from the IR. Writing decides nothing.

With fork=preserve, the partial order of the pseudo-tokens is kept: forks stay forks, and joins
become after_all. The argument that held the zero can be removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import CONSTANT, WHILE
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.carriers import drop, drop_entry_argument
from stablehlo_tools.ir.token_chain import create_join, tie_operands, tie_results
from stablehlo_tools.ir.values import has_uses, producer
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import FUNCTION, enclosing, symbol_name
from stablehlo_tools.transforms.parts.import_pseudo_tokens.chain_removal import (
    ImportPlan,
    not_in_one_block,
    sources,
)
from stablehlo_tools.transforms.parts.import_pseudo_tokens.exploration import (
    RESHAPING,
    TokenGraph,
    TokenProgram,
)

PartialOrder = list[list[int]]  # by member: its direct predecessors


def partial_order(plan: ImportPlan) -> PartialOrder:
    """Returns the members that each member's token comes from.

    Raises a located ToolError if the members are in several blocks.
    """
    first = plan.members[0]
    for member in plan.members:
        if member.block != first.block:
            raise not_in_one_block(member)
    number = {member.results[0]: i for i, member in enumerate(plan.members)}
    return [[number[source.results[0]] for source in taken] for taken in sources(plan)]


def thread_partial_order(members: Sequence[ir.Operation], order: PartialOrder) -> None:
    """Ties each member after its predecessors; a token leaves it if another member waits for it."""
    first = members[0]
    root = create_join([], ir.InsertionPoint(first), first.location)
    awaited = {source for sources_of_one in order for source in sources_of_one}
    tokens: dict[int, ir.Value] = {}
    for i, member in enumerate(members):
        before = [tokens[source] for source in order[i]] or [root]
        ip = ir.InsertionPoint(member)
        token = before[0] if len(before) == 1 else create_join(before, ip, member.location)
        token = tie_operands(member, token)
        if i in awaited:
            tokens[i] = tie_results(member, token)


_JAX_EXPORT = "jax.uses_shape_polymorphism"
# Attributes of a module that count arguments.
_LISTS = (
    "mhlo.input_output_alias",
    "mhlo.cross_program_prefetches",
    "mhlo.spmd_parameters_shardings",
    "mhlo.xla_entry_computation_parameter_layouts",
    "mhlo.xla_entry_computation_parameter_tiles",
)


def drop_token_arguments(module: ir.Module, chains: Sequence[TokenGraph]) -> None:
    """Removes the arguments at which the chains begin.

    Raises a located ToolError if one is still used, or an attribute lists the arguments.
    """
    arguments = [ir.BlockArgument(chain.root) for chain in chains if chain.root is not None]
    for argument in sorted(arguments, key=lambda argument: -argument.arg_number):
        function = argument.owner.owner.operation
        what = f"drop-token-argument: argument {argument.arg_number} of @{symbol_name(function)}"
        attributes, location = module.operation.attributes, module.operation.location
        if _JAX_EXPORT in attributes:
            raise ToolError(
                f"{what} belongs to the calling convention of a jax.export artifact (P6)", location
            )
        for name in _LISTS:
            listed = attributes.get(name)
            if listed is not None and not (isinstance(listed, ir.ArrayAttr) and not len(listed)):
                raise ToolError(
                    f"{what}: the module's attribute {name} counts arguments, and would be wrong "
                    "(P6)",
                    location,
                )
        use = next(iter(argument.uses), None)
        if use is not None:
            user = use.owner.operation
            raise ToolError(f"{what} is still used, by {user.name} (P6)", user.location)
        drop_entry_argument(function, argument.arg_number)


def take_out(plan: ImportPlan) -> list[ir.Operation]:
    """Removes the arithmetic of the tokens; returns the rewritten members of the chain."""
    arithmetic = {
        position: op for chain in plan.chains for position, op in _arithmetic(plan.program, chain)
    }
    carries = {
        plan.program.position(maker.op): maker
        for chain in plan.chains
        for maker in chain.makers
        if maker.is_carry
    }
    members = {plan.program.position(op): op for op in plan.members}
    for chain in plan.chains:
        _unlink(plan, chain)
    # From the last to the first, so that users are erased before producers.
    for position in sorted({*arithmetic, *carries}, reverse=True):
        if position in carries:
            # Drops its additional operand and result, unless they are still used.
            carry = carries[position]
            is_needed = plan.stays(carry) or has_uses(carry.token)
            members[position] = carry.op if is_needed else drop(carry.op, 1, 1)
        elif not any(map(has_uses, arithmetic[position].results)):
            arithmetic[position].erase()
    return [members[position] for position in sorted(members)]


def _unlink(plan: ImportPlan, chain: TokenGraph) -> None:
    for link in chain.links:
        if not plan.stays(link):
            link.collective.operands[link.position] = link.plain
    made = chain.made_tokens()
    if any(escape.base in made for escape in chain.escapes):
        return  # the user reads tokens, so their arithmetic must not change
    for kept in plan.kept:
        cuts_kept_link = plan.stays(kept.maker)
        if kept.maker in chain.makers and kept.maker.base in made and not cuts_kept_link:
            _start_anew(chain, kept.maker.op, kept.maker.position)
    for flow in chain.flows:
        if flow.base in made:
            # Control flow still carries a token, but one without predecessors.
            op, parent = flow.op, flow.op.parent
            if op.name == "stablehlo.return" and parent is not None and parent.name == WHILE:
                op.operands[flow.position] = op.block.arguments[flow.position]
            else:
                _start_anew(chain, op, flow.position)


def _start_anew(chain: TokenGraph, op: ir.Operation, position: int) -> None:
    """Replaces a token operand by the root of the chain, if the root is available."""
    build, token = Builder(ir.InsertionPoint(op), op.location), op.operands[position]
    if chain.root is None:
        op.operands[position] = build.splat_like(0, token)
        return
    function = enclosing(op, FUNCTION)
    assert function is not None, "every token stands in a function"
    arguments = Function(function).body.arguments
    root = next((argument for argument in arguments if argument in chain.bases), None)
    if root is not None:
        is_same = root.type == token.type
        op.operands[position] = root if is_same else build.op("convert", [root], token.type)


def _arithmetic(program: TokenProgram, chain: TokenGraph) -> Iterator[tuple[int, ir.Operation]]:
    """Yields the ops that may serve only tokens, with their positions, and their constants."""
    made = chain.made_tokens()
    pending = [op for maker in chain.makers for op in maker.path]
    pending += [maker.op for maker in chain.makers]
    for op in chain.images:
        value = op.results[0]
        if has_uses(value) or chain.bases.get(value) in made:  # the user's dead code stays
            pending.append(op)
    seen: set[ir.Value] = set()
    while pending:
        op = pending.pop()
        if op.results[0] in seen:
            continue
        seen.add(op.results[0])
        if op.name == "stablehlo.all_reduce":
            pending += _reshaping_before([op.operands[-1]])
            continue
        yield program.position(op), op
        pending += _reshaping_before(op.operands)


def _reshaping_before(values: ir.OpOperandList | list[ir.Value]) -> list[ir.Operation]:
    makers = [producer(value) for value in values]
    return [op for op in makers if op is not None and op.name in RESHAPING | {CONSTANT}]
