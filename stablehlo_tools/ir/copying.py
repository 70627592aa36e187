"""Copies of whole modules: a rewrite that may come to nothing works on one."""

from __future__ import annotations

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir


def copy_module(module: ir.Module) -> ir.Module:
    """A module like another, in its context."""
    return bindings.parse_module(bindings.write_bytecode(module), module.context)


def take_over(module: ir.Module, other: ir.Module) -> None:
    """Gives a module the ops of another, which is empty afterwards."""
    for view in list(module.body.operations):
        view.operation.erase()
    for view in list(other.body.operations):
        module.body.append(view.operation.detach_from_parent())
