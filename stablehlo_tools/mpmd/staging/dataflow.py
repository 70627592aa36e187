"""The ops of one block as a graph: values as numbers, what reads them, what makes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stablehlo_tools.analysis.dimension_propagation.graph import captured
from stablehlo_tools.bindings import ir


@dataclass(eq=False, slots=True)
class Node:
    """An op of the block: `inputs` are its operands and what its regions use from outside."""

    index: int
    op: ir.Operation
    inputs: tuple[int, ...]
    results: tuple[int, ...]

    @property
    def name(self) -> str:
        """The op's name, with its dialect."""
        return self.op.name


@dataclass
class Dataflow:
    """A block without its terminator. `values[n]` is value n, `maker[n]` the node that makes it."""

    block: ir.Block
    values: list[ir.Value] = field(default_factory=list[ir.Value])
    numbers: dict[ir.Value, int] = field(default_factory=dict[ir.Value, int])
    nodes: list[Node] = field(default_factory=list[Node])
    maker: dict[int, Node] = field(default_factory=dict[int, Node])
    users: dict[int, list[Node]] = field(default_factory=dict[int, list[Node]])
    arguments: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()

    @staticmethod
    def of(block: ir.Block) -> Dataflow:
        """The graph of a block."""
        flow = Dataflow(block)
        flow.arguments = flow._numbers(block.arguments)
        views = list(block.operations)
        for view in views[:-1]:
            flow._add(view.operation)
        flow.returned = flow._numbers(views[-1].operation.operands)
        return flow

    def number(self, value: ir.Value) -> int:
        """The number of a value; of one from outside of the block, a new one."""
        known = self.numbers.get(value)
        if known is None:
            known = self.numbers[value] = len(self.values)
            self.values.append(value)
        return known

    def ancestors(self, numbers: Iterable[int]) -> set[int]:
        """The indices of the nodes that values are computed by."""
        above: set[int] = set()
        pending = [self.maker[n] for n in numbers if n in self.maker]
        while pending:
            node = pending.pop()
            if node.index not in above:
                above.add(node.index)
                pending += [self.maker[n] for n in node.inputs if n in self.maker]
        return above

    def _add(self, op: ir.Operation) -> None:
        inputs = list(op.operands)
        if len(op.regions):
            inputs += captured(op)
        numbers = tuple(dict.fromkeys(self._numbers(inputs)))
        node = Node(len(self.nodes), op, numbers, self._numbers(op.results))
        self.nodes.append(node)
        for number in node.results:
            self.maker[number] = node
        for number in numbers:
            self.users.setdefault(number, []).append(node)

    def _numbers(self, values: Sequence[ir.Value]) -> tuple[int, ...]:
        return tuple(self.number(value) for value in values)
