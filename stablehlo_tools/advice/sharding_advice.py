"""Detects values that a partitioner divides in an unintended way, and the constraint they lack.

If weights and activations are divided along one axis (FSDP), propagation must choose in each layer
which of them to gather. Nothing in a loop keeps the batch divided. To time a constraint, it is
added to the given program, which is partitioned again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from stablehlo_tools.advice.advised_program import AdvisedProgram
from stablehlo_tools.advice.collective_uses import argument_behind
from stablehlo_tools.analysis.partitioner_work import EXPLICIT, left_to_the_partitioner
from stablehlo_tools.analysis.sharding_import import import_shardings
from stablehlo_tools.analysis.shardings import Axes
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Place, ToolError, duration, frames_of, size
from stablehlo_tools.dialect.names import RESHARD, SHARDING_CONSTRAINT
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.values import is_float
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import ops_named
from stablehlo_tools.report.document import Advice
from stablehlo_tools.transforms.constrain_batch import (
    BatchCarry,
    batch_carries,
    batch_of,
    constrain,
    constrain_carry,
)

_ASKING = frozenset({SHARDING_CONSTRAINT, RESHARD})
_MOST_TRIED = 2  # each trial partitions the program again


def batch_gathered_in_loops(program: AdvisedProgram) -> Iterator[Advice]:
    """Detects carries of a layer loop that need a constraint to keep the batch divided."""
    if left_to_the_partitioner(program.given.module) is None:
        return
    if not program.is_worth(sum(each.exposed_ns for each in program.collectives if each.path)):
        return
    constrained: list[_Constrained] = []

    def constrain_all(module: ir.Module) -> None:
        import_shardings(module)
        inline_all_calls(module)
        batch = batch_of(module)
        if batch is not None:
            carries = batch_carries(module, batch)
            constrained.extend(
                _Constrained(
                    tuple(shape_of(carry.argument)),
                    carry.dim,
                    _spec_entry(batch.axes),
                    _line_in_body(carry),
                    "vmap(" in str(carry.loop.location),
                )
                for carry in carries
            )
            for carry in carries:
                constrain_carry(carry, batch)

    after = program.partitioned_after(constrain_all)
    if after is None or not constrained:
        return
    gain = program.total_ns - after.total_ns
    if not program.is_worth(gain):
        return
    before, now = program.simulation, after.simulation
    largest = max(constrained, key=lambda each: prod(each.shape))
    yield program.advice(
        "batch-gathered-in-loop",
        gain,
        f"the loop carries {'x'.join(map(str, largest.shape))}, and no constraint keeps its "
        f"batch, dimension {largest.dim}, divided over {largest.axes}: compute is "
        f"{duration(before.compute_ns)} and {duration(before.exposed_ns)} of collectives are "
        f"exposed; divided, {duration(now.compute_ns)} and {duration(now.exposed_ns)}",
        largest.line.render(program.given.name),
        largest.remedy,
        pipeline=f"constrain-batch,{EXPLICIT}",
        gain_bytes=max(0.0, program.peak_bytes - after.peak_bytes),
    )


@dataclass(frozen=True)
class _Constrained:
    """The properties of a carry that outlive its module; `axes` in the form of a PartitionSpec."""

    shape: tuple[int, ...]
    dim: int
    axes: str
    line: Place
    under_vmap: bool

    @property
    def remedy(self) -> str:
        """The constraint, as the user writes it."""
        spec = ["None"] * len(self.shape)
        spec[self.dim] = self.axes
        call = "x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P({})))".format
        text = f"{call(', '.join(spec))} on it, first in the loop's body"
        if not self.under_vmap:
            return text
        del spec[self.dim]
        return (
            f"{text}; if vmap makes that dimension: vmap(…, spmd_axis_name={self.axes}) and "
            f"{call(', '.join(spec))}"
        )


def reshards_not_asked_for(program: AdvisedProgram) -> Iterator[Advice]:
    """Detects activations that are moved because two ops want different shardings.

    The remedy constrains the batch at the most expensive of them.
    """
    if left_to_the_partitioner(program.given.module) is None:
        return
    asked = {str(op.location) for op in ops_named(program.given.module.operation, _ASKING)}
    moved = [
        each
        for each in program.collectives
        if not each.path  # in loops the carries are constrained
        and program.is_worth(each.exposed_ns)
        and str(each.op.location) not in asked
        and argument_behind(each.op.operands[0]) is None
    ]
    for each in sorted(moved, key=lambda each: -each.exposed_ns)[:_MOST_TRIED]:
        location = str(each.op.location)
        specs: list[str] = []
        after = program.partitioned_after(lambda m, at=location, of=specs: _pin(m, at, of))
        gain = 0.0 if after is None else program.total_ns - after.total_ns
        if not specs or not program.is_worth(gain):
            continue
        yield program.advice(
            "reshard-not-asked-for",
            gain,
            f"{each.sent.kind} of {size(each.sent.bytes)} over {','.join(each.sent.axes)}, "
            f"{duration(each.exposed_ns)} exposed, that the program does not request: shardings "
            "of neighbouring ops differ here, and no constraint keeps the batch divided",
            program.place(each.op),
            f"jax.lax.with_sharding_constraint(y, P({specs[0]})) on the result of this line",
        )


def _pin(module: ir.Module, location: str, specs: list[str]) -> None:
    """Constrains the batch in the results of the ops of a location; appends their specs to `specs`.

    Raises ToolError if no result contains the batch.
    """
    import_shardings(module)
    inline_all_calls(module)
    batch = batch_of(module)
    if batch is None:
        return
    graph = batch.dims.graph
    for op in [node.op for node in graph.nodes if str(node.op.location) == location]:
        for value in op.results:
            tiling = batch.dims.tilings.get(graph.numbers.get(value, -1))
            if tiling is None or tiling.outer != 1 or not is_float(value.type):
                continue
            constrain(value, tiling.dim, batch, ir.InsertionPoint.after(op))
            spec = ["None"] * len(shape_of(value))
            spec[tiling.dim] = _spec_entry(batch.axes)
            specs.append(", ".join(spec))
    if not specs:
        raise ToolError("no value of this location carries the batch")


def _line_in_body(carry: BatchCarry) -> Place:
    """Returns the user's line that first reads a carry, in the function that is the loop's body."""
    loop = frames_of(carry.loop.location)
    if not loop:
        return Place()
    start = (loop[0].file, loop[0].line, loop[0].function)
    read = {use.owner.operation for use in carry.argument.uses}
    ops = [view.operation for view in While(carry.loop).body.operations]
    for op in (*(op for op in ops if op in read), *ops):
        frames = frames_of(op.location)
        lines = [(at.file, at.line, at.function) for at in frames]
        depth = lines.index(start) if start in lines else 0
        if depth:
            return frames[depth - 1]
    return loop[0]


def _spec_entry(axes: Axes) -> str:
    """Returns axes in the form of a PartitionSpec."""
    names = [f'"{axis.name}"' for axis in axes]
    return names[0] if len(names) == 1 else f"({', '.join(names)})"
