"""The body of the scan that a stage is, where it leaves something for each of its layers.

A stage of a pipeline that is differentiated keeps, in a stack, what the backward takes of each of
its layers; the backward's stage goes through them in reverse, and stacks their gradients. The loop
over the stages and the one in each of them are then one loop over all layers:

    while stages { while layers of a stage { layer } }  ==>  while all layers { layer }
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from stablehlo_tools.analysis.loops import constant_integer, counted, known_integer
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import (
    ADD,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    SUBTRACT,
    WHILE,
)
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import terminator, values_used
from stablehlo_tools.transforms.parts.fold_pipeline.chains import Handoff
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Scratch


@dataclass(frozen=True)
class LayerBlock:
    """A block that computes one layer of a stage, of which there are `each`.

    `inputs[i]` is the dimension along which input i of the stage holds what its layers take, and
    `outputs` likewise; the block has these with that dimension of size 1.
    """

    block: ir.Block
    each: int = 1
    inputs: dict[int, int] = field(default_factory=dict[int, int])
    outputs: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def returned(self) -> list[ir.Value]:
        """What the block returns."""
        return list(terminator(self.block).operands)


def layer_of(
    block: ir.Block,
    handoffs: Sequence[Handoff],
    stacked: Collection[int],
    scratch: Scratch,
    *,
    reverse: bool,
) -> LayerBlock | None:
    """The block of one layer of a stage that is one scan over its layers, in reverse if so asked,
    of which each takes its part of just the inputs `stacked`; None for any other stage."""
    if any(handoff.ops for handoff in handoffs):
        return None
    scan = _Scan.of(block, reverse=reverse)
    if scan is None or not scan.read(handoffs) or scan.inputs.keys() != set(stacked):
        return None
    arguments = list(block.arguments)
    types = [argument.type for argument in arguments]
    for number, dim in scan.inputs.items():
        shape = shape_of(arguments[number])
        shape[dim] = 1
        element = element_of(arguments[number])
        types[number] = ir.RankedTensorType.get(shape, element, loc=scan.loop.location)
    function = scratch.function(types, scan.write)
    return LayerBlock(function.regions[0].blocks[0], scan.trips, scan.inputs, scan.outputs)


class _Scan:
    """A stage that is one loop over its layers, beside ops that take none of its inputs.

    `inputs` and `outputs` are those that are stacked, with the dimension of the layers. `slices`
    are the ops that take a layer's part of an input, by the number of that.
    """

    def __init__(self, block: ir.Block, loop: ir.Operation, trips: int, counter: int) -> None:
        self.block = block
        self.loop = loop
        self.trips = trips
        self._counter = counter
        self._body: ir.Block = loop.regions[1].blocks[0]
        self._ends = list(terminator(self._body).operands)
        self._returned = list(terminator(block).operands)
        self._numbers: dict[ir.Value, int] = {a: i for i, a in enumerate(block.arguments)}
        self._rows: list[ir.Value] = []  # what is the number of the layer
        self.inputs: dict[int, int] = {}
        self.outputs: dict[int, int] = {}
        self.slices: dict[ir.Value, int] = {}
        self.updates: dict[int, ir.Operation] = {}

    @staticmethod
    def of(block: ir.Block, *, reverse: bool) -> _Scan | None:
        """The only loop of a block, if it counts up from 0 and nothing else takes an argument."""
        ops = [view.operation for view in block.operations][:-1]
        loops = [op for op in ops if op.name == WHILE]
        if len(loops) != 1:
            return None
        arguments = set(block.arguments)
        if any(op != loops[0] and not arguments.isdisjoint(values_used(op)) for op in ops):
            return None
        loop = loops[0]
        count = counted(loop, known_integer)
        if isinstance(count, str) or count.starts != (0,) or count.counter.step != 1:
            return None
        scan = _Scan(block, loop, count.trips[0], count.counter.position)
        return scan if scan._read_rows(reverse=reverse) else None

    def _read_rows(self, *, reverse: bool) -> bool:
        """Notes the values that are the number of the layer; whether the counter serves no other
        end. In reverse, that is the trips minus the counter minus 1."""
        argument = self._body.arguments[self._counter]
        self._rows = [argument]
        users = self._users(argument)
        if reverse:
            left = [op for op in users if op.name == SUBTRACT and op.operands[1] == argument]
            rows = [row for op in left for row in self._left(op)]
            if not rows or any(len(self._users(op.results[0])) > 1 for op in left):
                return False
            self._rows = rows
            users = [op for op in users if op not in left]
        end = self._ends[self._counter]
        steps = [op for op in users if op.name == ADD and op.results[0] == end]
        if len(steps) != 1 or len(self._users(end)) != 1:
            return False
        others = [op for op in users if op not in steps]
        if reverse:
            others += [op for row in self._rows for op in self._users(row)]
        return all(
            op.name in (DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE) and self._layer_dim(op) is not None
            for op in others
        )

    def _left(self, op: ir.Operation) -> list[ir.Value]:
        """The number of the layer, from what the counter is subtracted from."""
        if constant_integer(op.operands[0]) == self.trips - 1:
            return [op.results[0]]
        if constant_integer(op.operands[0]) != self.trips:
            return []
        return [
            user.results[0]
            for user in self._users(op.results[0])
            if user.name == SUBTRACT
            and user.operands[0] == op.results[0]
            and constant_integer(user.operands[1]) == 1
        ]

    def _users(self, value: ir.Value) -> list[ir.Operation]:
        return [use.owner.operation for use in value.uses]

    def _layer_dim(self, op: ir.Operation) -> int | None:
        """The dimension along which an op takes or puts one element, at the number of the layer;
        all of the others."""
        lead = 1 if op.name == DYNAMIC_SLICE else 2
        sizes = shape_of(op.results[0] if lead == 1 else op.operands[1])
        shape = shape_of(op.operands[0])
        starts = list(op.operands)[lead:]
        moving = [d for d, start in enumerate(starts) if start in self._rows]
        if len(moving) != 1 or sizes[moving[0]] != 1 or shape[moving[0]] != self.trips:
            return None
        whole = all(sizes[d] == shape[d] for d in range(len(sizes)) if d != moving[0])
        return moving[0] if whole else None

    def read(self, handoffs: Sequence[Handoff]) -> bool:
        """Notes what each carry is; whether all are states, stacks, or the same for all layers."""
        handed = {handoff.input: handoff.output for handoff in handoffs}
        states: set[int] = set()
        for position, operand in enumerate(self.loop.operands):
            argument, end = self._body.arguments[position], self._ends[position]
            number, result = self._numbers.get(operand), self.loop.results[position]
            if position == self._counter:
                continue
            if number in handed:
                if self._returned[handed[number]] != result:
                    return False
                states.add(number)
            elif argument == end:
                if not self._read_input(argument, number):
                    return False
            elif not self._read_stack(position):
                return False
        captured = [a for a, number in self._numbers.items() if number not in self._carried]
        if not all(self._read_input(value, self._numbers[value]) for value in captured):
            return False
        return states == set(handed) and self._read_outputs(set(handed.values()))

    @property
    def _carried(self) -> set[int]:
        return {self._numbers[v] for v in self.loop.operands if v in self._numbers}

    def _read_input(self, value: ir.Value, number: int | None) -> bool:
        """Notes the slices of what is the same for all layers; whether nothing else takes it then,
        and it is an input."""
        users = [op for op in self._users(value) if op.name not in ("stablehlo.return", WHILE)]
        slicing = [op for op in users if any(row in self._rows for row in list(op.operands)[1:])]
        if not slicing:
            return True
        dims = {self._layer_dim(op) for op in users if op.name == DYNAMIC_SLICE}
        if number is None or len(slicing) != len(users) or len(dims) != 1:
            return False
        dim = dims.pop()
        if dim is None or self.inputs.setdefault(number, dim) != dim:
            return False
        if any(op.operands[0] != value for op in users):
            return False
        self.slices.update((op.results[0], number) for op in users)
        return True

    def _read_stack(self, position: int) -> bool:
        """Notes the update of a carry in which every layer writes its part."""
        argument, update = self._body.arguments[position], producer(self._ends[position])
        if update is None or update.name != DYNAMIC_UPDATE_SLICE:
            return False
        if update.operands[0] != argument or len(self._users(argument)) != 1:
            return False
        if len(self._users(update.results[0])) != 1 or self._layer_dim(update) is None:
            return False
        self.updates[position] = update
        return True

    def _read_outputs(self, handed: set[int]) -> bool:
        """Notes the outputs that are stacks; whether all others are handed on."""
        places: dict[ir.Value, int] = {r: i for i, r in enumerate(self.loop.results)}
        for output, value in enumerate(self._returned):
            position = places.get(value)
            if position is not None and position in self.updates:
                dim = self._layer_dim(self.updates[position])
                assert dim is not None
                self.outputs[output] = dim
            elif output not in handed:
                return False
        return True

    def write(self, block: ir.Block, arguments: Sequence[ir.Value]) -> list[ir.Value]:
        """Copies what the loop does for one layer into an empty block."""
        point = ir.InsertionPoint(block)
        values: dict[ir.Value, ir.Value] = dict(zip(self.block.arguments, arguments, strict=True))
        for view in list(self.block.operations)[:-1]:
            op = view.operation
            if op == self.loop:
                break
            copy = copy_with(op, values, point)
            values.update(zip(op.results, copy.results, strict=True))
        for position, argument in enumerate(self._body.arguments):
            values[argument] = values[self.loop.operands[position]]
        skipped = {op.results[0] for op in self.updates.values()}
        for view in list(self._body.operations)[:-1]:
            op = view.operation
            if len(op.results) and op.results[0] in self.slices:
                values[op.results[0]] = arguments[self.slices[op.results[0]]]
            elif not len(op.results) or op.results[0] not in skipped:
                copy = copy_with(op, values, point)
                values.update(zip(op.results, copy.results, strict=True))
        places: dict[ir.Value, int] = {r: i for i, r in enumerate(self.loop.results)}
        return [
            values[self.updates[p].operands[1] if p in self.updates else self._ends[p]]
            for p in map(places.__getitem__, self._returned)
        ]
