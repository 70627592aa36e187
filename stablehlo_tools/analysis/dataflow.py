"""Reads a block and its nested blocks once: values as numbers, ops as nodes, blocks as bodies.

Analyses visit a block many times, from different arguments. Asking the bindings each time is ten
times as slow. Only this module knows how values pass through control flow: `carries` and
`handed_on` give the values that are the same elsewhere, `sources_of` all that a value may depend
on.

`solve` propagates facts about values, forwards or backwards, until none changes. It is MLIR's
sparse dataflow solver (`mlir/Analysis/DataFlow/SparseAnalysis.h`) without lattices of its own. An
analysis defines how a node transforms facts, and how two facts are joined.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Self

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.dialect.traits import BRANCHES

CONTROL_FLOW = BRANCHES | {WHILE}


@dataclass(eq=False, slots=True)
class Body:
    """A block: its arguments, its ops without the terminator, and the terminator's operands."""

    block: ir.Block
    arguments: tuple[int, ...]
    nodes: tuple[Node, ...]
    returned: tuple[int, ...]

    def all_nodes(self) -> Iterator[Node]:
        """Yields every op, each before those in its regions."""
        return walk_nodes(self.nodes)


@dataclass(eq=False, slots=True)
class Node:
    """An op. `captures` are the values from outside that its regions use.

    An op that is opened, as control flow is, has its regions in `bodies`, and no captures of its
    own. `index` is its place among all nodes of the graph. `inputs` are operands and captures, each
    once.
    """

    index: int
    op: ir.Operation
    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    captures: tuple[int, ...] = ()
    bodies: tuple[Body, ...] = ()
    inputs: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = tuple(dict.fromkeys((*self.operands, *self.captures)))


class Dataflow:
    """The graph of a block. `values[n]` is value number n, `nodes[i]` the op of index i.

    Ops in the regions of an op come before it.
    """

    root: Body

    def __init__(self, opened: Collection[str] = CONTROL_FLOW) -> None:
        self.values: list[ir.Value] = []
        self.numbers: dict[ir.Value, int] = {}
        self.nodes: list[Node] = []
        self._opened = opened

    @classmethod
    def from_block(cls, block: ir.Block, *, opened: Collection[str] = CONTROL_FLOW) -> Self:
        """Returns the graph of a block and of the blocks in ops with the names `opened`.

        By default all control flow is opened. A client that treats a loop as one op leaves it out.
        """
        graph = cls(opened)
        graph.root = graph._body(block)
        return graph

    @cached_property
    def maker(self) -> dict[int, Node]:
        """The op that each value is a result of."""
        return {number: node for node in self.nodes for number in node.results}

    @cached_property
    def users(self) -> dict[int, list[Node]]:
        """The ops that read each value, as an input or in the terminator of one of their bodies."""
        users: dict[int, list[Node]] = {}
        for node in self.nodes:
            returned = (number for body in node.bodies for number in body.returned)
            for number in dict.fromkeys((*node.inputs, *returned)):
                users.setdefault(number, []).append(node)
        return users

    @cached_property
    def owner(self) -> dict[int, Node]:
        """The op that has each value as an argument of one of its bodies."""
        return {n: node for node in self.nodes for body in node.bodies for n in body.arguments}

    def number(self, value: ir.Value) -> int:
        """Returns the number of a value; a value from outside of the block gets a new number."""
        number = self.numbers.get(value)
        if number is None:
            number = self.numbers[value] = len(self.values)
            self.values.append(value)
        return number

    def ancestors(self, numbers: Iterable[int]) -> set[int]:
        """Returns the indices of the ops that compute these values."""
        above = solve(self, dict.fromkeys(numbers, True), dependences, backward=True)
        return {self.maker[number].index for number in above if number in self.maker}

    def _body(self, block: ir.Block) -> Body:
        arguments, nodes = self._numbers(block.arguments), list[Node]()
        returned = self._read(block, nodes)
        return Body(block, arguments, tuple(nodes), returned)

    def _read(self, block: ir.Block, nodes: list[Node]) -> tuple[int, ...]:
        """Adds the nodes of a block's ops, and returns the operands of its terminator."""
        *ops, end = [view.operation for view in block.operations]
        for op in ops:
            self._op(op, nodes)
        return self._numbers(end.operands)

    def _op(self, op: ir.Operation, nodes: list[Node]) -> None:
        """Adds the node of an op. A subclass may add several nodes, or none."""
        operands, name = self._numbers(op.operands), op.name
        bodies: tuple[Body, ...] = ()
        captures: tuple[int, ...] = ()
        if name in self._opened:
            bodies = tuple(self._body(region.blocks[0]) for region in op.regions)
        elif len(op.regions):
            captures = self._numbers(captured_values(op))
        results = self._numbers(op.results)
        nodes.append(self._add(op, name, operands, results, captures, bodies))

    def _add(
        self,
        op: ir.Operation,
        name: str,
        operands: tuple[int, ...],
        results: tuple[int, ...],
        captures: tuple[int, ...] = (),
        bodies: tuple[Body, ...] = (),
    ) -> Node:
        node = Node(len(self.nodes), op, name, operands, results, captures, bodies)
        self.nodes.append(node)
        return node

    def _numbers(self, values: Sequence[ir.Value]) -> tuple[int, ...]:
        return tuple(self.number(value) for value in values)


def captured_values(op: ir.Operation) -> list[ir.Value]:
    """Returns the values from outside that the regions of an op use, in the order of the text."""
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


class Carry(NamedTuple):
    """One carry of a loop, as its values' numbers.

    It enters as `operand`. Both regions have it as an argument, the body returns its next value,
    and after the last iteration it is the `result`.
    """

    operand: int
    condition: int
    argument: int
    returned: int
    result: int


def carries(loop: Node) -> list[Carry]:
    """Returns the carries of a `while`, in the order of its operands."""
    condition, body = loop.bodies
    columns = (loop.operands, condition.arguments, body.arguments, body.returned, loop.results)
    return [Carry(*row) for row in zip(*columns, strict=True)]


def handed_on(node: Node) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields values that control flow passes on unchanged, each with the values that it may be.

    These are arguments of a loop's body, and results. Other ops, and ops that were not opened, have
    none. The arguments of a loop's condition are left out: clients look for the source of a tiling,
    and never follow values of a condition.
    """
    if node.name == WHILE and node.bodies:
        for carry in carries(node):
            yield carry.argument, (carry.operand, carry.returned)
            yield carry.result, (carry.operand, carry.returned)
    elif node.bodies:
        for place, result in enumerate(node.results):
            yield result, tuple(body.returned[place] for body in node.bodies)


def sources_of(node: Node) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields the values that an op defines, each with all that it is computed from.

    A branch's index counts among them, a loop's trip count does not.
    """
    if node.name == WHILE and node.bodies:
        yield from handed_on(node)
        return
    returned = dict(handed_on(node))
    for result in node.results:
        yield result, (*node.inputs, *returned.get(result, ()))


def walk_nodes(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yields ops, each before those in its regions."""
    for node in nodes:
        yield node
        for body in node.bodies:
            yield from walk_nodes(body.nodes)


def inputs_of(node: Node) -> set[int]:
    """Returns the values that an op and the ops in it use, including those of its own blocks."""
    used = set(node.inputs)
    for body in node.bodies:
        used.update(body.returned)
        for inner in body.nodes:
            used |= inputs_of(inner)
    return used


def numbers_in(body: Body) -> set[int]:
    """Returns the values of a block and of the blocks in it."""
    numbers = set(body.arguments)
    for node in body.nodes:
        numbers.update(node.results)
        for inner in node.bodies:
            numbers |= numbers_in(inner)
    return numbers


def needed_nodes(
    nodes: Sequence[Node], ends: Iterable[int], given: Set[int] = frozenset()
) -> tuple[Node, ...]:
    """Returns the ops of a block that `ends` depend on, except the makers of `given` values.

    A loop is kept whole: all of its inputs are needed.
    """
    wanted = set(ends)
    makers: list[Node] = []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.results) and given.isdisjoint(node.results):
            makers.append(node)
            wanted.update(inputs_of(node))
    return tuple(reversed(makers))


# Yields facts of values, given the facts of a node's inputs (backwards: of its results).
type Transfer[T] = Callable[[Node, Mapping[int, T]], Iterable[tuple[int, T]]]


def solve[T](
    graph: Dataflow,
    start: Mapping[int, T],
    transfer: Transfer[T],
    join: Callable[[T, T], T] = lambda fact, other: fact if fact else other,
    *,
    backward: bool = False,
    everywhere: bool = False,
) -> dict[int, T]:
    """Returns the facts of values: the least fixed point of `transfer` that contains `start`.

    Values without a fact are left out. A node is visited if a fact of its inputs is new or has
    changed; with `everywhere`, each node at least once, for facts that need no inputs. Inner and
    earlier nodes are visited first (backwards outer and later ones). The order does not change the
    result, provided that `join` and `transfer` only ever add to a fact. This order needs the fewest
    visits.
    """
    # Backwards, the heap holds negative indices, so that it pops later nodes first.
    facts, way = dict(start), -1 if backward else 1

    def takers(number: int) -> Iterable[Node]:
        if not backward:
            return graph.users.get(number, ())
        return [by[number] for by in (graph.maker, graph.owner) if number in by]

    waiting = {way * node.index for number in facts for node in takers(number)}
    if everywhere:
        waiting = {way * node.index for node in graph.nodes}
    heap = sorted(waiting)
    while heap:
        index = heapq.heappop(heap)
        waiting.discard(index)
        for number, fact in transfer(graph.nodes[way * index], facts):
            before = facts.get(number)
            if before == fact:
                continue
            after = fact if before is None else join(before, fact)
            if after == before:
                continue
            facts[number] = after
            for node in takers(number):
                if way * node.index not in waiting:
                    waiting.add(way * node.index)
                    heapq.heappush(heap, way * node.index)
    return facts


def dependences(node: Node, wanted: Mapping[int, bool]) -> list[tuple[int, bool]]:
    """Transfers backwards: returns the values that the wanted ones are computed from."""
    if not node.bodies:  # one of the results is wanted, so all inputs are
        return [(number, True) for number in node.inputs]
    return [
        (source, True)
        for number, sources in sources_of(node)
        if number in wanted
        for source in sources
    ]


def dependents(node: Node, reached: Mapping[int, bool]) -> Iterator[tuple[int, bool]]:
    """Transfers forwards: yields the values that are computed from reached ones.

    If the condition of a loop is reached, so are all of its carries: the trip count decides them.
    """
    if node.name != WHILE or not node.bodies:
        for number, sources in sources_of(node):
            if any(source in reached for source in sources):
                yield number, True
        return
    often = node.bodies[0].returned[0] in reached
    for carry in carries(node):
        if often or carry.operand in reached or carry.returned in reached:
            yield from ((n, True) for n in (carry.condition, carry.argument, carry.result))
