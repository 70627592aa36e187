"""A program as the demand analysis reads it: one graph, calls written out; which devices share a
value, and along which dimension its places are told apart.

A function that is called twice is read twice, so that each call has its own values. Arguments of
callees are the operands themselves.

Where some axes of the mesh are left to the partitioner, it moves data along them as it likes: what
one device needs, all that differ from it along free axes only must have. Outside of every manual
computation that holds for all devices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.dataflow import Body, Dataflow, Node
from stablehlo_tools.analysis.replica_groups import AxisRef, mesh_axes_groups
from stablehlo_tools.analysis.shardings import manual_axes, sharding_axes, sharding_per_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION, WHILE
from stablehlo_tools.dialect.traits import CALLS, COMPUTATIONS
from stablehlo_tools.ir.symbols import callee_name, functions_by_name

ENTER = "enter"  # a manual computation: global values become shards
LEAVE = "leave"
EDGES = frozenset({ENTER, LEAVE})
_DEEPEST = 60  # calls and regions in each other


class Program(Dataflow):
    """An entry function and all that it calls. The edges of a manual computation are nodes of their
    own; a call that cannot be followed (recursive, declared only) stays one op.

    `types[n]` is the type of value n: that of a shard for values that leave the outermost manual
    computation. `around` has the manual computation that an op stands in, where it stands in one.
    `crossings` has the shards that a computation takes as another left them, with the global value
    in between; `kept` has them with the shard that the other computation gave.
    """

    def __init__(self, module: ir.Module, entry: ir.Operation, facts: ModuleFacts) -> None:
        super().__init__()
        self.around: dict[Node, ir.Operation] = {}
        self._functions = functions_by_name(module)
        self._computation: ir.Operation | None = None
        self._depth = -1
        self._left: dict[int, int] = {}  # what leaves a computation: its number outside, and inside
        self.root = self._body(entry.regions[0].blocks[0])
        self.types = [value.type for value in self.values]
        for outside, inside in self._left.items():
            if self.maker[outside] not in self.around:
                self.types[outside] = self.types[inside]
        self.crossings = _crossings(self, facts)
        self.kept = {inside: self._left[outside] for inside, outside in self.crossings.items()}

    @property
    def is_global(self) -> bool:
        """Whether what stands outside of manual computations is about all devices at once."""
        return any(node.name == ENTER for node in self.nodes)

    @cached_property
    def users(self) -> dict[int, list[Node]]:
        """The ops that take a value; a shard that is kept, the computation that takes it again."""
        users = super().users
        for inside, end in self.kept.items():
            users.setdefault(end, []).append(self.maker[inside])
        return users

    def _body(self, block: ir.Block) -> Body:
        self._depth += 1
        body = super()._body(block)
        self._depth -= 1
        return body

    def _op(self, op: ir.Operation, nodes: list[Node]) -> None:
        name = op.name
        if name in CALLS and self._followed(op, nodes):
            return
        if name == MANUAL_COMPUTATION:
            self._manual(op, nodes)
        elif name in COMPUTATIONS:
            self._written_out(op, op.regions[0].blocks[0], self.numbers, nodes)
        else:
            super()._op(op, nodes)

    def _followed(self, call: ir.Operation, nodes: list[Node]) -> bool:
        """Writes a call out; whether that is possible."""
        callee = self._functions.get(callee_name(call))
        if callee is None or len(callee.regions[0].blocks) != 1 or self._depth >= _DEEPEST:
            return False
        self._written_out(call, callee.regions[0].blocks[0], {}, nodes)
        return True

    def _written_out(
        self, op: ir.Operation, block: ir.Block, scope: dict[ir.Value, int], nodes: list[Node]
    ) -> None:
        """Reads a block in the place of an op; `scope` has the values in sight of the block."""
        outside, operands = self.numbers, self._numbers(op.operands)
        scope.update(zip(block.arguments, operands, strict=True))
        self.numbers = scope
        self._depth += 1
        returned = self._read(block, nodes)
        self._depth -= 1
        self.numbers = outside
        outside.update(zip(op.results, returned, strict=True))

    def _manual(self, op: ir.Operation, nodes: list[Node]) -> None:
        """Writes a manual computation out, with nodes at its edges."""
        block, outer = op.regions[0].blocks[0], self._computation
        operands = self._numbers(op.operands)
        nodes.append(self._add(op, ENTER, operands, self._numbers(block.arguments)))
        self._computation = op
        self._depth += 1
        returned = self._read(block, nodes)
        self._depth -= 1
        self._computation = outer
        results = self._numbers(op.results)
        nodes.append(self._add(op, LEAVE, returned, results))
        self._left.update(zip(results, returned, strict=True))

    def _add(
        self,
        op: ir.Operation,
        name: str,
        operands: tuple[int, ...],
        results: tuple[int, ...],
        captures: tuple[int, ...] = (),
        bodies: tuple[Body, ...] = (),
    ) -> Node:
        node = super()._add(op, name, operands, results, captures, bodies)
        if self._computation is not None:
            self.around[node] = self._computation
        return node

    def computation(self, node: Node) -> ir.Operation | None:
        """The manual computation that an op belongs to; an edge belongs to its own."""
        return node.op if node.name in EDGES else self.around.get(node)


def walked_loops(
    code: Body, communicates: Callable[[Node], bool], inside: bool = False
) -> set[Node]:
    """The loops that are worth following iteration by iteration: the outermost, and those in them
    that communicate.
    """
    loops: set[Node] = set()
    for node in code.nodes:
        is_loop = node.name == WHILE
        if is_loop and (not inside or any(map(communicates, node.bodies[1].nested()))):
            loops.add(node)
        for body in node.bodies:
            loops |= walked_loops(body, communicates, inside or is_loop)
    return loops


Groups = NDArray[Any]
Need = NDArray[np.bool_]  # by device and place; one column where places are not told apart


class Levels:
    """The groups of devices that share values, for each manual computation and outside of all."""

    def __init__(self, program: Program, facts: ModuleFacts) -> None:
        self._facts = facts
        self._everyone: Groups = np.arange(facts.grid.size).reshape(1, -1)
        self._outside = self._everyone if program.is_global else None
        self._known: dict[ir.Operation, Groups | None] = {}

    def groups(self, computation: ir.Operation | None) -> Groups | None:
        """Rows of devices that share what one of them needs; None where each is on its own."""
        if computation is None:
            return self._outside
        if computation not in self._known:
            self._known[computation] = self._groups(computation)
        return self._known[computation]

    def _groups(self, computation: ir.Operation) -> Groups | None:
        names = {*_meshes(computation, "in_shardings"), *_meshes(computation, "out_shardings")}
        mesh = self._facts.meshes.get(next(iter(names))) if len(names) == 1 else None
        manual: set[str] = set()
        around: ir.Operation | None = computation
        while around is not None:
            if around.name == MANUAL_COMPUTATION:
                manual |= manual_axes(around)
            around = around.parent
        if mesh is None or mesh.size != self._facts.grid.size:
            return self._everyone
        free = [AxisRef(name) for name, size in mesh.axes if name not in manual and size > 1]
        return np.array(mesh_axes_groups(mesh, free)) if free else None


def shared(need: Need, groups: Groups | None) -> Need:
    """What each device needs, once all of a group need what one of it does."""
    if groups is None:
        return need
    spread = need.copy()
    spread[groups] = need[groups].any(axis=1, keepdims=True)
    return spread


def _crossings(program: Program, facts: ModuleFacts) -> dict[int, int]:
    """The shards that one manual computation takes as another left them: inside to outside.

    A training step has one computation for each direction, and what the first saves for the second
    goes through global values that nothing else is done with.
    """
    made: dict[int, tuple[Node, int]] = {}
    same: dict[int, int] = {}
    for node in program.nodes:
        if node.name not in EDGES or node in program.around:
            continue
        if node.name == LEAVE:
            made.update((number, (node, i)) for i, number in enumerate(node.results))
            continue
        for position, (outside, inside) in enumerate(zip(node.operands, node.results, strict=True)):
            if outside not in made:
                continue
            left, index = made[outside]
            if _form(left, "out_shardings", index, facts) == _form(
                node, "in_shardings", position, facts
            ) and (program.types[outside] == program.types[inside]):
                same[inside] = outside
    return same


def _form(node: Node, name: str, position: int, facts: ModuleFacts) -> tuple[object, ...]:
    """How a value is divided among the devices."""
    sharding = sharding_per_value(node.op.attributes[name])[position]
    mesh = sharding_axes(sharding)[0]
    dimensions = tuple(str(d) for d in bindings.TensorShardingAttr(sharding).dimension_shardings)
    return facts.meshes.get(mesh, mesh), dimensions, manual_axes(node.op)


def _meshes(computation: ir.Operation, name: str) -> list[str]:
    return [sharding_axes(s)[0] for s in sharding_per_value(computation.attributes[name])]
