"""The loop over layers that a grid of cells folds to, with what each of its iterations leaves.

    %out:3 = stablehlo.while(%weights, %h = %batch, %kept) {
      %new = stablehlo.dynamic_update_slice %kept, %h, %layer     // for the backward
      %y = stage(%weights[%layer], %h)
    }

A forward leaves what its backward takes of each layer, a backward the gradients of each. It goes
through the layers in reverse. Where the microbatches stay apart, a loop over them goes around it,
which adds up the gradients in the order in which the ticks did.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.transforms.parts.block_rewriter import part_type_of
from stablehlo_tools.transforms.parts.fold_pipeline.chains import Handoff
from stablehlo_tools.transforms.parts.fold_pipeline.composing import Composer, no_sources
from stablehlo_tools.transforms.parts.fold_pipeline.layers import (
    LayerOperand,
    put_row,
    write_scan,
)
from stablehlo_tools.transforms.parts.scaling import Scaling


@dataclass(frozen=True)
class GridResults:
    """What a loop over layers computed: `last[i]` is what its last iteration hands on as input i.

    `inputs` and `outputs` are what each iteration took and computed, stacked in the order of the
    layers. Where the microbatches stay apart, all but sums are stacked by microbatch, outside.
    """

    last: dict[int, ir.Value]
    inputs: dict[int, ir.Value]
    outputs: dict[int, ir.Value]


@dataclass(frozen=True)
class GridLoop:
    """A block that is run `trips` times, on `samples` of the batch that `dims` follows.

    `kept_inputs`, of those that are handed on, and `kept_outputs` are stacked; `sums` are outputs
    that are added up over the microbatches.
    """

    dims: BatchDims
    samples: int
    handoffs: tuple[Handoff, ...]
    operands: tuple[LayerOperand, ...]
    trips: int
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    sums: frozenset[int]
    reverse: bool

    def write(self, build: Builder) -> GridResults:
        """Writes the loop."""
        handed = [handoff.input for handoff in self.handoffs]
        others = [number for number in range(len(self.operands)) if number not in handed]
        # What two inputs take of one stack is carried once.
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
            made = Scaling(self.dims, self.samples).write_all(
                [given[number] for number in range(len(given))], inner.point
            )
            composer = Composer(inner, no_sources)
            after = [composer.through(made[h.output], h.ops) for h in self.handoffs]
            rows = [given[number] for number in self.kept_inputs]
            rows += [made[number] for number in self.kept_outputs]
            pairs = zip(buffers, rows, strict=True)
            return after + [put_row(inner, buffer, value, row) for buffer, value in pairs]

        results = write_scan(
            build,
            self.trips,
            states,
            carried,
            body,
            reverse=self.reverse,
        )
        return self._results(handed, results)

    def write_per_microbatch(
        self, build: Builder, count: int, batch: Collection[int]
    ) -> GridResults:
        """Writes a loop over `count` microbatches around it. The operands `batch` are those of all
        microbatches, stacked."""
        handed = [handoff.input for handoff in self.handoffs]
        graph = self.dims.graph
        returned = [graph.values[number] for number in graph.root.returned]
        own = [graph.values[graph.root.arguments[number]] for number in handed]
        states = [_empty(build, count, value.type) for value in own]
        for number in self.kept_inputs:
            value = graph.values[graph.root.arguments[number]]
            states.append(_empty(build, count, _stack_type(self.trips, value.type)))
        for number in self.kept_outputs:
            stack = _stack_type(self.trips, returned[number].type)
            sum_ = ir.RankedTensorType(stack)
            states.append(
                build.splat(0, sum_.shape, sum_.element_type)
                if number in self.sums
                else _empty(build, count, stack)
            )
        outer = [
            LayerOperand(operand.value, 0 if number in batch else None)
            for number, operand in enumerate(self.operands)
        ]
        summed = [False] * (len(handed) + len(self.kept_inputs))
        summed += [number in self.sums for number in self.kept_outputs]

        def body(inner: Builder, row: ir.Value, taken: Sequence[ir.Value]) -> list[ir.Value]:
            given = zip(self.operands, taken[len(states) :], strict=True)
            operands = tuple(replace(operand, value=value) for operand, value in given)
            made = replace(self, operands=operands).write(inner)
            values = [made.last[number] for number in handed]
            values += [made.inputs[number] for number in self.kept_inputs]
            values += [made.outputs[number] for number in self.kept_outputs]
            return [
                inner.same("add", state, value) if is_sum else put_row(inner, state, value, row)
                for state, value, is_sum in zip(taken, values, summed, strict=False)
            ]

        results = write_scan(build, count, states, outer, body, reverse=self.reverse)
        return self._results(handed, results)

    def _results(self, handed: Sequence[int], results: Sequence[ir.Value]) -> GridResults:
        stacks = results[len(handed) :]
        return GridResults(
            dict(zip(handed, results, strict=False)),
            dict(zip(self.kept_inputs, stacks, strict=False)),
            dict(zip(self.kept_outputs, stacks[len(self.kept_inputs) :], strict=True)),
        )


def _stack_type(count: int, type_: ir.Type) -> ir.Type:
    tensor = ir.RankedTensorType(type_)
    shape = [count, *tensor.shape]
    return ir.RankedTensorType.get(shape, tensor.element_type, loc=ir.Location.unknown())


def _empty(build: Builder, count: int, type_: ir.Type) -> ir.Value:
    """A stack of tensors of a type, which are to be written."""
    tensor = ir.RankedTensorType(type_)
    return build.splat(0, [count, *tensor.shape], tensor.element_type)
