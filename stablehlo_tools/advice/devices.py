"""Detects devices that compute too little: repeated compute along an axis, and small kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from stablehlo_tools.advice.advised_program import AdvisedProgram
from stablehlo_tools.advice.collective_uses import argument_behind
from stablehlo_tools.advice.compiler_effects import Path, Place
from stablehlo_tools.advice.updates import updates_of
from stablehlo_tools.analysis.entry import is_per_device
from stablehlo_tools.analysis.replica_groups import AxisRef, DeviceMesh, mesh_axes_groups
from stablehlo_tools.analysis.shardings import sharding_axes
from stablehlo_tools.analysis.tasks.graph import TracedGraph
from stablehlo_tools.analysis.tasks.op_work import bytes_of, library_call, op_work, short_name
from stablehlo_tools.analysis.uniformity import Uniformity
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.kernels import KernelWork, Matmul, WorkKind
from stablehlo_tools.cost.library_calls import Tensor, call_work, factorisation, is_qr
from stablehlo_tools.diagnostics import duration
from stablehlo_tools.dialect.custom_calls import called_target
from stablehlo_tools.dialect.names import ALL_GATHER, RESHAPE, SHARDING_CONSTRAINT, TRANSPOSE, WHILE
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import key_of, producer
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import enclosing, entry_function, ops_named
from stablehlo_tools.overlap.bounds import iterations
from stablehlo_tools.overlap.task_graph import TaskKind
from stablehlo_tools.report.document import Advice
from stablehlo_tools.report.schedule_table import count_text

_CONTRACTIONS = ops_with(Trait.CONTRACTION)
_LEAST_WEIGHTS = 0.05  # of the bytes of all arguments: optimizers hold several times as many
_MOST_FOLLOWED = 64  # ops between a product and the constraint on its operands
_FEW = 256  # rows of a product: with these or fewer, a matrix unit idles or waits for weights


@dataclass(frozen=True, slots=True)
class RepeatedKernel:
    """A kernel: its place, the op that it is named by, its number of runs, and the ns of one."""

    place: Place
    op: ir.Operation
    times: int
    each_ns: float

    @property
    def ns(self) -> float:
        """The time of all runs."""
        return self.times * self.each_ns

    @property
    def is_product(self) -> bool:
        """Returns True if it holds a matrix product."""
        return self.op.name in _CONTRACTIONS


def kernels_of(traced: TracedGraph, path: Path = (), times: int = 1) -> Iterator[RepeatedKernel]:
    """Yields the kernels of a program, also those in loops, named by a matrix product if any."""
    for task in traced.graph.tasks:
        if task.loop is not None:
            runs = times * iterations(task.loop)
            yield from kernels_of(traced.bodies[task.id], (*path, task.id), runs)
        ops = [op for op in traced.ops[task.id] if len(op.results)]
        if task.kind is TaskKind.COMPUTE and ops and task.ns:
            named = next((op for op in ops if op.name in _CONTRACTIONS), ops[-1])
            yield RepeatedKernel((path, task.id), named, times, task.ns)


def repeated_compute(program: AdvisedProgram) -> Iterator[Advice]:
    """Detects kernels that all devices of an axis compute identically.

    The batch is too small for the mesh, a dimension does not divide, or values are replicated.
    Updates of arguments are left to `replicated_optimizer`.
    """
    updates = set[ir.Value | ir.Operation]().union(*(each.ops for each in updates_of(program)))
    kernels = [each for each in kernels_of(program.traced) if key_of(each.op) not in updates]
    mesh = next((m for m in program.facts.meshes.values() if m.size == program.clock.devices), None)
    if mesh is None or not program.is_worth(sum(each.ns for each in kernels)):
        return
    module = program.explicit.module
    main = entry_function(module)
    devices = range(program.facts.grid.size)
    uniformity = Uniformity(module, program.facts, devices, repeatable=True)
    uniformity.bind_arguments(main, is_per_device(module), None)
    uniformity.block(Function(main).body)
    for name, devices in mesh.axes:
        groups = mesh_axes_groups(mesh, [AxisRef(name)])
        alike: list[RepeatedKernel] = []
        for kernel in kernels if devices > 1 else ():
            classes = uniformity.variation_of(kernel.op.results[0]).classes
            if all(len({classes[device] for device in group}) == 1 for group in groups):
                alike.append(kernel)
        shared = {each.place: _shared_ns(program, each, devices) for each in alike}
        gathers = {g: each.op for each in alike if (g := _gather_before(each.op)) is not None}
        for each in program.collectives:
            if each.op in gathers:  # TSQR gathers R instead
                rows, columns = shape_of(gathers[each.op].operands[0])[-2:]
                part = min(1.0, devices * columns / rows)
                shared[each.path, each.task] = program.transfer_ns(each, part)
        if not program.is_worth(sum(e.ns - e.times * shared[e.place] for e in alike)):
            continue
        gain = program.total_ns - program.retimed_ns(shared)
        if program.is_worth(gain):
            yield _repetition_advice(program, mesh, name, alike, gain)


def _repetition_advice(
    program: AdvisedProgram, mesh: DeviceMesh, axis: str, alike: list[RepeatedKernel], gain: float
) -> Advice:
    devices = dict(mesh.axes)[axis]
    first = max(alike, key=lambda each: each.ns)
    products = sum(each.is_product for each in alike)
    what = f"{len(alike)} kernels"
    if products == len(alike):
        what = f"{len(alike)} matrix products"
    elif products:
        what += f", {products} of them matrix products"
    cause = (
        f"all {devices} devices of {axis} compute the same {what}, "
        f"{duration(sum(each.ns for each in alike))} in all"
    )
    tall = [each.op for each in alike if _gather_before(each.op) is not None]
    if tall:
        rows, columns = shape_of(tall[0].operands[0])[-2:]
        return program.advice(
            "computed-alike",
            gain,
            f"{cause}; the QR of {rows} x {columns} is gathered for it",
            program.place(first.op),
            f"TSQR in a shard_map over {axis}: each device factors its {rows // devices} rows, and "
            f"all factor the {devices} gathered R of {columns} x {columns}; Q is the product of "
            "its own two",
        )
    constraint = _constraint_without(program, first.op, axis)
    if constraint is not None:
        cause += f"; the constraint at {program.place(constraint)} does not divide over {axis}"
    stages = ""
    if enclosing(first.op, WHILE) is not None and first.is_product:
        stages = f", or make its layers stages of a pipeline: expand-pipeline{{axis={axis}}}"
    remedy = (
        f"also divide the batch or these weights over {axis} (the batch must be a multiple of all "
        f"devices it is divided over), or give the devices of this axis to another{stages}"
        if first.is_product
        else f"divide the values of this line over {axis}, if its op allows that, or give the "
        "devices of this axis to another"
    )
    return program.advice("computed-alike", gain, cause, program.place(first.op), remedy)


def _shared_ns(program: AdvisedProgram, kernel: RepeatedKernel, devices: int) -> float:
    """Returns the ns of a run if the devices share the work of a kernel."""
    # No part of a kernel takes less than a launch.
    parted = max(kernel.each_ns / devices, program.clock.hardware.launch_ns)
    call = library_call(kernel.op, short_name(kernel.op))
    if factorisation(call.target) is not None and prod(shape_of(kernel.op.operands[0])[:-2]) <= 1:
        parted = kernel.each_ns  # the columns of one matrix wait for each other
        if (tall := _tall_qr(kernel.op)) is not None:
            rows, columns = tall
            matrix = call.operands[0]
            parts = (
                Tensor((part, columns), matrix.dtype, matrix.bytes * part / rows)
                for part in (rows // devices, devices * columns)
            )
            works = (call_work(replace(call, operands=[part], results=[])) for part in parts)
            parted = sum(program.clock.kernel(work, ()) for work in works if work is not None)
    return min(kernel.each_ns, parted)


def _gather_before(op: ir.Operation) -> ir.Operation | None:
    """Returns the all_gather that makes the matrix of a tall QR; None if another op makes it."""
    maker = producer(op.operands[0]) if _tall_qr(op) is not None else None
    while maker is not None and maker.name in (TRANSPOSE, RESHAPE):
        maker = producer(maker.operands[0])
    return maker if maker is not None and maker.name == ALL_GATHER else None


def _tall_qr(op: ir.Operation) -> tuple[int, int] | None:
    """Returns the rows and columns of a matrix with more rows, if an op is its QR, or makes Q."""
    if not is_qr(called_target(op)):
        return None
    rows, columns = shape_of(op.operands[0])[-2:]
    return (rows, columns) if rows > columns else None


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
    products = (each for each in kernels_of(program.traced) if each.is_product)
    few = [(each, ns) for each in products if (ns := _doubled_ns(program, each))]
    spared = {each.place: min(each.each_ns, ns / 2) for each, ns in few}
    if not program.is_worth(sum(each.ns - each.times * spared[each.place] for each, _ in few)):
        return
    gain = program.total_ns - program.retimed_ns(spared)
    if not program.is_worth(gain) or not _has_weights(program, [each.op for each, _ in few]):
        return
    first = max((each for each, _ in few), key=lambda each: each.ns)
    yield program.advice(
        "small-batch",
        gain,
        f"{count_text(len(few), 'product')} of weights with at most {_FEW} rows on a device, "
        f"{duration(sum(each.ns for each, _ in few))} in all",
        program.place(first.op),
        "give each device twice the samples, by a larger batch or fewer devices; the gain is for "
        "the present number of samples",
    )


def _has_weights(program: AdvisedProgram, products: Sequence[ir.Operation]) -> bool:
    """Returns True if the arguments of products are a good part of all arguments.

    A model's weights are; the small matrices of a simulation are not, and it has no samples.
    """
    arguments = Function(entry_function(program.explicit.module)).body.arguments
    found = {argument_behind(value) for op in products for value in op.operands[:2]}
    held = sum(bytes_of(value) for value in found if value is not None)
    return held >= _LEAST_WEIGHTS * sum(map(bytes_of, arguments))


def _doubled_ns(program: AdvisedProgram, product: RepeatedKernel) -> float | None:
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
