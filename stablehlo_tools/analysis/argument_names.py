"""What the caller of a program calls its arguments, for messages."""

from __future__ import annotations

import re

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION

_NAME = re.compile(r'"([^"]*)"(?!:\d)')  # of a place in a file a number follows


def path_of(argument: ir.Value) -> str:
    """The path in the pytree that jax exported an argument of `main` with, `batch['x']`, or what
    else its location names it; empty where it names nothing."""
    found = _NAME.search(str(argument.location))
    return found[1] if found else ""


def argument_name(argument: ir.Value) -> str:
    """`batch['x'] (argument 7)`, or `argument 7`: an argument of `main`, or the operand of a manual
    computation that an argument in there is."""
    outside = outside_of(argument)
    owner = outside.owner
    if not isinstance(owner, ir.Block):
        return f"operand {ir.BlockArgument(argument).arg_number} of the manual computation"
    path, counted = path_of(outside), f"argument {ir.BlockArgument(outside).arg_number}"
    return f"{path} ({counted})" if path else counted


def outside_of(argument: ir.Value) -> ir.Value:
    """What an argument of a manual computation is outside of it; any other value itself."""
    owner = argument.owner
    if isinstance(owner, ir.Block) and owner.owner.name == MANUAL_COMPUTATION:
        return owner.owner.operation.operands[ir.BlockArgument(argument).arg_number]
    return argument
