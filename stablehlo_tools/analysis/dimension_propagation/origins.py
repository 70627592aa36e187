"""Where values come from that are to lie in parts: the arguments to cut for it, and how."""

from __future__ import annotations

from collections.abc import Iterable

from stablehlo_tools.analysis.dimension_propagation.graph import BRANCHES, WHILE, Graph, Node
from stablehlo_tools.analysis.dimension_propagation.layout import Layout, reshaped
from stablehlo_tools.dialect.factors import Shape
from stablehlo_tools.dialect.names import RESHAPE

Wanted = tuple[int, Layout]


class Origins:
    """Where values that lie in parts come from, op by op backwards."""

    def __init__(self, graph: Graph, parts: int, *, regroups: bool = False) -> None:
        self._graph = graph
        self._parts = parts
        self._regroups = regroups
        self._makers: dict[int, tuple[Node, int]] = {}
        self._carriers: dict[int, tuple[Node, int]] = {}
        for node in graph.nodes:
            self._makers |= {number: (node, i) for i, number in enumerate(node.results)}
            if node.name == WHILE:
                inner = node.bodies[1].arguments
                self._carriers |= {number: (node, i) for i, number in enumerate(inner)}

    def of(self, wanted: Iterable[Wanted]) -> dict[int, Layout]:
        """The first values, with their layouts, that those asked for are made of: arguments, or
        what ops make that take nothing in parts."""
        found: dict[int, Layout] = {}
        pending, seen = list(wanted), set[int]()
        while pending:
            number, layout = pending.pop()
            shape = self._graph.shape(number)
            if number in seen or shape is None or not layout.fits(shape, self._parts):
                continue
            seen.add(number)
            before = self._before(number, layout)
            if before is None:
                found[number] = layout
            else:
                pending += before
        return found

    def _before(self, number: int, layout: Layout) -> list[Wanted] | None:
        """What a value is made of, in which layouts; None where it comes from nothing else."""
        if number in self._carriers:
            return self._around(*self._carriers[number], layout)
        if number not in self._makers:
            return None
        node, place = self._makers[number]
        if node.name == WHILE:
            return self._around(node, place, layout)
        if node.name in BRANCHES:
            return [(body.returned[place], layout) for body in node.bodies]
        return self._through(node, place, layout)

    def _around(self, node: Node, place: int, layout: Layout) -> list[Wanted]:
        """What a carry of a loop comes from."""
        return [(node.operands[place], layout), (node.bodies[1].returned[place], layout)]

    def _through(self, node: Node, place: int, layout: Layout) -> list[Wanted] | None:
        """The operands that an op must take in parts to give such a result."""
        for position in range(len(node.operands)):
            for given in self._candidates(node, position, place, layout):
                layouts = tuple(
                    given if other == position else None for other in range(len(node.operands))
                )
                step = node.step(layouts, self._parts, regroups=self._regroups)
                if step is None or step.results[place] != layout:
                    continue
                taken = zip(node.operands, step.operands, strict=True)
                return [(operand, each) for operand, each in taken if each is not None]
        return None

    def _candidates(self, node: Node, position: int, place: int, layout: Layout) -> list[Layout]:
        """The layouts of an operand that may give a result such a layout."""
        relation = node.relation
        if relation is None:
            return []
        shape, result = relation.operands[position], relation.results[place]
        if node.name == RESHAPE:
            back = reshaped(layout, result, shape, self._parts)
            return [] if back is None else [back]
        dims = [
            link.operand.dim
            for link in relation.of_result(place, layout.dim)
            if link.operand.tensor == position
        ]
        outers = dict.fromkeys((layout.outer, *_same_groups(layout, shape, result), 1))
        return [Layout(dim, outer) for outer in outers for dim in dims]


def _same_groups(layout: Layout, shape: Shape, result: Shape) -> list[int]:
    """How often an operand of another size along the batch holds all parts, as its result does."""
    if layout.dim >= min(len(shape), len(result)):
        return []
    outer, rest = divmod(shape[layout.dim] * layout.outer, result[layout.dim] or 1)
    return [outer] if outer and not rest else []
