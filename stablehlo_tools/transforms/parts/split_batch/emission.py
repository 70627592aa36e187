"""Writes the ops of a block once for each piece of the batch, of one part or of several.

Every op on values in parts is copied, the copies side by side where it stood; ops on whole values
stay where they are. Loops and branches carry the parts as values of their own, at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stablehlo_tools.analysis.channels import Channels
from stablehlo_tools.analysis.dimension_propagation.graph import WHILE, Body, Node
from stablehlo_tools.analysis.dimension_propagation.layout import Layout, Step
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.analysis.dimension_propagation.rules import BARRIER
from stablehlo_tools.analysis.dimension_propagation.shape_rules import ELEMENTWISE
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.walk import is_inside
from stablehlo_tools.transforms.parts.create_reduce_scatter.rewriting import has_uses
from stablehlo_tools.transforms.parts.split_batch.pieces import Pieces
from stablehlo_tools.transforms.parts.split_batch.writing import (
    attributes,
    combined,
    part_type,
    replace_end,
    shrink,
)

_FREE = ELEMENTWISE | {
    f"stablehlo.{name}"
    for name in ("broadcast_in_dim", "concatenate", "constant", "iota", "reshape", "slice")
}


class Emission:
    """Rewrites a block as the analysis says; `sizes` are the parts that each piece holds, one
    without."""

    def __init__(
        self, dims: BatchDims, channels: Channels, sizes: Sequence[int] | None = None
    ) -> None:
        self._dims = dims
        self._values = dims.graph.values
        self._sizes = (1,) * dims.parts if sizes is None else tuple(sizes)
        self._pieces = Pieces(self._sizes)
        self._channels = channels
        self._dead: list[ir.Operation] = []
        self._kept: list[ir.Operation] = []  # what may be unused now, and does nothing else
        self._loops: list[tuple[ir.Operation, list[int]]] = []

    def run(self) -> None:
        """Rewrites the block; what it returns is whole, as before."""
        root = self._dims.graph.root
        self._nodes(root)
        end = terminator(root.block)
        self._take_whole(end, range(len(end.operands)))
        self._clean_up()

    def _clean_up(self) -> None:
        """Erases what others stand for; at the end only, as a new value could be taken for one that
        is gone."""
        for op in reversed(self._dead):
            op.erase()
        for loop, places in self._loops:
            for region in loop.regions:
                for place in reversed(places):
                    region.blocks[0].erase_argument(place)
        for op in reversed(self._kept):
            if not any(has_uses(result) for result in op.results):
                op.erase()

    def _nodes(self, body: Body) -> None:
        """Rewrites the nodes of a block."""
        for node in body.nodes:
            step = self._dims.steps.get(node)
            if node.name == WHILE:
                self._loop(node)
            elif node.bodies:
                self._branches(node)
            elif step is not None:
                self._copies(node, step)
                self._dead.append(node.op)
            else:
                self._take_whole(node.op, range(len(node.operands)))
                self._capture_whole(node)
                if node.name in _FREE:
                    self._kept.append(node.op)

    def _copies(self, node: Node, step: Step) -> None:
        """An op, once for each part."""
        if node.name == BARRIER:
            self._barriers(node, step)
            return
        op = node.op
        taken = self._taken(op, step)
        made: list[list[ir.Value]] = []
        for number in range(len(self._sizes)):
            operands = [values[number] for values in taken]
            if step.chained and made:
                operands[0] = made[-1][0]
            made.append(self._copy(op, operands, step, number))
        if step.chained:
            op.results[0].replace_all_uses_with(made[-1][0])
        elif step.combine is not None:
            op.results[0].replace_all_uses_with(combined(op, step.combine, made))
        else:
            self._record(node, step.results, made)

    def _taken(self, op: ir.Operation, step: Step) -> list[tuple[ir.Value, ...]]:
        """Each operand, once for each part."""
        return [
            (self._pieces.whole(value, op),) * len(self._sizes)
            if layout is None
            else self._pieces.parts_of(value, layout, op)
            for value, layout in zip(op.operands, step.operands, strict=True)
        ]

    def _copy(
        self, op: ir.Operation, operands: Sequence[ir.Value], step: Step, number: int
    ) -> list[ir.Value]:
        copy = op.clone(ip=ir.InsertionPoint(op))
        for place, value in enumerate(operands):
            copy.operands[place] = value
        for result, layout in zip(copy.results, step.results, strict=True):
            result.set_type(self._type(result, layout, number))
        shrink(copy, step, self._dims.parts, self._sizes[number])
        if number:
            self._channels.renew(copy)
        return list(copy.results)

    def _barriers(self, node: Node, step: Step) -> None:
        """A barrier for each part; what is whole waits with the first."""
        op = node.op
        taken = self._taken(op, step)
        made: list[list[ir.Value]] = []
        for number in range(len(self._sizes)):
            places = [i for i, layout in enumerate(step.operands) if layout or not number]
            operands = [taken[place][number] for place in places]
            barrier = ir.Operation.create(
                op.name,
                results=[value.type for value in operands],
                operands=operands,
                loc=op.location,
                ip=ir.InsertionPoint(op),
            )
            results: list[ir.Value] = list(op.results)
            for place, value in zip(places, barrier.results, strict=True):
                results[place] = value
            made.append(results)
        self._record(node, step.results, made)

    def _record(
        self, node: Node, layouts: Sequence[Layout | None], made: Sequence[Sequence[ir.Value]]
    ) -> None:
        """What stands for the results of a node: parts, or the first of `made` where whole."""
        for place, layout in enumerate(layouts):
            result = self._values[node.results[place]]
            if layout is None:
                result.replace_all_uses_with(made[0][place])
            else:
                self._pieces.put(result, layout, [values[place] for values in made])

    def _loop(self, node: Node) -> None:
        """A loop whose carries in parts become a carry for each part, behind the others."""
        op = node.op
        layouts = [self._dims.layouts.get(number) for number in node.results]
        operands = self._flat(op, op.operands, layouts)
        for body in node.bodies:
            self._add_arguments(body, layouts)
            self._nodes(body)
            end = terminator(body.block)
            if body is node.bodies[0]:
                self._take_whole(end, [0])
            else:
                replace_end(end, self._flat(end, end.operands, layouts))
        new = self._rebuilt(node, operands, layouts)
        self._loops.append((new, [i for i, layout in enumerate(layouts) if layout is not None]))

    def _branches(self, node: Node) -> None:
        op = node.op
        layouts = [self._dims.layouts.get(number) for number in node.results]
        self._take_whole(op, [0])
        for body in node.bodies:
            self._nodes(body)
            end = terminator(body.block)
            replace_end(end, self._flat(end, end.operands, layouts))
        self._rebuilt(node, list(op.operands), layouts)

    def _flat(
        self, user: ir.Operation, values: Iterable[ir.Value], layouts: Sequence[Layout | None]
    ) -> list[ir.Value]:
        """Whole values, and behind them the parts of the others."""
        whole: list[ir.Value] = []
        parts: list[ir.Value] = []
        for value, layout in zip(values, layouts, strict=True):
            if layout is None:
                whole.append(self._pieces.whole(value, user))
            else:
                parts += self._pieces.parts_of(value, layout, user)
        return whole + parts

    def _add_arguments(self, body: Body, layouts: Sequence[Layout | None]) -> None:
        for number, layout in zip(body.arguments, layouts, strict=True):
            if layout is None:
                continue
            argument = self._values[number]
            location = body.block.owner.location
            parts = [
                body.block.add_argument(kind, location) for kind in self._types(argument, layout)
            ]
            self._pieces.put(argument, layout, parts)

    def _rebuilt(
        self, node: Node, operands: Sequence[ir.Value], layouts: Sequence[Layout | None]
    ) -> ir.Operation:
        """The op around rewritten blocks, with results in parts."""
        op, pieces = node.op, len(self._sizes)
        if not any(layouts):
            for place, value in enumerate(operands):
                op.operands[place] = value
            return op
        kept = [i for i, layout in enumerate(layouts) if layout is None]
        cut = [i for i, layout in enumerate(layouts) if layout is not None]
        types = [op.results[i].type for i in kept]
        for i in cut:
            types += self._types(op.results[i], layouts[i])
        new = ir.Operation.create(
            op.name,
            results=types,
            operands=list(operands),
            attributes=attributes(op),
            regions=len(op.regions),
            loc=op.location,
            ip=ir.InsertionPoint(op),
        )
        for source, target in zip(op.regions, new.regions, strict=True):
            for block in list(source.blocks):
                block.append_to(target)
        for place, i in enumerate(kept):
            op.results[i].replace_all_uses_with(new.results[place])
        for place, i in enumerate(cut):
            first = len(kept) + place * pieces
            layout = layouts[i]
            assert layout is not None
            self._pieces.put(op.results[i], layout, list(new.results)[first : first + pieces])
        self._dead.append(op)
        return new

    def _type(self, value: ir.Value, layout: Layout | None, number: int) -> ir.Type:
        """The type of a piece of a value, or of all of it."""
        return part_type(value, layout, self._dims.parts, self._sizes[number])

    def _types(self, value: ir.Value, layout: Layout | None) -> list[ir.Type]:
        return [self._type(value, layout, number) for number in range(len(self._sizes))]

    def _take_whole(self, op: ir.Operation, places: Iterable[int]) -> None:
        for place in places:
            value = op.operands[place]
            whole = self._pieces.whole(value, op)
            if whole != value:
                op.operands[place] = whole

    def _capture_whole(self, node: Node) -> None:
        """Whole values for the regions of an op that is not copied."""
        for number in node.captures:
            value = self._values[number]
            whole = self._pieces.whole(value, node.op)
            if whole == value:
                continue
            for use in list(value.uses):
                if is_inside(use.owner.operation, node.op):
                    use.owner.operation.operands[use.operand_number] = whole
