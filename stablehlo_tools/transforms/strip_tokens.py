"""Removes the token chain that `thread-tokens` wrote.

    %t0 = stablehlo.after_all {stablehlo_tools.token_link}
    %x1, %t1 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %x, %t0
    %g0 = "stablehlo.all_gather"(%x1)
    %g, %t2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %g0, %t1
  ==>
    %g = "stablehlo.all_gather"(%x)

Links, carries, arguments and decompositions are found by the marks that `thread-tokens` leaves, so
the user's own tokens and barriers stay.

Preconditions:
  P1  Only the chain uses its tokens, and every marked op still has its token last.

Guarantees: the exact inverse of `thread-tokens` in either form; a module without a chain stays
unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics, ToolError
from stablehlo_tools.dialect.names import AFTER_ALL, BARRIER, COMPOSITE, WHILE
from stablehlo_tools.dialect.traits import BRANCHES
from stablehlo_tools.ir.carriers import drop, drop_arguments, drop_from_terminator, resize_function
from stablehlo_tools.ir.token_chain import (
    CARRIED,
    create_join,
    is_link,
    restore_collective,
    token_type,
    tokens_carried,
)
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.ir.walk import FUNCTION, callee_name, symbol_name, walk
from stablehlo_tools.passes.base import Pass


@dataclass(frozen=True)
class StripTokensPass(Pass):
    """The exact inverse of `thread-tokens`."""

    name: ClassVar[str] = "strip-tokens"

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Strips the module in place."""
        strip_module(module)


def strip_module(module: ir.Module) -> None:
    """Removes every marked op, carry, argument and decomposition.

    First all uses of chain tokens are replaced by one placeholder. So links and carriers can be
    removed in any order. If the placeholder is unused at the end, only the chain used its tokens.

    Raises a located ToolError if later rewriting has damaged the chain.
    """
    # All are collected first, because removing ops would disturb the walk.
    links, carriers, decompositions = _find_chain(module)
    if not (links or carriers or decompositions):
        return
    location = module.operation.location
    placeholder = create_join([], ir.InsertionPoint.at_block_begin(module.body), location)
    for link in links:
        _remove_link(link, placeholder, decompositions)
    for carrier in carriers:
        _trim(carrier, placeholder)
    left = next(iter(placeholder.uses), None)
    if left is not None:
        user = left.owner.operation
        raise _chain_error(user, f"{user.name} uses a token of the chain")
    maker_of(placeholder).erase()
    for decomposition in decompositions.values():
        decomposition.erase()


def _find_chain(
    module: ir.Module,
) -> tuple[list[ir.Operation], list[ir.Operation], dict[str, ir.Operation]]:
    """Returns the links, the carriers and the decompositions of the chain."""
    links: list[ir.Operation] = []
    carriers: list[ir.Operation] = []
    decompositions: dict[str, ir.Operation] = {}

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == FUNCTION and is_link(op):
            decompositions[symbol_name(op)] = op
            return ir.WalkResult.SKIP
        if is_link(op):
            links.append(op)
        elif tokens_carried(op):
            carriers.append(op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    return links, carriers, decompositions


def _remove_link(
    link: ir.Operation, placeholder: ir.Value, decompositions: dict[str, ir.Operation]
) -> None:
    if link.name == COMPOSITE:
        decomposition = decompositions.get(callee_name(link))
        if decomposition is None:
            raise _chain_error(link, "the decomposition of a composite is gone")
        values = list(restore_collective(link, decomposition).results)
    elif link.name == BARRIER:
        values = list(link.operands)[:-1]
    elif link.name != AFTER_ALL:
        raise _chain_error(link, f"{link.name} is marked as a link of the chain but is not one")
    elif len(link.operands) == 2:  # the join before an op that has a token of its own
        link.results[0].replace_all_uses_with(link.operands[0])
        link.erase()
        return
    else:  # the root of a chain, or the join after such an op, or after both halves of a transfer
        values = []
    if not len(link.results):
        raise _chain_error(link, f"{link.name} has lost its token")
    *tensors, token = link.results
    if token.type != token_type(link.context) or len(tensors) != len(values):
        raise _chain_error(link, f"{link.name} has lost its token")
    for result, value in zip(tensors, values, strict=True):
        result.replace_all_uses_with(value)
    token.replace_all_uses_with(placeholder)
    link.erase()


def _trim(carrier: ir.Operation, placeholder: ir.Value) -> None:
    """Drops the trailing tokens of a carrier: operands, arguments, returned values and results."""
    count = tokens_carried(carrier)
    if count < 0:
        raise _chain_error(carrier, f"{carrier.name} says that it carries {count} tokens")
    for region in carrier.regions:
        block = region.blocks[0]
        # Regions of branches have no arguments: they use the token from outside.
        if carrier.name not in BRANCHES:
            _release(carrier, list(block.arguments)[-count:], placeholder)
            drop_arguments(block, count)
        # The condition of a while returns a predicate alone.
        if not (carrier.name == WHILE and region == carrier.regions[0]):
            drop_from_terminator(block, count)
    del carrier.attributes[CARRIED]
    if carrier.name == FUNCTION:
        resize_function(carrier, -count, -count)
        return
    _release(carrier, list(carrier.results)[-count:], placeholder)
    drop(carrier, 0 if carrier.name in BRANCHES else count, count)


def _release(carrier: ir.Operation, values: Sequence[ir.Value], placeholder: ir.Value) -> None:
    for value in values:
        if value.type != placeholder.type:
            raise _chain_error(carrier, f"{carrier.name} no longer carries its tokens last")
        value.replace_all_uses_with(placeholder)


def _chain_error(op: ir.Operation, what: str) -> ToolError:
    return ToolError(
        f"{what}: the token chain was changed after thread-tokens wrote it, and cannot be "
        "removed exactly; run strip-tokens before rewriting the module",
        op.location,
    )
