"""Which values of a block carry the batch, from the arguments that are said to carry it.

Ops are followed in the order of the text, loops until nothing changes. A value lies in parts
(`Layout`), is combined from what the parts give (`Step.combine`), or is whole: it does not depend
on the batch, or an op needed the whole batch to make it. What depends on several samples at once is
remembered as mixed, together with the op that mixed them: where it meets values in parts again, the
batch is not independent. Counts, which depend on integers alone (how many tokens are no padding),
are not mixed: they are known before the work starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stablehlo_tools.analysis.dimension_propagation.graph import WHILE, Body, Graph, Node
from stablehlo_tools.analysis.dimension_propagation.layout import Layout, Step
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import BARRIER


@dataclass(frozen=True)
class Meeting:
    """Where the batch is not independent: `mixed` mixes samples, and `used` takes the outcome
    together with samples."""

    mixed: Node
    used: Node


@dataclass(frozen=True)
class BatchDims:
    """The outcome. Values and nodes that are not listed are whole.

    `layouts` are those of values in parts, by number. `steps` says how nodes run on parts; those of
    control flow have none, but results and arguments of their blocks with layouts. `meetings` are
    in the order of the text; without one the batch is independent.
    """

    graph: Graph
    parts: int
    layouts: Mapping[int, Layout]
    steps: Mapping[Node, Step]
    meetings: tuple[Meeting, ...]

    def layout_of(self, value: ir.Value) -> Layout | None:
        """The layout of a value; None where it is whole."""
        return self.layouts.get(self.graph.numbers[value])

    def combined_by(self, value: ir.Value) -> str | None:
        """The reduction (`add`, …) that makes a value of what each part gives; None for others."""
        number = self.graph.numbers[value]
        return next((s.combine for n, s in self.steps.items() if number in n.results), None)


def propagate(
    graph: Graph,
    seeds: Mapping[int, Layout],
    parts: int,
    *,
    to_the_end: bool = True,
    regroups: bool = False,
) -> BatchDims:
    """Follows the batch from values that lie in parts, arguments of the block; if asked, only to
    the first meeting, and through what joins and parts batches (`Asked.regroups`)."""
    return Propagation(graph, parts, regroups=regroups).run(seeds, to_the_end=to_the_end)


class Propagation:
    """One walk through a graph; what a loop does to layouts can be told by a subclass."""

    def __init__(self, graph: Graph, parts: int, *, regroups: bool = False) -> None:
        self.graph = graph
        self.parts = parts
        self.regroups = regroups
        self.layouts: dict[int, Layout] = {}
        self.mixed: dict[int, Node] = {}
        self.steps: dict[Node, Step] = {}
        self.meetings: dict[Node, Node] = {}
        self.concerned: set[int] = set()  # values with a layout, or mixed

    def run(self, seeds: Mapping[int, Layout], *, to_the_end: bool = True) -> BatchDims:
        """Follows the values that lie in parts from the start."""
        self.layouts.update(seeds)
        self.concerned.update(seeds)
        for node in self.graph.root.nodes:
            self.visit(node)
            if self.meetings and not to_the_end:
                break
        order = {node: place for place, node in enumerate(self.graph.nodes)}
        met = sorted(self.meetings.items(), key=lambda item: order[item[0]])
        meetings = tuple(Meeting(mixed, used) for used, mixed in met)
        return BatchDims(self.graph, self.parts, self.layouts, self.steps, meetings)

    def visit(self, node: Node) -> None:
        """Follows them through one op."""
        self.meetings.pop(node, None)
        self.steps.pop(node, None)
        if node.name == WHILE:
            self._loop(node)
        elif node.bodies:
            self._branches(node)
        else:
            self._op(node)

    def _body(self, body: Body) -> None:
        for node in body.nodes:
            self.visit(node)

    def _op(self, node: Node) -> None:
        if self.concerned.isdisjoint(node.inputs):
            if not self.concerned.isdisjoint(node.results):
                self._set(node, [None] * len(node.results), None)
            return
        layouts = tuple(map(self.layouts.get, node.operands))
        captured = any(number in self.layouts for number in node.captures)
        if not captured and not any(layouts):
            self._set(node, [None] * len(node.results), self._mixer(node.inputs))
            return
        step = None
        if not captured:
            step = node.step(layouts, self.parts, regroups=self.regroups)
        if step is None:
            self._set(node, [None] * len(node.results), self._mixing(node))
            return
        self.steps[node] = step
        if node.name == BARRIER:
            self._barrier(node, step)
            return
        mixer = self._mixer(node.inputs)
        if step.chained or step.combine is not None:
            self._set(node, step.results, self._mixing(node))
            if mixer is not None and not step.chained:
                self.meetings[node] = mixer
            return
        if mixer is not None:
            self.meetings[node] = mixer
        self._set(node, step.results, None)

    def _barrier(self, node: Node, step: Step) -> None:
        for operand, result, layout in zip(node.operands, node.results, step.results, strict=True):
            self._put(result, layout, self.mixed.get(operand))

    def _loop(self, node: Node) -> None:
        condition, body = node.bodies
        carried: list[Layout | None] = [self.layouts.get(n) for n in node.operands]
        first = [self.mixed.get(n) for n in node.operands]
        mixed, kept_whole = first, set[int]()
        while True:
            for inner in (condition, body):
                for place, number in enumerate(inner.arguments):
                    self._put(number, carried[place], mixed[place])
                self._body(inner)
            after = [self.layouts.get(n) for n in body.returned]
            found = [
                self._carried(place, before, now, kept_whole)
                for place, (before, now) in enumerate(zip(carried, after, strict=True))
            ]
            ends = self.mixed.get(condition.returned[0])
            spread = [
                m or self.mixed.get(n) or ends or (node if place in kept_whole else None)
                for place, (m, n) in enumerate(zip(mixed, body.returned, strict=True))
            ]
            if found == carried and spread == mixed:
                break
            mixed = spread if found == carried else first  # which layouts may have mended
            carried = found
        for place, result in enumerate(node.results):
            self._put(result, carried[place], mixed[place])
        self._check(node, zip(carried, mixed, strict=True))

    def _carried(
        self, place: int, before: Layout | None, now: Layout | None, kept_whole: set[int]
    ) -> Layout | None:
        """The layout that a loop carries a value in; whole where it comes back in another one."""
        if before is not None and now is not None and before != now:
            kept_whole.add(place)
        return None if place in kept_whole else before or now

    def _branches(self, node: Node) -> None:
        chooser = self.mixed.get(node.operands[0])
        for body in node.bodies:
            self._body(body)
        results: list[tuple[Layout | None, Node | None]] = []
        for place, result in enumerate(node.results):
            numbers = [body.returned[place] for body in node.bodies]
            found = {self.layouts[n] for n in numbers if n in self.layouts}
            layout = next(iter(found)) if len(found) == 1 else None
            joined = node if found and layout is None else None
            mixer = joined or chooser or self._mixer(numbers)
            self._put(result, layout, mixer)
            results.append((layout, mixer))
        self._check(node, results)

    def _check(self, node: Node, carried: Iterable[tuple[Layout | None, Node | None]]) -> None:
        """A mixed value that control flow carries in parts has met them."""
        met = next((mixer for layout, mixer in carried if layout and mixer), None)
        if met is not None:
            self.meetings[node] = met

    def _mixing(self, node: Node) -> Node | None:
        """Who mixed the whole result of an op on parts: an earlier op, or this one."""
        earlier = self._mixer(node.inputs)
        data = any(n in self.graph.data for n in node.inputs if n in self.layouts)
        return earlier or (node if data else None)

    def _mixer(self, numbers: Iterable[int]) -> Node | None:
        found = map(self.mixed.get, numbers)
        return next((mixer for mixer in found if mixer is not None), None)

    def _set(self, node: Node, layouts: Iterable[Layout | None], mixer: Node | None) -> None:
        for result, layout in zip(node.results, layouts, strict=True):
            self._put(result, layout, mixer)

    def _put(self, number: int, layout: Layout | None, mixer: Node | None) -> None:
        if layout is None:
            self.layouts.pop(number, None)
        else:
            self.layouts[number] = layout
        if mixer is None:
            self.mixed.pop(number, None)
        else:
            self.mixed[number] = mixer
        if layout is None and mixer is None:
            self.concerned.discard(number)
        else:
            self.concerned.add(number)
