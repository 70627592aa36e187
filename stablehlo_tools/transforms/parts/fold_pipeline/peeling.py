"""The layers of a stage that is itself a loop over them.

A stage that scans over its share of the layers, its weights stacked, becomes the body of that scan:
the loop over the stages and the one in each of them are then one loop over all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stablehlo_tools.analysis.dimension_propagation.graph import WHILE
from stablehlo_tools.analysis.trip_counts import constant_integer, counted
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.constants import CONSTANTS
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.transforms.parts.fold_pipeline.chains import Chains
from stablehlo_tools.transforms.parts.fold_pipeline.inputs import Inputs
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Scratch


@dataclass(frozen=True)
class Layers:
    """The body of the loop: `block` computes one layer, of which a stage has `each`.

    The inputs `within` are what a stage has for each of its layers, stacked along a dimension that
    it gives; the block takes the slice of one layer, that dimension of size 1.
    """

    block: ir.Block
    each: int = 1
    within: Mapping[int, int] = field(default_factory=dict[int, int])

    @property
    def outputs(self) -> list[ir.Value]:
        """What the block returns."""
        return list(terminator(self.block).operands)


def layers_of(chains: Chains, inputs: Inputs, scratch: Scratch) -> Layers:
    """The layers of the stages, or the stages where they are no loops over layers."""
    block = chains.rows.function.regions[0].blocks[0]
    whole = Layers(block)
    if chains.length == 1 or any(link.ops for link in chains.links):
        return whole
    scan = _Scan.of(block, chains)
    if scan is None or scan.sliced.keys() != set(inputs.layered):
        return whole
    arguments = list(block.arguments)
    kinds = [argument.type for argument in arguments]
    for number in scan.sliced:
        shape = shape_of(arguments[number])
        shape[scan.dims[number]] = 1
        element = element_of(arguments[number])
        kinds[number] = ir.RankedTensorType.get(shape, element, loc=scan.loop.location)
    function = scratch.typed(kinds, scan.write_layer)
    return Layers(function.regions[0].blocks[0], scan.trips, scan.dims)


@dataclass(frozen=True)
class _Scan:
    """A block that is one loop over layers. `sliced[i]` are the slices, in its body, that take
    what input i holds for a layer, along dimension `dims[i]`; `carried[p]` is the input that carry
    p starts from."""

    loop: ir.Operation
    trips: int
    carried: dict[int, int]
    sliced: dict[int, list[ir.Operation]]
    dims: dict[int, int]

    @staticmethod
    def of(block: ir.Block, chains: Chains) -> _Scan | None:
        """The scan that a block is; None for other blocks."""
        ops = [view.operation for view in block.operations][:-1]
        loops = [op for op in ops if op.name == WHILE]
        if len(loops) != 1 or any(op.name not in CONSTANTS and op != loops[0] for op in ops):
            return None
        loop = loops[0]
        found = counted(loop, _known)
        if isinstance(found, str) or found.starts != (0,) or found.counter.step != 1:
            return None
        scan = _Scan(loop, found.trips[0], {}, {}, {})
        return scan if scan._read(block, chains, found.counter.position) else None

    @property
    def body(self) -> ir.Block:
        """The loop's."""
        return self.loop.regions[1].blocks[0]

    def _read(self, block: ir.Block, chains: Chains, counter: int) -> bool:
        numbers: dict[ir.Value, int] = {a: i for i, a in enumerate(block.arguments)}
        returned = list(terminator(block).operands)
        states = {link.input: returned[link.output] for link in chains.links}
        ends, seen = list(terminator(self.body).operands), list[int]()
        for place, operand in enumerate(self.loop.operands):
            argument, number = self.body.arguments[place], numbers.get(operand)
            if number is not None:
                self.carried[place] = number
            if place == counter or number in states:
                if number in states and states[number] != self.loop.results[place]:
                    return False
                seen += [] if number is None else [number]
            elif ends[place] != argument:
                return False
        if sorted(seen) != sorted(states):
            return False
        return self._read_slices(ends, counter, set(states))

    def _read_slices(self, ends: Sequence[ir.Value], counter: int, states: set[int]) -> bool:
        """Notes the slices; whether the counter serves nothing else."""
        index = self.body.arguments[counter]
        slicing: list[ir.Operation] = []
        for use in index.uses:
            op = use.owner.operation
            if op.name == "stablehlo.dynamic_slice" and use.operand_number:
                slicing.append(op)
            elif len(op.results) != 1 or op.results[0] != ends[counter] or _used(ends[counter]) > 1:
                return False
        places: dict[ir.Value, int] = {self.body.arguments[p]: n for p, n in self.carried.items()}
        places |= {argument: n for n, argument in enumerate(self.loop.block.arguments)}
        for op in slicing:
            number, dim = places.get(op.operands[0]), _layer_dim(op, index)
            if number is None or number in states or dim is None:
                return False
            if self.dims.setdefault(number, dim) != dim:
                return False
            if shape_of(op.operands[0])[dim] != self.trips:
                return False
            self.sliced.setdefault(number, []).append(op)
        return all(self._is_only_sliced(value, number) for value, number in places.items())

    def _is_only_sliced(self, value: ir.Value, number: int) -> bool:
        """Whether nothing else takes an input of which layers take slices."""
        if number not in self.sliced:
            return True
        passes = {"stablehlo.return", "stablehlo.while"}
        users = [use.owner.operation for use in value.uses]
        return all(op in self.sliced[number] for op in users if op.name not in passes)

    def write_layer(self, block: ir.Block, arguments: Sequence[ir.Value]) -> list[ir.Value]:
        """Copies what the loop does for one layer into an empty block."""
        point = ir.InsertionPoint(block)
        source = self.loop.block
        values: dict[ir.Value, ir.Value] = dict(zip(source.arguments, arguments, strict=True))
        for view in source.operations:
            if view.operation.name in CONSTANTS:
                copy = view.operation.clone(ip=point)
                values[view.operation.results[0]] = copy.results[0]
        for place, argument in enumerate(self.body.arguments):
            values[argument] = values[self.loop.operands[place]]
        taken = {op.results[0]: n for n, ops in self.sliced.items() for op in ops}
        for view in list(self.body.operations)[:-1]:
            op = view.operation
            if len(op.results) and op.results[0] in taken:
                values[op.results[0]] = arguments[taken[op.results[0]]]
                continue
            copy = copy_with(op, values, point)
            values.update(zip(op.results, copy.results, strict=True))
        ends = list(terminator(self.body).operands)
        returned = terminator(source).operands
        return [values[ends[ir.OpResult(value).result_number]] for value in returned]


def _known(value: ir.Value) -> Sequence[int] | None:
    found = constant_integer(value)
    return None if found is None else [found]


def _used(value: ir.Value) -> int:
    return sum(1 for _ in value.uses)


def _layer_dim(op: ir.Operation, counter: ir.Value) -> int | None:
    """The dimension along which a slice takes one element, at the counter; all of the others."""
    sizes, shape = shape_of(op.results[0]), shape_of(op.operands[0])
    moving = [d for d, start in enumerate(list(op.operands)[1:]) if start == counter]
    if len(moving) != 1 or sizes[moving[0]] != 1:
        return None
    whole = all(sizes[d] == shape[d] for d in range(len(sizes)) if d != moving[0])
    return moving[0] if whole else None
