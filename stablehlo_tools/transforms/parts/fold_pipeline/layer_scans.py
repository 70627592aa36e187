"""The body of the scan that a stage is, where it leaves something for each of its layers.

A stage of a pipeline that is differentiated keeps, in a stack, what the backward takes of each of
its layers; the backward's stage goes through them in reverse, and stacks their gradients. The loop
over the stages and the one in each of them are then one loop over all layers:

    while stages { while layers of a stage { layer } }  ==>  while all layers { layer }
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import (
    DYNAMIC_SLICE,
    WHILE,
)
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.walk import terminator, values_used
from stablehlo_tools.transforms.parts.fold_pipeline.chains import Handoff
from stablehlo_tools.transforms.parts.fold_pipeline.row_loops import RowLoop, fuse_loops
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
    of which each takes its part of just the inputs `stacked`; None for any other stage.

    Loops of the stage that compute a row for each layer become part of the one that takes it.
    """
    if any(handoff.ops for handoff in handoffs):
        return None
    fuse_loops(block, reverse=reverse)
    each = {*stacked, *(handoff.input for handoff in handoffs)}
    scan = _Scan.of_stage(block, each, reverse=reverse)
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


class _Scan(RowLoop):
    """A stage that is one loop over its layers.

    `inputs` and `outputs` are those that are stacked, with the dimension of the layers. `slices`
    are the ops that take a layer's part of an input, by the number of that.
    """

    def __init__(self, loop: ir.Operation, trips: int, counter: int) -> None:
        super().__init__(loop, trips, counter)
        self.block: ir.Block = loop.block
        self._returned = list(terminator(self.block).operands)
        self._numbers: dict[ir.Value, int] = {a: i for i, a in enumerate(self.block.arguments)}
        self.inputs: dict[int, int] = {}
        self.outputs: dict[int, int] = {}
        self.slices: dict[ir.Value, int] = {}
        self.updates: dict[int, ir.Operation] = {}

    @staticmethod
    def of_stage(block: ir.Block, each: Collection[int], *, reverse: bool) -> _Scan | None:
        """The only loop of a block, where nothing else takes its inputs `each`, which differ for
        layers: what does not, is computed for each layer."""
        ops = [view.operation for view in block.operations][:-1]
        loops = [op for op in ops if op.name == WHILE]
        if len(loops) != 1:
            return None
        own = {argument for number, argument in enumerate(block.arguments) if number in each}
        if any(op != loops[0] and not own.isdisjoint(values_used(op)) for op in ops):
            return None
        return _Scan.of(loops[0], reverse=reverse)

    def read(self, handoffs: Sequence[Handoff]) -> bool:
        """Notes what each carry is; whether all are states, stacks, or the same for all layers."""
        handed = {handoff.input: handoff.output for handoff in handoffs}
        states: set[int] = set()
        for position, operand in enumerate(self.loop.operands):
            argument, end = self.body.arguments[position], self.ends[position]
            number, result = self._numbers.get(operand), self.loop.results[position]
            if position == self.counter:
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
        for value, number in self._numbers.items():  # also where the body takes it as it is
            if number in handed and any(op.block != self.block for op in self.users(value)):
                return False
            if not self._read_input(value, number):
                return False
        return states == set(handed) and self._read_outputs(set(handed.values()))

    def _read_input(self, value: ir.Value, number: int | None) -> bool:
        """Notes the slices of what is the same for all layers; whether nothing else takes it then,
        and it is an input."""
        users = [op for op in self.users(value) if op.name not in ("stablehlo.return", WHILE)]
        slicing = [op for op in users if any(row in self.rows for row in list(op.operands)[1:])]
        if not slicing:
            return True
        dims = {self.layer_dim(op) for op in users if op.name == DYNAMIC_SLICE}
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
        update = self.update_of(position)
        if update is None:
            return False
        self.updates[position] = update
        return True

    def _read_outputs(self, handed: set[int]) -> bool:
        """Notes the outputs that are stacks; whether all others are handed on."""
        places: dict[ir.Value, int] = {r: i for i, r in enumerate(self.loop.results)}
        for output, value in enumerate(self._returned):
            position = places.get(value)
            if position is not None and position in self.updates:
                dim = self.layer_dim(self.updates[position])
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
        for position, argument in enumerate(self.body.arguments):
            values[argument] = values[self.loop.operands[position]]
        skipped = {op.results[0] for op in self.updates.values()}
        for view in list(self.body.operations)[:-1]:
            op = view.operation
            if len(op.results) and op.results[0] in self.slices:
                values[op.results[0]] = arguments[self.slices[op.results[0]]]
            elif not len(op.results) or op.results[0] not in skipped:
                copy = copy_with(op, values, point)
                values.update(zip(op.results, copy.results, strict=True))
        places: dict[ir.Value, int] = {r: i for i, r in enumerate(self.loop.results)}
        return [
            values[self.updates[p].operands[1] if p in self.updates else self.ends[p]]
            for p in map(places.__getitem__, self._returned)
        ]
