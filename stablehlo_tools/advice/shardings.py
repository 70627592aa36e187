"""Values that a partitioner divides as nobody meant, and the constraint that says what is meant.

Where weights and activations are divided along one axis (FSDP), propagation has to choose in each
layer which of them to gather, and nothing in a loop says that the batch is to stay divided. The
constraint is tried: it is put into the program as it came, which is partitioned again and timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from stablehlo_tools.advice.program import Program
from stablehlo_tools.analysis.collectives import meshes_of
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims, Graph
from stablehlo_tools.analysis.dimension_propagation.seeds import Seeds, try_seeds
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.partitioner_work import Annotation, left_to_the_partitioner
from stablehlo_tools.analysis.shardings import Axes, MeshAxes, ValueShardings, axes_text
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Place, duration, frames_of
from stablehlo_tools.dialect.names import DYNAMIC_UPDATE_SLICE, SHARDING_CONSTRAINT, WHILE
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.values import is_float, producer
from stablehlo_tools.ir.walk import entry_function, ops_named
from stablehlo_tools.ir.while_loop import WhileLoop
from stablehlo_tools.report.document import Advice


@dataclass(frozen=True)
class Batch:
    """The dimension of each value that is the batch, and the mesh axes that divide it."""

    dims: BatchDims
    axes: Axes
    mesh: str


@dataclass(frozen=True)
class Carry:
    """A value that a loop carries, of which dimension `dim` is the batch."""

    loop: ir.Operation
    argument: ir.Value
    dim: int


def batch_gathered_in_loops(program: Program) -> Iterator[Advice]:
    """A constraint on what a loop over layers carries: the batch stays divided."""
    left = left_to_the_partitioner(program.given.module)
    in_loops = [each for each in program.collectives if each.path]
    if left is None or left.annotation is not Annotation.SHARDY:
        return
    if not program.is_worth(sum(each.exposed_ns for each in in_loops)):
        return
    constrained: list[_Constrained] = []

    def constrain(module: ir.Module) -> None:
        inline_all_calls(module)
        batch = batch_of(module)
        if batch is not None:
            carries = _carries(module, batch)
            constrained.extend(_described(carry, batch) for carry in carries)
            for carry in carries:
                _constrain(carry, batch)

    after = program.partitioned_after(constrain)
    if after is None or not constrained:
        return
    gain = program.total_ns - after.total_ns
    if not program.is_worth(gain):
        return
    now = [each for each in after.collectives if each.path]
    before_ns, after_ns = (sum(c.exposed_ns for c in every) for every in (in_loops, now))
    largest = max(constrained, key=lambda each: prod(each.shape))
    yield program.advice(
        "batch-gathered-in-loop",
        gain,
        f"nothing in the loop keeps the batch, dimension {largest.dim} of the "
        f"{'x'.join(map(str, largest.shape))} that it carries, divided over {largest.axes}: "
        f"{duration(before_ns)} of its collectives are exposed, {duration(after_ns)} if it is",
        largest.line.render(program.given.name),
        largest.remedy,
        gain_bytes=max(0.0, program.peak_bytes - after.peak_bytes),
    )


@dataclass(frozen=True)
class _Constrained:
    """What is said of a carry once its module is gone; `axes` as jax writes them in a spec."""

    shape: tuple[int, ...]
    dim: int
    axes: str
    line: Place
    under_vmap: bool

    @property
    def remedy(self) -> str:
        """The constraint as the user writes it."""
        spec = ["None"] * len(self.shape)
        spec[self.dim] = self.axes
        call = "x = jax.lax.with_sharding_constraint(x, P({}))".format
        text = f"{call(', '.join(spec))} on it, first in the loop's body"
        if not self.under_vmap:
            return text
        del spec[self.dim]
        return (
            f"{text}; if vmap makes that dimension: vmap(…, spmd_axis_name={self.axes}) and "
            f"{call(', '.join(spec))}"
        )


def _described(carry: Carry, batch: Batch) -> _Constrained:
    names = [f'"{axis.name}"' for axis in batch.axes]
    return _Constrained(
        tuple(shape_of(carry.argument)),
        carry.dim,
        names[0] if len(names) == 1 else f"({', '.join(names)})",
        _line_in_body(carry),
        "vmap(" in str(carry.loop.location),
    )


def batch_of(module: ir.Module) -> Batch | None:
    """The batch of a program for all devices, without calls: the divided arguments that it does not
    give back changed, integers first. None where no argument is."""
    main = entry_function(module)
    meshes = {name: mesh for name, mesh in meshes_of(module).items() if mesh.size > 1}
    if not meshes:
        return None
    name, mesh = next(iter(meshes.items()))
    shardings = ValueShardings(MeshAxes(mesh), name)
    graph = Graph.of(main.regions[0].blocks[0])
    returned = {graph.values[number].type for number in graph.root.returned}
    data = [n for n in graph.root.arguments if graph.values[n].type not in returned]
    for floats in (False, True):
        seeds: dict[Axes, Seeds] = {}
        for number in data:
            value = graph.values[number]
            if is_float(value.type) != floats or not isinstance(value.type, ir.RankedTensorType):
                continue
            for dim, axes in enumerate(shardings.of(value)):
                if axes and DimTiling(dim).fits(tuple(shape_of(value)), shardings.axes.size(axes)):
                    seeds.setdefault(axes, {})[number] = DimTiling(dim)
                    break
        if seeds:
            axes, chosen = max(seeds.items(), key=lambda pair: len(pair[1]))
            trial = try_seeds(graph, chosen, shardings.axes.size(axes), regroups=True)
            return Batch(trial.dims, axes, name)
    return None


def _carries(module: ir.Module, batch: Batch) -> list[Carry]:
    """What loops carry and change, in floats of two dimensions or more, with the batch in one."""
    carries: list[Carry] = []
    for op in ops_named(module.operation, {WHILE}):
        loop = WhileLoop(op)
        for number, argument in enumerate(loop.arguments):
            end = producer(loop.ends[number])
            stacked = end is not None and end.name == DYNAMIC_UPDATE_SLICE
            if number in loop.invariant or stacked or not is_float(argument.type):
                continue
            tiling = batch.dims.tilings.get(batch.dims.graph.numbers.get(argument, -1))
            if tiling is not None and tiling.outer == 1 and len(shape_of(argument)) > 1:
                carries.append(Carry(op, argument, tiling.dim))
    return carries


def _constrain(carry: Carry, batch: Batch) -> None:
    """Says of a carry, at the beginning of each iteration, that the batch is divided."""
    dims = ["{?}"] * len(shape_of(carry.argument))
    dims[carry.dim] = axes_text(batch.axes)
    block, context = carry.loop.regions[1].blocks[0], carry.loop.context
    text = f"#sdy.sharding<@{batch.mesh}, [{', '.join(dims)}]>"
    op = ir.Operation.create(
        SHARDING_CONSTRAINT,
        results=[carry.argument.type],
        operands=[carry.argument],
        attributes={"sharding": ir.Attribute.parse(text, context)},
        loc=carry.loop.location,
        ip=ir.InsertionPoint.at_block_begin(block),
    )
    carry.argument.replace_all_uses_except(op.results[0], op)


def _line_in_body(carry: Carry) -> Place:
    """The user's line, in the function that is the loop's body, that first reads a carry."""
    loop = frames_of(carry.loop.location)
    if not loop:
        return Place()
    read = {use.owner.operation for use in carry.argument.uses}
    ops = [view.operation for view in carry.loop.regions[1].blocks[0].operations]
    for op in (*(op for op in ops if op in read), *ops):
        frames = frames_of(op.location)
        depth = next((i for i, at in enumerate(frames) if _same_line(at, loop[0])), 0)
        if depth:
            return frames[depth - 1]
    return loop[0]


def _same_line(one: Place, other: Place) -> bool:
    return (one.file, one.line, one.function) == (other.file, other.line, other.function)
