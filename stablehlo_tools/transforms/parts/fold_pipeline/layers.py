"""The loop over layers that a pipeline's stages fold to.

A stage that is itself a scan over its share of the layers becomes the body of that scan: the loop
over the stages and the one in each of them are then one loop over all layers. Other stages are the
layers. Where a stage mixes the samples of a microbatch, with statistics over them for one, it would
compute something else for the whole batch: its microbatches stay apart, in a loop around the one
over layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.analysis.loops import counted, known_integer
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import DYNAMIC_SLICE, WHILE
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import CONSTANTS
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.transforms.parts.fold_pipeline.chains import Chains, Handoff, StageInputs
from stablehlo_tools.transforms.parts.fold_pipeline.composing import Composer, no_sources
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Scratch
from stablehlo_tools.transforms.parts.scaling import Scaling

# What is the body of the loop: the stage, or the body of the scan that a stage is.


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


def layers_of(chains: Chains, inputs: StageInputs, scratch: Scratch) -> Layers:
    """The layers of the stages, or the stages where they are no loops over layers."""
    block = chains.rows.function.regions[0].blocks[0]
    stages = Layers(block)
    if chains.length == 1 or any(handoff.ops for handoff in chains.handoffs):
        return stages
    scan = _Scan.of(block, chains)
    if scan is None or scan.sliced.keys() != set(inputs.layered):
        return stages
    arguments = list(block.arguments)
    types = [argument.type for argument in arguments]
    for number in scan.sliced:
        shape = shape_of(arguments[number])
        shape[scan.dims[number]] = 1
        element = element_of(arguments[number])
        types[number] = ir.RankedTensorType.get(shape, element, loc=scan.loop.location)
    function = scratch.function(types, scan.write_layer)
    return Layers(function.regions[0].blocks[0], scan.trips, scan.dims)


@dataclass(frozen=True)
class _Scan:
    """A block that is one loop over layers. `sliced[i]` are the slices, in its body, that take
    what input i holds for a layer, along dimension `dims[i]`; `carried[p]` is the input that carry
    p starts from."""

    loop: ir.Operation
    trips: int
    carried: dict[int, int] = field(default_factory=dict[int, int])
    sliced: dict[int, list[ir.Operation]] = field(default_factory=dict[int, list[ir.Operation]])
    dims: dict[int, int] = field(default_factory=dict[int, int])

    @staticmethod
    def of(block: ir.Block, chains: Chains) -> _Scan | None:
        """The scan that a stage is, beside constants; None for any other stage."""
        ops = [view.operation for view in block.operations][:-1]
        loops = [op for op in ops if op.name == WHILE]
        if len(loops) != 1 or any(op.name not in CONSTANTS and op != loops[0] for op in ops):
            return None
        loop = loops[0]
        count = counted(loop, known_integer)
        if isinstance(count, str) or count.starts != (0,) or count.counter.step != 1:
            return None
        scan = _Scan(loop, count.trips[0])
        return scan if scan._read_carries(block, chains, count.counter.position) else None

    @property
    def body(self) -> ir.Block:
        """The loop's."""
        return self.loop.regions[1].blocks[0]

    def _read_carries(self, block: ir.Block, chains: Chains, counter: int) -> bool:
        """Notes what each carry starts from; whether only what stages hand on changes."""
        numbers: dict[ir.Value, int] = {a: i for i, a in enumerate(block.arguments)}
        returned = list(terminator(block).operands)
        states = {handoff.input: returned[handoff.output] for handoff in chains.handoffs}
        ends, carried_states = list(terminator(self.body).operands), list[int]()
        for position, operand in enumerate(self.loop.operands):
            argument, number = self.body.arguments[position], numbers.get(operand)
            if number is not None:
                self.carried[position] = number
            if position == counter or number in states:
                if number in states and states[number] != self.loop.results[position]:
                    return False
                carried_states += [] if number is None else [number]
            elif ends[position] != argument:
                return False
        if sorted(carried_states) != sorted(states):
            return False
        return self._read_slices(ends, counter, set(states))

    def _read_slices(self, ends: Sequence[ir.Value], counter: int, states: set[int]) -> bool:
        """Notes the slices; whether the counter serves nothing else."""
        index = self.body.arguments[counter]
        slicing: list[ir.Operation] = []
        for use in index.uses:
            op = use.owner.operation
            if op.name == DYNAMIC_SLICE and use.operand_number:
                slicing.append(op)
            elif (
                len(op.results) != 1
                or op.results[0] != ends[counter]
                or sum(1 for _ in ends[counter].uses) > 1
            ):
                return False
        inputs: dict[ir.Value, int] = {self.body.arguments[p]: n for p, n in self.carried.items()}
        inputs |= {argument: n for n, argument in enumerate(self.loop.block.arguments)}
        for op in slicing:
            number, dim = inputs.get(op.operands[0]), _layer_dim(op, index)
            if number is None or number in states or dim is None:
                return False
            if self.dims.setdefault(number, dim) != dim:
                return False
            if shape_of(op.operands[0])[dim] != self.trips:
                return False
            self.sliced.setdefault(number, []).append(op)
        return all(self._is_only_sliced(value, number) for value, number in inputs.items())

    def _is_only_sliced(self, value: ir.Value, number: int) -> bool:
        """Whether nothing else takes an input of which layers take slices."""
        if number not in self.sliced:
            return True
        users = [use.owner.operation for use in value.uses]
        return all(
            op in self.sliced[number] for op in users if op.name not in ("stablehlo.return", WHILE)
        )

    def write_layer(self, block: ir.Block, arguments: Sequence[ir.Value]) -> list[ir.Value]:
        """Copies what the loop does for one layer into an empty block."""
        point = ir.InsertionPoint(block)
        source = self.loop.block
        values: dict[ir.Value, ir.Value] = dict(zip(source.arguments, arguments, strict=True))
        for view in source.operations:
            if view.operation.name in CONSTANTS:
                copy = view.operation.clone(ip=point)
                values[view.operation.results[0]] = copy.results[0]
        for position, argument in enumerate(self.body.arguments):
            values[argument] = values[self.loop.operands[position]]
        input_of = {op.results[0]: n for n, ops in self.sliced.items() for op in ops}
        for view in list(self.body.operations)[:-1]:
            op = view.operation
            if len(op.results) and op.results[0] in input_of:
                values[op.results[0]] = arguments[input_of[op.results[0]]]
                continue
            copy = copy_with(op, values, point)
            values.update(zip(op.results, copy.results, strict=True))
        ends = list(terminator(self.body).operands)
        returned = terminator(source).operands
        return [values[ends[ir.OpResult(value).result_number]] for value in returned]


def _layer_dim(op: ir.Operation, counter: ir.Value) -> int | None:
    """The dimension along which a slice takes one element, at the counter; all of the others."""
    sizes, shape = shape_of(op.results[0]), shape_of(op.operands[0])
    moving = [d for d, start in enumerate(list(op.operands)[1:]) if start == counter]
    if len(moving) != 1 or sizes[moving[0]] != 1:
        return None
    whole = all(sizes[d] == shape[d] for d in range(len(sizes)) if d != moving[0])
    return moving[0] if whole else None


# Writing it.


@dataclass(frozen=True)
class LayerOperand:
    """An input of the layers, or all that they have for it along dimension `stacked`; `whole`
    says that a layer takes the slice as it is, with that dimension of size 1."""

    value: ir.Value
    stacked: int | None = None
    whole: bool = False


@dataclass(frozen=True)
class LayerLoop:
    """A block that is run `trips` times, on `samples` of the batch that `dims` follows.

    A handoff says that what one run computes is an input of the next.
    """

    dims: BatchDims
    samples: int
    handoffs: tuple[Handoff, ...]
    operands: tuple[LayerOperand, ...]
    trips: int

    def write(self, build: Builder) -> list[ir.Value]:
        """Writes the loop, or one run without a loop; returns what the last run computes."""
        returned = self.dims.graph.root.returned
        if self.trips == 1:
            return self._run([operand.value for operand in self.operands], build)
        handed = [handoff.input for handoff in self.handoffs]
        others = [number for number in range(len(self.operands)) if number not in handed]
        kept = [  # where a handoff converts, what the last run computes is kept beside it
            output
            for output in range(len(returned))
            if all(handoff.ops for handoff in self.handoffs if handoff.output == output)
        ]

        def body(inner: Builder, _: ir.Value, taken: Sequence[ir.Value]) -> list[ir.Value]:
            numbered = dict(zip(handed, taken, strict=False))
            numbered |= dict(zip(others, taken[len(handed) + len(kept) :], strict=True))
            made = self._run([numbered[number] for number in range(len(numbered))], inner)
            composer = Composer(inner, no_sources)
            after = [composer.through(made[h.output], h.ops) for h in self.handoffs]
            return [*after, *(made[output] for output in kept)]

        states = [self.operands[number].value for number in handed]
        states += [self._unset(build, output) for output in kept]
        results = write_scan(
            build, self.trips, states, [self.operands[number] for number in others], body
        )
        carry_of = {h.output: i for i, h in reversed(list(enumerate(self.handoffs))) if not h.ops}
        carry_of |= {output: len(handed) + i for i, output in enumerate(kept)}
        return [results[carry_of[output]] for output in range(len(returned))]

    def write_per_microbatch(
        self, build: Builder, count: int, batch: Collection[int]
    ) -> list[ir.Value]:
        """Writes a loop over `count` microbatches around it, and returns what each one's last run
        computes, stacked. The operands `batch` are those of all microbatches, stacked."""
        graph = self.dims.graph
        results = [graph.values[number] for number in graph.root.returned]
        buffers = [
            build.splat(0, [count, *shape_of(value)], element_of(value)) for value in results
        ]
        outer = [
            LayerOperand(operand.value, 0 if number in batch else None)
            for number, operand in enumerate(self.operands)
        ]

        def body(inner: Builder, counter: ir.Value, taken: Sequence[ir.Value]) -> list[ir.Value]:
            own = zip(self.operands, taken[len(buffers) :], strict=True)
            operands = tuple(replace(operand, value=value) for operand, value in own)
            made = replace(self, operands=operands).write(inner)
            return [
                put_row(inner, buffer, value, counter)
                for buffer, value in zip(taken, made, strict=False)
            ]

        return write_scan(build, count, buffers, outer, body)

    def _run(self, arguments: Sequence[ir.Value], build: Builder) -> list[ir.Value]:
        scaling = Scaling(self.dims, self.samples)
        return scaling.write(self.dims.graph.root, arguments, build.point)

    def _unset(self, build: Builder, output: int) -> ir.Value:
        graph = self.dims.graph
        value = graph.values[graph.root.returned[output]]
        type_ = ir.RankedTensorType(Scaling(self.dims, self.samples).type_of(value))
        return build.splat(0, type_.shape, type_.element_type)


# The ops of one iteration: of its row of what is stacked, the states, and each operand in it.
ScanBody = Callable[[Builder, ir.Value, Sequence[ir.Value]], Sequence[ir.Value]]


def write_scan(
    build: Builder,
    trips: int,
    states: Sequence[ir.Value],
    operands: Sequence[LayerOperand],
    body: ScanBody,
    *,
    reverse: bool = False,
) -> list[ir.Value]:
    """A `while` as jax writes a scan, which `expand-pipeline` and others look for: it carries the
    operands, a counter and the states. Returns the states after it.

    With `reverse`, the iterations take the last of what is stacked first.
    """
    i32 = ir.IntegerType.get_signless(32, build.context)
    carried = [*(operand.value for operand in operands), build.i32(0), *states]
    types, location = [value.type for value in carried], build.location
    loop = ir.Operation.create(
        WHILE, results=types, operands=carried, regions=2, loc=location, ip=build.point
    )
    blocks = [
        region.blocks.append(*types, arg_locs=[location] * len(types)) for region in loop.regions
    ]
    position = len(operands)
    condition = Builder(ir.InsertionPoint(blocks[0]), location)
    bound = condition.splat(trips, [], i32)
    condition.end_region([condition.compare("LT", blocks[0].arguments[position], bound)])
    inner = Builder(ir.InsertionPoint(blocks[1]), location)
    arguments = list(blocks[1].arguments)
    counter = arguments[position]
    row = counter
    if reverse:
        left = inner.same("subtract", inner.i32(trips), counter)
        row = inner.same("subtract", left, inner.i32(1))
    taken = [
        argument if operand.stacked is None else _layer(inner, argument, row, operand)
        for argument, operand in zip(arguments, operands, strict=False)
    ]
    after = body(inner, row, [*arguments[position + 1 :], *taken])
    following = inner.same("add", counter, inner.i32(1))
    inner.end_region([*arguments[:position], following, *after])
    results: list[ir.Value] = list(loop.results)
    return results[position + 1 :]


def _layer(build: Builder, stack: ir.Value, counter: ir.Value, operand: LayerOperand) -> ir.Value:
    """What a stack holds for a layer."""
    shape, dim = shape_of(stack), operand.stacked
    zero = build.i32(0)
    starts = [counter if d == dim else zero for d in range(len(shape))]
    taken = build.dynamic_slice(stack, starts, [1 if d == dim else n for d, n in enumerate(shape)])
    if operand.whole:
        return taken
    return build.reshape(taken, [n for d, n in enumerate(shape) if d != dim])


def put_row(build: Builder, buffer: ir.Value, value: ir.Value, counter: ir.Value) -> ir.Value:
    """A buffer with a value in the row of a number."""
    shape = shape_of(buffer)
    zero = build.splat(0, [], element_of(counter))
    update = build.reshape(value, [1, *shape[1:]])
    return build.update(buffer, update, [counter, *([zero] * (len(shape) - 1))])
