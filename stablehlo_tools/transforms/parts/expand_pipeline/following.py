"""Follows stacks of layers through a program, from op to op, both ways.

An op that treats every layer alike computes a stack in one order from stacks in that order, and a
sum over all layers is the same in any order. An op that needs single layers, or their order, cannot
be passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stablehlo_tools.analysis.dimension_propagation.graph import BRANCHES, WHILE, Body, Graph, Node
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling, reshaped
from stablehlo_tools.analysis.loop_carries import Rows
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.dialect.names import BARRIER
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.constants import CONSTANTS, is_splat
from stablehlo_tools.transforms.parts.expand_pipeline.phases import Phase

_BROADCAST = "stablehlo.broadcast_in_dim"
_IOTA = "stablehlo.iota"
_RESHAPE = "stablehlo.reshape"


def is_whole(phase: Phase, rows: Rows, value: ir.Value) -> bool:
    """Whether a loop takes all rows of a stack."""
    return rows.first == 0 and rows.span * phase.loop.trips == shape_of(value)[0]


class Follower:
    """Follows stacks from value to value.

    `layouts` are those found, by number, cut into as many parts as there are layers; `constants`
    the ops that make some of them of nothing, in the order of the layers.
    """

    def __init__(self, graph: Graph, phases: Sequence[Phase], layers: int) -> None:
        self._graph = graph
        self._layers = layers
        self._phases = {phase.node: phase for phase in phases}
        self.layouts: dict[int, DimTiling] = {}
        self.constants: dict[Node, None] = {}
        self._near: dict[int, list[Node]] = {}
        self._inside: set[Node] = set()
        self._pending: list[Node] = []
        for phase in phases:
            self._inside |= set(_nodes_in(phase.node))
        for node in graph.nodes:
            for number in dict.fromkeys(_touched(node, node in self._phases)):
                self._near.setdefault(number, []).append(node)

    def copy(self) -> Follower:
        """Another one that has come as far."""
        other = object.__new__(Follower)
        other.__dict__.update(self.__dict__)
        other.layouts = dict(self.layouts)
        other.constants = dict(self.constants)
        other._pending = []
        return other

    def follow(self, number: int, node: Node) -> None:
        """Follows a stack that a loop accesses. Raises ToolError where that is not possible."""
        self._put(number, DimTiling(0), node)
        while self._pending:
            self._visit(self._pending.pop())

    def arguments(self) -> dict[int, int]:
        """The program's arguments that are stacks, and the dimension that the layers lie along.
        Raises ToolError where they lie in no one dimension."""
        return self._dimensions(self._graph.root.arguments, "argument")

    def results(self) -> dict[int, int]:
        """The results; as `arguments`."""
        return self._dimensions(self._graph.root.returned, "result")

    def rows(self) -> Iterable[Rows]:
        """What the loops access of stacks that were found."""
        for node, phase in self._phases.items():
            for stacks, numbers in (
                (phase.loop.reads, node.operands),
                (phase.loop.writes, node.results),
            ):
                for carry, rows in stacks.items():
                    if numbers[carry] in self.layouts:
                        yield rows

    def _dimensions(self, numbers: Sequence[int], what: str) -> dict[int, int]:
        found: dict[int, int] = {}
        for place, number in enumerate(numbers):
            layout = self.layouts.get(number)
            if layout is None:
                continue
            if layout.outer != 1:
                raise ToolError(
                    f"expand-pipeline: layout=pipeline cannot order {what} {place}, "
                    f"{self._graph.values[number].type}: its dimension {layout.dim} holds the "
                    f"layers {layout.outer} times (P8); stack them apart, or use layout=layers",
                    next(iter(self._phases)).op.location,
                )
            found[place] = layout.dim
        return found

    def _put(self, number: int, layout: DimTiling, node: Node) -> None:
        known = self.layouts.get(number)
        if known == layout:
            return
        if known is not None:
            raise self._refusal(node)
        maker = next((n for n in self._near.get(number, ()) if number in n.results), None)
        if maker is not None and _is_alike(maker, layout):
            return
        shape = self._graph.shape(number)
        if shape is None or not layout.fits(shape, self._layers):
            raise self._refusal(node)
        self.layouts[number] = layout
        self._pending += self._near.get(number, [])

    def _visit(self, node: Node) -> None:
        if node in self._phases:
            self._loop(node, self._phases[node])
        elif node in self._inside:
            raise self._refusal(node)
        elif node.name == WHILE:
            condition, body = node.bodies
            for place, operand in enumerate(node.operands):
                arguments = condition.arguments[place], body.arguments[place]
                self._alike((operand, node.results[place], *arguments, body.returned[place]), node)
        elif node.name in BRANCHES:
            for place, result in enumerate(node.results):
                self._alike((result, *(body.returned[place] for body in node.bodies)), node)
        elif node.name == BARRIER:
            for operand, result in zip(node.operands, node.results, strict=True):
                self._alike((operand, result), node)
        elif any(number in self.layouts for number in node.operands):
            self._forwards(node)
        elif any(number in self.layouts for number in node.captures):
            raise self._refusal(node)
        else:
            self._backwards(node)

    def _loop(self, node: Node, phase: Phase) -> None:
        """A layer loop takes stacks row by row, and leaves those that it reads as they are."""
        loop = phase.loop
        for carry, numbers in enumerate(zip(node.operands, node.results, strict=True)):
            if not any(number in self.layouts for number in numbers):
                continue
            rows = loop.reads.get(carry) or loop.writes.get(carry)
            value = self._graph.values[numbers[0]]
            all_rows = rows is not None and is_whole(phase, rows, value)
            if not all_rows or loop.trips != self._layers:
                raise self._refusal(node)
            for number in numbers:
                self._put(number, DimTiling(0), node)

    def _alike(self, numbers: Sequence[int], node: Node) -> None:
        """Values that control flow hands on as they are."""
        found = next((self.layouts[n] for n in numbers if n in self.layouts), None)
        if found is None:
            return
        for number in numbers:
            self._put(number, found, node)

    def _forwards(self, node: Node) -> None:
        taken = tuple(map(self.layouts.get, node.operands))
        step = node.tiling(taken, self._layers)
        captured = any(number in self.layouts for number in node.captures)
        if step is None or step.chained or captured:
            raise self._refusal(node)
        for number, layout in zip(node.operands, step.operands, strict=True):
            if layout is not None:
                self._put(number, layout, node)
            elif number in self.layouts:
                raise self._refusal(node)
        for number, layout in zip(node.results, step.results, strict=True):
            if layout is not None:
                self._put(number, layout, node)
            elif number in self.layouts:
                raise self._refusal(node)

    def _backwards(self, node: Node) -> None:
        """What an op is to be given, for its result to be a stack."""
        wanted = tuple(map(self.layouts.get, node.results))
        if node.name == _IOTA or node.name in CONSTANTS:
            self.constants[node] = None
            return
        for place, number in enumerate(node.operands):
            for layout in self._candidates(node, number, wanted):
                given = tuple(layout if i == place else None for i in range(len(node.operands)))
                step = node.tiling(given, self._layers)
                if step is None or step.combine is not None or step.results != wanted:
                    continue
                self._put(number, layout, node)
                if number in self.layouts:
                    self._forwards(node)
                    return
                self._operands(node, step.operands)
                return
        raise self._refusal(node)

    def _operands(self, node: Node, layouts: Sequence[DimTiling | None]) -> None:
        """All operands, where the first is alike for all layers."""
        for number, layout in zip(node.operands, layouts, strict=True):
            if layout is not None:
                self._put(number, layout, node)

    def _candidates(
        self, node: Node, number: int, wanted: Sequence[DimTiling | None]
    ) -> list[DimTiling]:
        shape = self._graph.shape(number)
        first = next(layout for layout in wanted if layout is not None)
        if shape is None:
            return []
        if node.name == _RESHAPE:
            after = self._graph.shape(node.results[0]) or ()
            back = reshaped(first, after, shape, self._layers)
            return [] if back is None else [back]
        found = [DimTiling(dim, first.outer) for dim in range(len(shape))]
        return [layout for layout in found if layout.fits(shape, self._layers)]

    def _refusal(self, node: Node) -> ToolError:
        loop = next(iter(self._phases)).op
        return ToolError(
            "expand-pipeline: layout=pipeline cannot bring the stacked layers into the order of "
            f"the ranks: {node.name} needs single layers, or the order they are in (P8); apply it "
            "to each layer alike, or use layout=layers",
            node.op.location,
            (note(f"the {self._layers} layers of this loop", loop.location),),
        )


def _is_alike(node: Node, layout: DimTiling) -> bool:
    """Whether an op gives the same for each layer, whatever it is given."""
    if node.name in CONSTANTS:
        return is_splat(node.op)
    if node.name == _IOTA:
        return ir.IntegerAttr(node.op.attributes["iota_dimension"]).value != layout.dim
    if node.name != _BROADCAST:
        return False
    dims = list(ir.DenseI64ArrayAttr(node.op.attributes["broadcast_dimensions"]))
    return layout.dim not in dims or shape_of(node.op.operands[0])[dims.index(layout.dim)] == 1


def _touched(node: Node, is_layers: bool) -> Iterable[int]:
    yield from node.inputs
    yield from node.results
    if is_layers:
        return
    for body in node.bodies:
        yield from body.arguments
        yield from body.returned


def _nodes_in(node: Node) -> Iterable[Node]:
    for body in node.bodies:
        yield from _nodes_of(body)


def _nodes_of(body: Body) -> Iterable[Node]:
    for node in body.nodes:
        yield node
        yield from _nodes_in(node)
