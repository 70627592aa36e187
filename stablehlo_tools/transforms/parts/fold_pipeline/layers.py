"""Writes the loops over layers that replace the stages of a pipeline.

    %out:3 = stablehlo.while(%weights, %h = %batch, %kept) {
      %new = stablehlo.dynamic_update_slice %kept, %h, %layer     // for the backward
      %y = stage(%weights[%layer], %h)
    }

A forward keeps each layer's residuals, a backward each layer's gradients. The backward runs through
the layers in reverse.

A stage may mix the samples of a microbatch, for example by statistics over them. On the whole
batch, it would compute something else. Its microbatches stay separate, in a loop around the one
over layers. That loop adds up the gradients in the order of the ticks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.transforms.parts.block_rewriter import part_type_of
from stablehlo_tools.transforms.parts.fold_pipeline.composing import Composer, no_sources
from stablehlo_tools.transforms.parts.fold_pipeline.stage_chains import Handoff
from stablehlo_tools.transforms.parts.scaling import Scaling


@dataclass(frozen=True)
class LayerOperand:
    """An input of the layers. If `stacked` is a dimension, the value holds the inputs of all layers
    along it. With `whole`, a layer reads its slice with that dimension kept, of size 1."""

    value: ir.Value
    stacked: int | None = None
    whole: bool = False


@dataclass(frozen=True)
class _StageLoop:
    """A block that is run `trips` times, on `samples` of the batch that `dims` follows.

    A handoff passes an output of one run to the next run as an input.
    """

    dims: BatchDims
    samples: int
    handoffs: tuple[Handoff, ...]
    operands: tuple[LayerOperand, ...]
    trips: int

    @property
    def handed(self) -> list[int]:
        """The inputs that are passed from run to run."""
        return [handoff.input for handoff in self.handoffs]

    @property
    def others(self) -> list[int]:
        """The inputs that are not passed from run to run."""
        handed = self.handed
        return [number for number in range(len(self.operands)) if number not in handed]

    def run(self, given: Mapping[int, ir.Value], build: Builder) -> list[ir.Value]:
        """Writes one run on the inputs `given`, by number. Returns its outputs."""
        arguments = [given[number] for number in range(len(given))]
        return Scaling(self.dims, self.samples).write_all(arguments, build.point)

    def next_inputs(self, made: Sequence[ir.Value], build: Builder) -> list[ir.Value]:
        """Returns the inputs of the next run, made of the outputs of one run."""
        composer = Composer(build, no_sources)
        return [composer.through(made[h.output], h.ops) for h in self.handoffs]

    def per_microbatch(self, batch: Collection[int]) -> list[LayerOperand]:
        """Returns the operands of a loop over microbatches: those in `batch` are stacked."""
        return [
            LayerOperand(operand.value, 0 if number in batch else None)
            for number, operand in enumerate(self.operands)
        ]

    def on(self, values: Sequence[ir.Value]) -> Self:
        """Returns the same loop on other values."""
        pairs = zip(self.operands, values, strict=True)
        return replace(self, operands=tuple(replace(old, value=value) for old, value in pairs))


@dataclass(frozen=True)
class BlockRepetition(_StageLoop):
    """A loop that keeps only the outputs of its last run."""

    def write(self, build: Builder) -> list[ir.Value]:
        """Writes the loop, or a single run without a loop. Returns the outputs of the last run."""
        returned = self.dims.graph.root.returned
        if self.trips == 1:
            return self.run({n: each.value for n, each in enumerate(self.operands)}, build)
        handed, others = self.handed, self.others
        kept = [  # if a handoff converts, the carry is not the output: keep the output, too
            output
            for output in range(len(returned))
            if all(handoff.ops for handoff in self.handoffs if handoff.output == output)
        ]

        def body(inner: Builder, _: ir.Value, taken: Sequence[ir.Value]) -> list[ir.Value]:
            given = dict(zip(handed, taken, strict=False))
            given |= dict(zip(others, taken[len(handed) + len(kept) :], strict=True))
            made = self.run(given, inner)
            return [*self.next_inputs(made, inner), *(made[output] for output in kept)]

        states = [self.operands[number].value for number in handed]
        for output in kept:
            type_ = ir.RankedTensorType(part_type_of(self.dims, returned[output], self.samples))
            states.append(build.splat(0, type_.shape, type_.element_type))
        results = write_scan(
            build, self.trips, states, [self.operands[number] for number in others], body
        )
        carry_of = {h.output: i for i, h in reversed(list(enumerate(self.handoffs))) if not h.ops}
        carry_of |= {output: len(handed) + i for i, output in enumerate(kept)}
        return [results[carry_of[output]] for output in range(len(returned))]

    def write_per_microbatch(
        self, build: Builder, count: int, batch: Collection[int]
    ) -> list[ir.Value]:
        """Writes the loop inside of a loop over `count` microbatches. Returns the outputs of each
        microbatch's last run, stacked. The operands in `batch` hold all microbatches, stacked."""
        graph = self.dims.graph
        results = [graph.values[number] for number in graph.root.returned]
        buffers = [
            build.splat(0, [count, *shape_of(value)], element_of(value)) for value in results
        ]

        def body(inner: Builder, counter: ir.Value, taken: Sequence[ir.Value]) -> list[ir.Value]:
            made = self.on(taken[len(buffers) :]).write(inner)
            return [
                put_row(inner, buffer, value, counter)
                for buffer, value in zip(taken, made, strict=False)
            ]

        return write_scan(build, count, buffers, self.per_microbatch(batch), body)


# Writes the ops of one iteration, given its row, the states and each operand; returns the states.
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
    """Writes a `while` in the form of a jax scan, which passes such as `expand-pipeline` recognise.
    It carries the operands, a counter and the states. Returns the states after the loop.

    With `reverse`, iterations read stacked operands from the last row to the first.
    """
    i32 = ir.IntegerType.get_signless(32, build.context)
    carried = [*(operand.value for operand in operands), build.i32(0), *states]
    types, location = [value.type for value in carried], build.location
    loop = build.create(WHILE, carried, types, regions=2)
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
    """Returns the slice of a stack for one layer."""
    shape, dim = shape_of(stack), operand.stacked
    zero = build.i32(0)
    starts = [counter if d == dim else zero for d in range(len(shape))]
    taken = build.dynamic_slice(stack, starts, [1 if d == dim else n for d, n in enumerate(shape)])
    if operand.whole:
        return taken
    return build.reshape(taken, [n for d, n in enumerate(shape) if d != dim])


def put_row(build: Builder, buffer: ir.Value, value: ir.Value, counter: ir.Value) -> ir.Value:
    """Returns a buffer with a value written to row `counter`."""
    shape = shape_of(buffer)
    zero = build.splat(0, [], element_of(counter))
    update = build.reshape(value, [1, *shape[1:]])
    return build.update(buffer, update, [counter, *([zero] * (len(shape) - 1))])


@dataclass(frozen=True)
class GridResults:
    """Results of a loop over layers: `last[i]` is input i as its last iteration passes it on.

    `inputs` and `outputs` hold the inputs and outputs of each iteration, stacked in the order of
    the layers. If the microbatches are separate, all but sums have a leading dimension of
    microbatches.
    """

    last: dict[int, ir.Value]
    inputs: dict[int, ir.Value]
    outputs: dict[int, ir.Value]


@dataclass(frozen=True)
class GridLoop(_StageLoop):
    """A loop that keeps inputs and outputs of each run.

    `kept_inputs`, which are passed from run to run, and `kept_outputs` are stacked. `sums` are
    outputs that are added up over the microbatches.
    """

    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    sums: frozenset[int]
    reverse: bool

    def write(self, build: Builder) -> GridResults:
        """Writes the loop."""
        handed, others = self.handed, self.others
        # Two inputs that read the same stack share one carry.
        carried = list(dict.fromkeys(self.operands[number] for number in others))
        kept = [self.operands[number].value.type for number in self.kept_inputs]
        returned = self.dims.graph.root.returned
        kept += [part_type_of(self.dims, returned[n], self.samples) for n in self.kept_outputs]
        states = [self.operands[number].value for number in handed]
        states += [_empty(build, self.trips, type_) for type_ in kept]

        def body(inner: Builder, row: ir.Value, taken: Sequence[ir.Value]) -> list[ir.Value]:
            buffers = taken[len(handed) : len(states)]
            given = dict(zip(handed, taken, strict=False))
            slices = dict(zip(carried, taken[len(states) :], strict=True))
            given |= {number: slices[self.operands[number]] for number in others}
            made = self.run(given, inner)
            after = self.next_inputs(made, inner)
            rows = [given[number] for number in self.kept_inputs]
            rows += [made[number] for number in self.kept_outputs]
            pairs = zip(buffers, rows, strict=True)
            return after + [put_row(inner, buffer, value, row) for buffer, value in pairs]

        results = write_scan(build, self.trips, states, carried, body, reverse=self.reverse)
        return self._results(handed, results)

    def write_per_microbatch(
        self, build: Builder, count: int, batch: Collection[int]
    ) -> GridResults:
        """Writes the loop inside of a loop over `count` microbatches. The operands in `batch` hold
        all microbatches, stacked."""
        handed, graph = self.handed, self.dims.graph
        arguments = [graph.values[number].type for number in graph.root.arguments]
        returned = [graph.values[number].type for number in graph.root.returned]
        states = [_empty(build, count, arguments[number]) for number in handed]
        states += [_empty(build, count, arguments[n], self.trips) for n in self.kept_inputs]
        states += [
            _empty(build, self.trips, returned[number])
            if number in self.sums
            else _empty(build, count, returned[number], self.trips)
            for number in self.kept_outputs
        ]
        summed = [False] * (len(handed) + len(self.kept_inputs))
        summed += [number in self.sums for number in self.kept_outputs]

        def body(inner: Builder, row: ir.Value, taken: Sequence[ir.Value]) -> list[ir.Value]:
            made = self.on(taken[len(states) :]).write(inner)
            values = [made.last[number] for number in handed]
            values += [made.inputs[number] for number in self.kept_inputs]
            values += [made.outputs[number] for number in self.kept_outputs]
            return [
                inner.same("add", state, value) if is_sum else put_row(inner, state, value, row)
                for state, value, is_sum in zip(taken, values, summed, strict=False)
            ]

        outer = self.per_microbatch(batch)
        results = write_scan(build, count, states, outer, body, reverse=self.reverse)
        return self._results(handed, results)

    def _results(self, handed: Sequence[int], results: Sequence[ir.Value]) -> GridResults:
        stacks = results[len(handed) :]
        return GridResults(
            dict(zip(handed, results, strict=False)),
            dict(zip(self.kept_inputs, stacks, strict=False)),
            dict(zip(self.kept_outputs, stacks[len(self.kept_inputs) :], strict=True)),
        )


def _empty(build: Builder, count: int, type_: ir.Type, *inner: int) -> ir.Value:
    """Returns a stack of zeros to be written: `count` tensors of a type, or stacks of such
    tensors."""
    tensor = ir.RankedTensorType(type_)
    return build.splat(0, [count, *inner, *tensor.shape], tensor.element_type)
