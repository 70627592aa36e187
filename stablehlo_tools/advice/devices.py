"""Detects devices that compute too little: repeated compute along an axis, and small kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stablehlo_tools.advice.advised_program import AdvisedProgram
from stablehlo_tools.advice.collective_uses import argument_behind
from stablehlo_tools.advice.compiler_effects import Path, Place
from stablehlo_tools.analysis.entry import is_per_device
from stablehlo_tools.analysis.replica_groups import AxisRef, DeviceMesh, mesh_axes_groups
from stablehlo_tools.analysis.shardings import sharding_axes
from stablehlo_tools.analysis.tasks.graph import TracedGraph
from stablehlo_tools.analysis.tasks.op_work import bytes_of, op_work, short_name
from stablehlo_tools.analysis.uniformity import Uniformity
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.kernels import KernelWork, Matmul, WorkKind
from stablehlo_tools.diagnostics import duration
from stablehlo_tools.dialect.names import SHARDING_CONSTRAINT, WHILE
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import enclosing, entry_function, ops_named
from stablehlo_tools.overlap.bounds import iterations
from stablehlo_tools.report.document import Advice

_CONTRACTIONS = ops_with(Trait.CONTRACTION)
_MOST_FOLLOWED = 64  # ops between a product and the constraint on its operands
_FEW = 256  # rows of a product: with these or fewer, a matrix unit idles or waits for weights


@dataclass(frozen=True, slots=True)
class ProductKernel:
    """A kernel with a matrix product: its place, its number of runs, and the ns of one."""

    place: Place
    op: ir.Operation
    times: int
    each_ns: float

    @property
    def ns(self) -> float:
        """The time of all runs."""
        return self.times * self.each_ns


def products_of(traced: TracedGraph, path: Path = (), times: int = 1) -> Iterator[ProductKernel]:
    """Yields the kernels with matrix products of a program, also those in loops."""
    for task in traced.graph.tasks:
        if task.loop is not None:
            runs = times * iterations(task.loop)
            yield from products_of(traced.bodies[task.id], (*path, task.id), runs)
        for op in traced.ops[task.id]:
            if op.name in _CONTRACTIONS and task.ns:
                yield ProductKernel((path, task.id), op, times, task.ns)
                break


def repeated_compute(program: AdvisedProgram) -> Iterator[Advice]:
    """Detects products that all devices of an axis compute identically.

    The batch is too small for the mesh, a dimension does not divide, or values are replicated.
    """
    products = list(products_of(program.traced))
    mesh = next((m for m in program.facts.meshes.values() if m.size == program.clock.devices), None)
    if mesh is None or not program.is_worth(sum(each.ns for each in products)):
        return
    module = program.explicit.module
    main = entry_function(module)
    uniformity = Uniformity(module, program.facts, range(program.facts.grid.size))
    uniformity.bind_arguments(main, is_per_device(module), None)
    uniformity.block(Function(main).body)
    for name, devices in mesh.axes:
        groups = mesh_axes_groups(mesh, [AxisRef(name)])
        alike: list[ProductKernel] = []
        for product in products if devices > 1 else ():
            classes = uniformity.variation_of(product.op.results[0]).classes
            if all(len({classes[device] for device in group}) == 1 for group in groups):
                alike.append(product)
        if not program.is_worth(sum(each.ns for each in alike) * (1 - 1 / devices)):
            continue
        shared = {each.place: each.each_ns / devices for each in alike}
        gain = program.total_ns - program.retimed_ns(shared)
        if program.is_worth(gain):
            yield _repetition_advice(program, mesh, name, alike, gain)


def _repetition_advice(
    program: AdvisedProgram, mesh: DeviceMesh, axis: str, alike: list[ProductKernel], gain: float
) -> Advice:
    devices = dict(mesh.axes)[axis]
    first = max(alike, key=lambda each: each.ns)
    cause = (
        f"all {devices} devices of {axis} compute the same {len(alike)} matrix products, "
        f"{duration(sum(each.ns for each in alike))} in all"
    )
    constraint = _constraint_without(program, first.op, axis)
    if constraint is not None:
        cause += f"; the constraint at {program.place(constraint)} does not divide over {axis}"
    stages = ""
    if enclosing(first.op, WHILE) is not None:
        stages = f", or make its layers stages of a pipeline: expand-pipeline{{axis={axis}}}"
    return program.advice(
        "computed-alike",
        gain,
        cause,
        program.place(first.op),
        f"also divide the batch or these weights over {axis} (the batch must be a multiple of all "
        f"devices it is divided over), or give the devices of this axis to another{stages}",
    )


def _constraint_without(
    program: AdvisedProgram, op: ir.Operation, axis: str
) -> ir.Operation | None:
    """Returns the nearest constraint on the op's operands in the given program.

    None if it names the axis, or without a constraint.
    """
    location = str(op.location)
    named = ops_named(program.given.module.operation, frozenset({op.name}))
    ops = [each for each in named if str(each.location) == location]
    seen = set(ops)
    for user in ops:  # grows during the loop
        for maker in filter(None, map(producer, user.operands)):
            if maker.name == SHARDING_CONSTRAINT:
                axes = sharding_axes(maker.attributes["sharding"])[1]
                return None if axis in axes else maker
            if maker not in seen and len(ops) < _MOST_FOLLOWED:
                seen.add(maker)
                ops.append(maker)
    return None


def small_kernels(program: AdvisedProgram) -> Iterator[Advice]:
    """Detects products of weights with so few rows that twice as many would take little longer."""
    few = [(each, ns) for each in products_of(program.traced) if (ns := _doubled_ns(program, each))]
    spared = {each.place: min(each.each_ns, ns / 2) for each, ns in few}
    if not program.is_worth(sum(each.ns - each.times * spared[each.place] for each, _ in few)):
        return
    gain = program.total_ns - program.retimed_ns(spared)
    if not program.is_worth(gain):
        return
    first = max((each for each, _ in few), key=lambda each: each.ns)
    yield program.advice(
        "small-batch",
        gain,
        f"{len(few)} products of weights have at most {_FEW} rows on a device, "
        f"{duration(sum(each.ns for each, _ in few))} in all",
        program.place(first.op),
        "give each device twice the samples, by a larger batch or fewer devices; the gain is for "
        "the present number of samples",
    )


def _doubled_ns(program: AdvisedProgram, product: ProductKernel) -> float | None:
    """Returns the ns of a run with twice the rows; None unless it has weights and few rows."""
    work = op_work(product.op, short_name(product.op))
    matmul = work.matmul
    if matmul is None or matmul.batch > 1:
        return None
    of_weights = [argument_behind(value) is not None for value in product.op.operands[:2]]
    if of_weights not in ([False, True], [True, False]):
        return None
    rows, count = ("m", matmul.m) if of_weights[1] else ("n", matmul.n)
    if count > _FEW:
        return None
    doubled: Matmul = replace(matmul, **{rows: 2 * count})
    values = [*product.op.operands[:2], product.op.results[0]]
    weights = of_weights.index(True)
    read = sum(bytes_of(value) * (1 if i == weights else 2) for i, value in enumerate(values))
    return program.clock.kernel(KernelWork(WorkKind.MATMUL, read, 0.0, (doubled,), work.dtype), ())
