"""Writes a loop over microbatches around the layers, where a stage needs each as a whole.

A stage that mixes the samples of a microbatch, with statistics over them for one, computes
something else for the whole batch: its microbatches stay apart, and follow each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.transforms.parts.fold_pipeline.layer_loop import Operand, Stage, write_loop


@dataclass(frozen=True)
class Microbatches:
    """`count` microbatches, one after the other through `trips` rounds of a stage.

    The operands `batch` of the stage are those of all microbatches, stacked.
    """

    stage: Stage
    count: int
    trips: int
    batch: Collection[int]

    def write(self, build: Builder, place: ir.InsertionPoint) -> list[ir.Value]:
        """Writes the loop; returns what the last stage computes, of all microbatches stacked."""
        operands = self.stage.operands
        graph = self.stage.dims.graph
        results = [graph.values[number] for number in graph.root.returned]
        buffers = [
            build.splat(0, [self.count, *shape_of(value)], element_of(value)) for value in results
        ]
        outer = [
            Operand(operand.value, 0 if number in self.batch else None)
            for number, operand in enumerate(operands)
        ]

        def body(
            inner: Builder, point: ir.InsertionPoint, counter: ir.Value, taken: Sequence[ir.Value]
        ) -> list[ir.Value]:
            own = taken[len(buffers) :]
            stage = replace(
                self.stage,
                operands=tuple(
                    replace(operand, value=value)
                    for operand, value in zip(operands, own, strict=True)
                ),
            )
            made = stage.write(inner, point, self.trips)
            return [
                _put(inner, buffer, value, counter)
                for buffer, value in zip(taken, made, strict=False)
            ]

        return write_loop(place, build, self.count, buffers, outer, body)


def _put(build: Builder, buffer: ir.Value, value: ir.Value, counter: ir.Value) -> ir.Value:
    shape = shape_of(buffer)
    zero = build.splat(0, [], element_of(counter))
    starts = [counter, *([zero] * (len(shape) - 1))]
    update = build.reshape(value, [1, *shape[1:]])
    return build.op("dynamic_update_slice", [buffer, update, *starts], buffer.type)
