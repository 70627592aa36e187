"""Small modules written as text, whose ops a test calls by the names of their locations.

SSA names are gone once a module is parsed; a location stays: `%a = stablehlo.tanh %x : … loc("a")`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, find_collectives
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import ops_where

_KEPT: list[ir.Module] = []  # an op or a value that a test holds does not keep its module alive


@dataclass(frozen=True)
class NamedOps:
    """A module, and its ops that have a name."""

    module: ir.Module
    ops: dict[str, ir.Operation]

    def __getitem__(self, name: str) -> ir.Operation:
        return self.ops[name]

    def value(self, name: str) -> ir.Value:
        """The first result of an op."""
        return self.ops[name].results[0]

    def arguments(self, function: int = 0) -> list[ir.Value]:
        """The arguments of one of the module's functions."""
        return list(Function(self.functions[function]).body.arguments)

    @property
    def functions(self) -> list[ir.Operation]:
        """The functions of the module, in order."""
        ops = [view.operation for view in self.module.body.operations]
        return [op for op in ops if op.name == "func.func"]

    @property
    def block(self) -> ir.Block:
        """The body of the first function."""
        return Function(self.functions[0]).body

    @property
    def collectives(self) -> list[Collective]:
        """All of the module, in order."""
        return find_collectives(self.module)

    @property
    def facts(self) -> ModuleFacts:
        """What the module says of its devices and meshes."""
        return ModuleFacts.from_module(self.module)


def name_of(op: ir.Operation) -> str:
    """The name of an op's location; that of the op itself where it has none."""
    return op.location.name_str if isinstance(op.location, ir.NameLoc) else op.name


def names_of(ops: Iterable[ir.Operation]) -> list[str]:
    """`name_of` of each."""
    return [name_of(op) for op in ops]


def read(text: str) -> NamedOps:
    """A module, verified."""
    module = artifact.parse(text.encode(), module_only=True).module
    module.operation.verify()
    _KEPT.append(module)
    named = ops_where(module.operation, lambda op: isinstance(op.location, ir.NameLoc))
    return NamedOps(module, {name_of(op): op for op in named})


def in_function(arguments: str, lines: str, results: str, *, partitions: int = 1) -> NamedOps:
    """A module of one function; `results` are the values that it returns, with their types."""
    values, _, types = results.partition(" : ")
    return read(f"""
    module attributes {{mhlo.num_partitions = {partitions} : i32, mhlo.num_replicas = 1 : i32}} {{
    func.func public @main({arguments}) -> ({types}) {{
{lines}
      return {values}{" : " if types else ""}{types}
    }} }}""")


@contextmanager
def refused(message: str) -> Generator[None]:
    """Expects a ToolError that says exactly this."""
    with pytest.raises(ToolError) as refusal:
        yield
    said = refusal.value.diagnostic.message
    assert said == message, said
