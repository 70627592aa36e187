"""A block and the blocks in it, read once: values as numbers, ops as nodes.

The analysis runs many times, from different arguments; it must not ask the bindings each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

from stablehlo_tools.analysis.dimension_propagation.tilings import (
    OpTiling,
    Tilings,
    relation_of,
    shapes_of,
    tiling_of,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.factors import OpDimensions
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.values import is_float

WHILE = "stablehlo.while"
BRANCHES = frozenset({"stablehlo.if", "stablehlo.case"})


@dataclass(eq=False)
class Body:
    """A block: its arguments, its ops without the terminator, and what the terminator returns."""

    block: ir.Block
    arguments: tuple[int, ...]
    nodes: tuple[Node, ...]
    returned: tuple[int, ...]


@dataclass(eq=False)
class Node:
    """An op. `captures` are values from outside that its regions use; those of control flow have
    their regions in `bodies`, and no captures of their own."""

    op: ir.Operation
    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    captures: tuple[int, ...] = ()
    bodies: tuple[Body, ...] = ()
    inputs: tuple[int, ...] = field(init=False)  # operands and captures

    def __post_init__(self) -> None:
        self.inputs = (*self.operands, *self.captures)

    @cached_property
    def relation(self) -> OpDimensions | None:
        """Which of its dimensions go together."""
        return relation_of(self.op)

    def tiling(self, tilings: Tilings, parts: int, *, regroups: bool = False) -> OpTiling | None:
        """How it runs on operands of which some are tiled; see `tiling_of`."""
        return tiling_of(self.op, self.relation, tilings, parts, regroups=regroups)


@dataclass
class Graph:
    """All of a block. `values[n]` is value number n; `data` are the numbers of those that depend on
    an argument of floats."""

    root: Body = field(init=False)
    values: list[ir.Value] = field(default_factory=list[ir.Value])
    numbers: dict[ir.Value, int] = field(default_factory=dict[ir.Value, int])
    nodes: list[Node] = field(default_factory=list[Node])
    data: set[int] = field(default_factory=set[int])

    @staticmethod
    def of(block: ir.Block) -> Graph:
        """The graph of a block, all blocks in it included."""
        graph = Graph()
        graph.root = graph._body(block)
        floats = {n for n in graph.root.arguments if is_float(graph.values[n].type)}
        while graph.data != floats:
            graph.data = set(floats)
            _spread(graph.root, floats)
        return graph

    def number(self, value: ir.Value) -> int:
        """The number of a value, a new one where it has none yet."""
        number = self.numbers.get(value)
        if number is None:
            number = self.numbers[value] = len(self.values)
            self.values.append(value)
        return number

    def shape(self, number: int) -> tuple[int, ...] | None:
        """The shape of a value; None where it is no static tensor."""
        shapes = shapes_of([self.values[number]])
        return None if shapes is None else shapes[0]

    def _body(self, block: ir.Block) -> Body:
        arguments = self._numbers(block.arguments)
        end = terminator(block)
        ops = [op.operation for op in block.operations][:-1]
        nodes = tuple(self._node(op) for op in ops)
        return Body(block, arguments, nodes, self._numbers(end.operands))

    def _node(self, op: ir.Operation) -> Node:
        operands, name = self._numbers(op.operands), op.name
        bodies: tuple[Body, ...] = ()
        captures: tuple[int, ...] = ()
        if name == WHILE or name in BRANCHES:
            bodies = tuple(self._body(region.blocks[0]) for region in op.regions)
        elif len(op.regions):
            captures = self._numbers(captured(op))
        node = Node(op, name, operands, self._numbers(op.results), captures, bodies)
        self.nodes.append(node)
        return node

    def _numbers(self, values: Sequence[ir.Value]) -> tuple[int, ...]:
        return tuple(self.number(value) for value in values)


def captured(op: ir.Operation) -> list[ir.Value]:
    """The values from outside that the regions of an op use, in the order of the text."""
    inside: set[ir.Value] = set()
    used: dict[ir.Value, None] = {}

    def visit(block: ir.Block) -> None:
        inside.update(block.arguments)
        for view in block.operations:
            used.update(dict.fromkeys(view.operation.operands))
            for region in view.operation.regions:
                for inner in region.blocks:
                    visit(inner)
            inside.update(view.operation.results)

    for region in op.regions:
        for block in region.blocks:
            visit(block)
    return [value for value in used if value not in inside]


def inputs_of(node: Node) -> set[int]:
    """The values that an op and the ops in it use, its own blocks' among them."""
    used = set(node.inputs)
    for body in node.bodies:
        used.update(body.returned)
        for inner in body.nodes:
            used |= inputs_of(inner)
    return used


def needed(
    nodes: Sequence[Node], ends: Iterable[int], given: Set[int] = frozenset()
) -> tuple[Node, ...]:
    """Those of the ops that values depend on, the makers of `given` ones left out."""
    wanted = set(ends)
    makers: list[Node] = []
    for node in reversed(nodes):
        if wanted.isdisjoint(node.results) or not given.isdisjoint(node.results):
            continue
        makers.append(node)
        wanted.update(inputs_of(node))
    return tuple(reversed(makers))


def _spread(body: Body, reached: set[int]) -> None:
    for node in body.nodes:
        if node.name == WHILE:
            condition, inner = node.bodies
            for place, operand in enumerate(node.operands):
                if {operand, inner.returned[place], condition.returned[0]} & reached:
                    reached |= {
                        node.results[place],
                        inner.arguments[place],
                        condition.arguments[place],
                    }
        for inner in node.bodies:
            _spread(inner, reached)
        if node.name in BRANCHES:
            for place, result in enumerate(node.results):
                returned = {inner.returned[place] for inner in node.bodies}
                if (returned | {node.operands[0]}) & reached:
                    reached.add(result)
        elif node.name != WHILE and not reached.isdisjoint(node.inputs):
            reached.update(node.results)
