"""Where sums over the batch leave the loop: at their first term, or behind ops that are linear.

What is linear in a sum may run on each term or on the total. On the total it runs once; but where
gradients of one weight are added, or a term is cut, fewer bytes are accumulated if that is done
in the loop. So are terms that the program has in a narrow type and converts to a wide one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set

from stablehlo_tools.analysis.collectives import tensor_bytes
from stablehlo_tools.analysis.dimension_propagation.graph import Graph, Node, inputs_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.traits import COLLECTIVES
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.transforms.parts.expand_pipeline.ticks import wide

_MOST_TOGETHER = 64  # linear ops that are tried in the loop at once
_CONSTRAINT = "sdy.sharding_constraint"


def accumulated_bytes(value: ir.Value) -> int:
    """What an accumulator of a value takes, in at least float32."""
    kind = ir.RankedTensorType.get(
        shape_of(value), wide(element_of(value)), loc=ir.Location.unknown(value.context)
    )
    return tensor_bytes(kind) or 0


class Boundary:
    """Chooses which of the linear ops run in the loop."""

    def __init__(
        self, graph: Graph, inside: Set[Node], linear: Sequence[Node], terms: Mapping[int, str]
    ) -> None:
        self._graph = graph
        self._terms = terms
        self._chosen = set(inside)
        self._linear = {number: node for node in linear for number in node.results}
        self._made = dict(self._linear)
        self._made.update({number: node for node in inside for number in node.results})
        self._users: dict[int, list[Node | None]] = defaultdict(list)
        for node in graph.root.nodes:
            for number in sorted(inputs_of(node)):
                self._users[number].append(node)
        for number in graph.root.returned:
            self._users[number].append(None)
        for node in linear:
            self._consider(node)

    def __contains__(self, node: Node) -> bool:
        return node in self._chosen

    def _consider(self, node: Node) -> None:
        """Takes an op into the loop, with those that it hangs on, where that is cheaper."""
        together = self._with_sources(node)
        if together is None:
            return
        numbers = {n for each in together for n in (*inputs_of(each), *each.results)}
        before = self._cost(numbers)
        self._chosen |= together
        if self._cost(numbers) >= before:
            self._chosen -= together

    def _with_sources(self, node: Node) -> set[Node] | None:
        found, pending = set[Node](), [node]
        while pending:
            each = pending.pop()
            if each in found or each in self._chosen:
                continue
            if each.name in COLLECTIVES or each.bodies or len(found) == _MOST_TOGETHER:
                return None
            found.add(each)
            pending += [self._linear[n] for n in inputs_of(each) if n in self._linear]
        return found

    def _cost(self, numbers: Iterable[int]) -> tuple[int, int, int]:
        """The bytes of accumulators; then how many are of a type that terms are rounded to, and how
        many are about to be constrained to a sharding."""
        size, narrow, free = 0, 0, 0
        for number in numbers:
            if number not in self._terms or self._made.get(number) not in self._chosen:
                continue
            outside = [user for user in self._users[number] if user not in self._chosen]
            if not outside:
                continue
            value = self._graph.values[number]
            size += accumulated_bytes(value)
            narrow += wide(element_of(value)) != element_of(value)
            free += all(user is not None and user.name == _CONSTRAINT for user in outside)
        return size, narrow, free
