"""Layers that a stage has written out one after the other, and the grid of such layers.

    %h1 = tanh(%h0 . %a)                    layer 0 on %h0, %a
    %h2 = tanh(%h1 . %b)          ==>       layer 1 on %h1, %b

Some values are on every path from the value that a stage receives to the value that it passes on.
The ends of layers are among these. A layer is all that is computed from one of them to another, and
from no other: in a backward, that includes the gradients of the layer's weights. Two layers are
equal if the same ops compute the same outputs from the same inputs, in any textual order. Operands
in which they differ are arguments of the stage.

Sharding constraints are looked through. Those between two layers belong to both.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from stablehlo_tools.analysis.dataflow import Dataflow, Node
from stablehlo_tools.analysis.dimension_propagation.tilings import CONTRACTIONS
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import SHARDING_CONSTRAINT
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import CONSTANTS, value_text
from stablehlo_tools.transforms.parts.fold_pipeline.grids import StageGrid
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Scratch
from stablehlo_tools.transforms.parts.fold_pipeline.stage_chains import (
    Handoff,
    Instance,
    Pieces,
    StageInputs,
)
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    BoxView,
    Computed,
    Outside,
    SourceBox,
)
from stablehlo_tools.transforms.parts.roll_layers.iterations import used_values
from stablehlo_tools.transforms.parts.roll_layers.repetitions import look


@dataclass(frozen=True)
class WrittenLayers:
    """A stage as layers. Layer k reads the value of the layer before it and the stage's arguments
    `inputs[k]`. It computes the value that it passes on and the stage's outputs `outputs[k]`.
    `handed[k]` is the output of the stage that equals the value passed on; None if there is
    none."""

    inputs: tuple[tuple[int, ...], ...]
    handed: tuple[int | None, ...]
    outputs: tuple[tuple[int, ...], ...]
    template: _Template

    @property
    def count(self) -> int:
        """The number of layers."""
        return len(self.inputs)


def written_layers(block: ir.Block, states: Collection[int], handed: int) -> WrittenLayers | None:
    """Returns the layers of a stage, as many as possible; None if it has fewer than two equal ones.
    The arguments `states` are all the same value: output `handed` of the stage before."""
    reader = _StageReader(block, states, handed)
    ends = reader.ends()
    if not ends:
        return None
    texts = [reader.read(begin, (end,)) for begin, end in zip([-1, *ends], ends, strict=False)]
    # The shortest period that repeats gives the most layers.
    for period in range(1, len(ends) // 2 + 1):
        alike = all(a.text == b.text for a, b in zip(texts, texts[period:], strict=False))
        if len(ends) % period or not alike:
            continue
        # A layer multiplies by weights; repeated elementwise ops are not layers.
        if any(node.name in CONTRACTIONS for text in texts[:period] for node in text.nodes):
            found = reader.layers(ends[period - 1 :: period])
            if found is not None:
                return found
    return None


@dataclass(frozen=True)
class _StageText:
    """The computation of some values: `text` is equal for equal computations, whatever arguments
    they read. `leaves` are these arguments; `nodes` are the ops."""

    text: tuple[Any, ...]
    leaves: tuple[int, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class _Template:
    """The ops of a layer: `begin` are the values it receives from the layer before, `leaves` its
    arguments."""

    flow: Dataflow
    nodes: Sequence[Node]
    begin: Collection[int]
    leaves: Sequence[int]
    returned: Sequence[int]

    def write(self, block: ir.Block, arguments: Sequence[ir.Value]) -> list[ir.Value]:
        """Copies the layer into an empty block, whose arguments are the value passed on and the
        inputs. Returns the value it passes on, and the outputs."""
        values = {self.flow.values[number]: arguments[0] for number in self.begin}
        for number, argument in zip(self.leaves, arguments[1:], strict=True):
            values[self.flow.values[number]] = argument
        point = ir.InsertionPoint(block)
        for node in self.nodes:
            copy = copy_with(node.op, values, point)
            values.update(zip(node.op.results, copy.results, strict=True))
        return [values[self.flow.values[number]] for number in self.returned]


class _StageReader:
    """Reads a stage. A layer begins with value number `begin`; -1 is the value that the stage
    receives."""

    def __init__(self, block: ir.Block, states: Collection[int], handed: int) -> None:
        self._flow = Dataflow.from_block(block, opened=())
        arguments = self._flow.root.arguments
        self._arguments = {number: place for place, number in enumerate(arguments)}
        self._states = frozenset(arguments[place] for place in states)
        self._returned = [self._plain(number) for number in self._flow.root.returned]
        self._handed = handed
        self._looks: dict[int, Any] = {}

    def _plain(self, number: int) -> int:
        """Returns the number of a value without constraints on its sharding."""
        for node in self._constraints(number):
            number = node.operands[0]
        return number

    def _begin(self, begin: int) -> frozenset[int]:
        return self._states if begin < 0 else frozenset({begin})

    @cached_property
    def _following(self) -> set[int]:
        """The values that depend on the value that the stage receives."""
        following = set(self._states)
        for node in self._flow.nodes:
            if not following.isdisjoint(node.inputs):
                following.update(node.results)
        return following

    def ends(self) -> list[int]:
        """Returns, in order, the values on every path from the value that the stage receives to the
        one it passes on. Returns an empty list without a path."""
        flow, end = self._flow, self._returned[self._handed]
        is_told_apart = len(set(self._returned)) == len(self._returned)
        if end not in self._following or end not in flow.maker or not is_told_apart:
            return []
        on_way, pending = set[int](), [end]
        while pending:
            number = pending.pop()
            node = flow.maker.get(number)
            if node is not None and node.index not in on_way:
                on_way.add(node.index)
                pending += [n for n in node.inputs if n in self._following]
        last: dict[int, int] = {}  # the last op on the path that uses a result of an op on it
        for index in sorted(on_way):
            for number in flow.nodes[index].inputs:
                maker = flow.maker.get(number)
                if number in self._following:
                    last[-1 if maker is None else maker.index] = index
        ends: list[int] = []
        reach = last.pop(-1, -1)
        for index in sorted(on_way):
            node = flow.nodes[index]
            if reach <= index and len(node.results) == 1 and node.name != SHARDING_CONSTRAINT:
                ends.append(node.results[0])
            reach = max(reach, last.get(index, index))
        return ends

    def read(self, begin: int, ends: Sequence[int]) -> _StageText:
        """Returns the computation of some values, from the point where a layer begins."""
        numbers = dict.fromkeys(self._begin(begin), 0)
        count = itertools.count(1)
        leaves: list[int] = []
        nodes: dict[int, Node] = {}
        text: list[Any] = []
        pending = [self._plain(number) for number in reversed(ends)]
        while pending:
            number = pending[-1]
            node = self._flow.maker.get(number)
            if number in numbers:
                pending.pop()
            elif node is None:
                numbers[number] = next(count)
                leaves.append(number)
                text.append(self._flow.values[number].type)
            elif missing := [n for t in used_values(node) if (n := self._plain(t)) not in numbers]:
                pending += reversed(missing)
            else:
                if node.index not in self._looks:
                    is_constant = node.name in CONSTANTS
                    self._looks[node.index] = value_text(node.op) if is_constant else look(node.op)
                operands = tuple(numbers[self._plain(t)] for t in used_values(node))
                text.append((self._looks[node.index], operands))
                numbers.update(zip(node.results, count, strict=False))
                nodes[node.index] = node
        text.append(tuple(numbers[self._plain(number)] for number in ends))
        return _StageText(tuple(text), tuple(leaves), tuple(nodes[n] for n in sorted(nodes)))

    def layers(self, ends: Sequence[int]) -> WrittenLayers | None:
        """Returns the layers that end with these values; None unless all are equal."""
        begins = [-1, *ends[:-1]]
        own = self._outputs(begins, ends)
        if own is None:
            return None
        texts = [
            self.read(begin, (end, *(self._returned[output] for output in outputs)))
            for begin, end, outputs in zip(begins, ends, own, strict=True)
        ]
        if any(one.text != texts[0].text for one in texts):
            return None
        handed = [self._returned.index(end) if end in self._returned else None for end in ends]
        chosen = len(ends) // 2  # has neighbours, and so the constraints between layers
        template = self._template(begins[chosen], ends[chosen], texts[chosen], own[chosen])
        inputs = tuple(tuple(self._arguments[leaf] for leaf in one.leaves) for one in texts)
        return WrittenLayers(inputs, tuple(handed), tuple(map(tuple, own)), template)

    def _template(
        self, begin: int, end: int, read: _StageText, outputs: Sequence[int]
    ) -> _Template:
        """Returns a layer with the sharding constraints that its ops look through."""
        begins = self._begin(begin)
        nodes = {node.index: node for node in read.nodes}
        for number in [number for node in read.nodes for number in used_values(node)]:
            nodes.update((node.index, node) for node in self._constraints(number, begins))
        ordered = [nodes[index] for index in sorted(nodes)]
        returned = [end, *(self._returned[output] for output in outputs)]
        return _Template(self._flow, ordered, begins, read.leaves, returned)

    def _constraints(self, number: int, begins: Collection[int] = ()) -> Iterator[Node]:
        """Yields the constraints on a value, back to the point where a layer begins."""
        while number not in begins and number in self._flow.maker:
            node = self._flow.maker[number]
            if node.name != SHARDING_CONSTRAINT:
                return
            yield node
            number = node.operands[0]

    def _outputs(self, begins: Sequence[int], ends: Sequence[int]) -> list[list[int]] | None:
        """Returns the outputs of the stage that each layer computes besides the value it passes on.
        Returns None if one of them depends on several layers or on none."""
        layers: dict[int, int] = {begin: layer for layer, begin in enumerate(begins[1:], 1)}
        layers |= dict.fromkeys(self._states, 0)
        own: list[list[tuple[Any, int]]] = [[] for _ in ends]
        for output, number in enumerate(self._returned):
            if number in ends:
                continue
            above = set(self._above(number, layers))
            if len(above) != 1:
                return None
            layer = above.pop()
            own[layer].append((self.read(begins[layer], (number,)).text, output))
        texts = [text for text, _ in own[0]]
        ordered = [each for outputs in own if (each := _in_order(outputs, texts)) is not None]
        return ordered if len(ordered) == len(own) else None

    def _above(self, number: int, layers: dict[int, int]) -> Iterator[int]:
        """Yields the layers on whose beginnings a value depends."""
        pending, seen = [number], set[int]()
        while pending:
            number = pending.pop()
            if number in layers:
                yield layers[number]
            elif number in self._following and number not in seen:
                seen.add(number)
                pending += self._flow.maker[number].inputs


def _in_order(outputs: Sequence[tuple[Any, int]], texts: Sequence[Any]) -> list[int] | None:
    """Returns the outputs in the order of these computations; None if they are not the same
    ones."""
    left, ordered = list(outputs), list[int]()
    for text in texts:
        found = next((each for each in left if each[0] == text), None)
        if found is None:
            return None
        left.remove(found)
        ordered.append(found[1])
    return None if left else ordered


def by_layer(
    first: StageGrid, second: StageGrid, block: ir.Block, scratch: Scratch
) -> tuple[StageGrid, StageGrid] | None:
    """Returns a pipeline and its backward as grids with one layer for each cell. Returns None if
    their numbers of written-out layers differ, or are none. Also returns None if an input of a
    layer depends on both layer and microbatch. Equal computations in `block`, which contains both
    loops, count as one value."""
    layers = _layers_of(first), _layers_of(second)
    if layers[0] is None or layers[1] is None or layers[0].count != layers[1].count:
        return None
    first, second = _share_inputs((first, second), block)
    cut = _cut(first, layers[0], scratch), _cut(second, layers[1], scratch)
    if cut[0] is None or cut[1] is None:
        return None
    mixed = StageInputs.sort_by_dependence(cut[0].inputs, cut[0].handoffs).cells
    return None if mixed else (cut[0], cut[1])


def _layers_of(grid: StageGrid) -> WrittenLayers | None:
    """Returns the layers of a stage that passes on one value; the next stage may read it several
    times."""
    handed = {handoff.output for handoff in grid.handoffs}
    if len(handed) != 1 or any(handoff.ops for handoff in grid.handoffs):
        return None
    one, *others = (handoff.input for handoff in grid.handoffs)
    if any(row[0][number] != row[0][one] for row in grid.inputs for number in others):
        return None
    return written_layers(grid.rows.block, (one, *others), handed.pop())


def _cut(grid: StageGrid, layers: WrittenLayers, scratch: Scratch) -> StageGrid | None:
    """Returns a grid with layers as cells; None if its layers do not have their stages along the
    same dimensions."""
    state, outputs, rows = grid.handoffs[0].input, grid.segment.outputs, grid.rows
    numbers = [(handed, *own) for handed, own in zip(layers.handed, layers.outputs, strict=True)]
    dims = [
        {rows.outputs[number] for number in column if number is not None}
        for column in zip(*numbers, strict=True)
    ]
    if any(len(own) != 1 for own in dims):
        return None
    taken = [(state, *own) for own in layers.inputs]
    types = [rows.block.arguments[number].type for number in taken[0]]
    made = tuple(tuple(None if n is None else outputs[n] for n in own) for own in numbers)
    layer_rows = replace(
        rows,
        function=scratch.function(types, layers.template.write),
        dims=tuple(rows.dims[number] for number in taken[0]),
        outputs=tuple(own.pop() for own in dims),
    )
    cut = replace(grid, rows=layer_rows, handoffs=(Handoff(0, 0, ()),), made=made)

    def handed_on(layer: int, cell: Instance) -> Pieces:
        """Returns the pieces that a layer of a cell passes on; none if only the next layer uses
        it."""
        value = made[layer][0]
        if value is None:
            return ()
        source, box = Computed(value, cell.rank, cell.tick), cut.box(0, cell.row)
        return (SourceBox(source, box, BoxView(Box.whole(box.sizes))),)

    inputs = tuple(
        tuple(
            tuple(
                handed_on(layer - 1, cell) if layer and number == state else given[number]
                for number in own
            )
            for cell, given in zip(cells, row, strict=True)
            for layer, own in enumerate(taken)
        )
        for cells, row in zip(grid.cells, grid.inputs, strict=True)
    )
    return replace(cut, inputs=inputs)


def _share_inputs(grids: Sequence[StageGrid], block: ir.Block) -> list[StageGrid]:
    """Returns the grids with equal computations of a block replaced by the first of them."""
    flow, effects = Dataflow.from_block(block, opened=()), Effects({})
    numbers: dict[int, int] = {}
    known: dict[Any, tuple[int, ...]] = {}
    for node in flow.nodes:
        if not effects.has_effect(node.op):
            key = look(node.op), tuple(numbers.get(number, number) for number in used_values(node))
            numbers.update(zip(node.results, known.setdefault(key, node.results), strict=True))
    first = {flow.values[number]: flow.values[own] for number, own in numbers.items()}

    def share_source(piece: SourceBox) -> SourceBox:
        source = piece.source
        if isinstance(source, Outside) or (isinstance(source, Computed) and source.tick < 0):
            source = replace(source, value=first.get(source.value, source.value))
        return replace(piece, source=source)

    return [grid.with_pieces(lambda _, pieces: tuple(map(share_source, pieces))) for grid in grids]
