"""Plans how a program for one device runs on many: the mesh, and how each argument is divided.

For each mesh of up to two axes, the search of `partition` also divides the arguments and results.
It uses the model of kernels, links and memory. The target's compiler then times the best few plans,
after `partition` and `create-reduce-scatter`, and the least time decides.
"""

from __future__ import annotations

import ast
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stablehlo_tools.analysis.collectives import find_collectives, stated_grid, tensor_bytes
from stablehlo_tools.analysis.entry import argument_name, next_values, pair_by_type, path_of
from stablehlo_tools.analysis.replica_groups import AxisRef, DeviceMesh
from stablehlo_tools.analysis.shardings import SHARDING, Dims, MeshAxes, ValueShardings
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.diagnostics import ToolError, size
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.gspmd_import import write_mesh
from stablehlo_tools.ir.shardy_round_trip import set_entry
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import MESH, entry_function, ops_named
from stablehlo_tools.passes.pipeline import Pipeline, run_pipeline
from stablehlo_tools.report.document import ProgramReport
from stablehlo_tools.report.exposure import AS_WRITTEN, Question, exposure
from stablehlo_tools.transforms.partition import choose_border_of
from stablehlo_tools.transforms.parts.partition.choosing.border_choices import BorderChoices
from stablehlo_tools.verify.exact.programs import drop_shardings

MESH_NAME = "mesh"
AXES = ("data", "model")  # the slow network first
_MOST_TRIED = 3  # plans that are compiled
_NEAR = 1.01  # other meshes of two axes are tried if the natural one is at most so much slower
_AN_AXIS = 0.005  # share of the time that one more axis has to gain
_ROOM = 0.9  # share of the memory that a plan may use by the model
PIPELINE = "partition,create-reduce-scatter"

MeshShape = tuple[tuple[str, int], ...]


class NoPlanError(ToolError):
    """No plan fits the memory."""


@dataclass(frozen=True)
class PlanRequest:
    """The cluster, and the parts of the plan that are given.

    `memory`: bytes of a device (default: those of the hardware). `axes`: the only mesh to consider.
    `keep`: the division of arguments by path, over these axes. `target`: the compiler that decides,
    within `budget` seconds; "" or 0: the model decides.
    """

    hardware: Hardware
    devices: int
    memory: float | None = None
    axes: MeshShape = ()
    keep: Mapping[str, Dims] = field(default_factory=dict[str, Dims])
    target: str = ""
    budget: float = 0.0

    @property
    def limit(self) -> float:
        """The memory limit in bytes of a device."""
        return self.memory or self.hardware.memory_bytes


@dataclass(frozen=True)
class PlanCandidate:
    """A mesh with its divisions. `report` is that of the compiler, if it was asked."""

    mesh: MeshShape
    choices: BorderChoices
    report: ProgramReport | None = None
    refused: str = ""

    @property
    def ns(self) -> float:
        """The time that ranks it: as compiled, else as modelled."""
        return self.choices.ns if self.report is None else self.report.contended_ns

    @property
    def bytes(self) -> float:
        """The peak of a device, as compiled, else as modelled."""
        return self.choices.held if self.report is None else self.report.peak_bytes


@dataclass(frozen=True)
class ArgumentPlan:
    """One argument: its name, type, division, and its bytes on a device."""

    name: str
    type: str
    dims: Dims
    bytes: float


@dataclass(frozen=True)
class DevicePlan:
    """The planned artifact, the given one, the division of each argument, and the candidates, best
    first."""

    artifact: Artifact
    given: Artifact
    request: PlanRequest
    candidates: tuple[PlanCandidate, ...]
    arguments: tuple[ArgumentPlan, ...]
    seconds: float

    @property
    def best(self) -> PlanCandidate:
        """The chosen candidate."""
        return self.candidates[0]


def plan(
    artifact: Artifact, request: PlanRequest, watch: Callable[[str], None] = lambda _: None
) -> DevicePlan:
    """Chooses a mesh and the divisions of arguments and results for a program for one device.

    Raises ToolError for a program that is divided already, for devices that fit no dimension, and
    if no plan fits the memory.
    """
    began = time.monotonic()
    _check(artifact, request)
    memory = request.limit
    candidates: list[PlanCandidate] = []
    for mesh in _meshes(request, candidates):
        watch(f"dividing over {mesh_text(mesh)}")
        found = _divide(artifact, request, mesh)
        # A second axis that divides nothing gives the plan of the first one again.
        if all(found.choices.divisions != each.choices.divisions for each in candidates):
            candidates.append(found)
    ranked = sorted(candidates, key=lambda each: _rank(each, memory))
    if request.target and request.budget > 0:
        ranked[:_MOST_TRIED] = sorted(
            _compile_candidates(
                artifact, request, ranked[:_MOST_TRIED], began + request.budget, watch
            ),
            key=lambda each: (each.report is None, *_rank(each, memory)),
        )
    if ranked[0].report is None and ranked[0].bytes > memory:
        # The model counts values that are updated in place twice: count them in the real program.
        watch("counting the memory")
        ranked[:_MOST_TRIED] = sorted(
            (
                replace(each, report=time_candidate(artifact, request, each, AS_WRITTEN, math.inf))
                for each in ranked[:_MOST_TRIED]
            ),
            key=lambda each: _rank(each, memory),
        )
    best = ranked[0]
    if best.bytes > memory:
        least = min(ranked, key=lambda each: each.bytes).bytes
        raise NoPlanError(
            f"no plan for {request.devices} devices fits: the least memory found is "
            f"{size(least)} a device, and the limit is {size(memory)}; more devices, "
            "accumulate-gradients and rematerialize make it smaller"
        )
    sizes = dict(best.mesh)
    listed: list[ArgumentPlan] = []
    arguments = Function(entry_function(artifact.module)).body.arguments
    for argument, dims in zip(arguments, best.choices.arguments, strict=True):
        parts = math.prod(sizes[axis.name] for axes in dims for axis in axes)
        whole = tensor_bytes(ir.RankedTensorType(argument.type)) or 0
        name = path_of(argument) or argument_name(argument)
        listed.append(ArgumentPlan(name, str(argument.type), dims, whole / parts))
    seconds = time.monotonic() - began
    planned = write_plan(artifact, best)
    return DevicePlan(planned, artifact, request, tuple(ranked), tuple(listed), seconds)


def _check(artifact: Artifact, request: PlanRequest) -> None:
    if request.devices < 2:
        raise ToolError("a step on one device needs no plan: give two devices or more")
    product = math.prod(count for _, count in request.axes)
    if request.axes and product != request.devices:
        raise ToolError(
            f"the axes {mesh_text(request.axes)} have {product} devices, not {request.devices}",
            instead=(str(request.devices), str(product)),
        )
    if request.keep and not request.axes:
        raise ToolError("--keep names axes: give them, as in --axes data=8,model=8")
    grid = stated_grid(artifact.module)
    many = grid is not None and grid.size > 1
    if many or ops_named(artifact.module.operation, {MANUAL_COMPUTATION}):
        raise ToolError(
            "the program is for several devices already: plan needs a step that was exported for "
            "one, without shardings",
            added=("--replan",),
        )
    if find_collectives(artifact.module):
        raise ToolError("the program has collectives: plan needs a step for one device")


def _rank(candidate: PlanCandidate, memory: float) -> tuple[float, float]:
    simpler = 1 + _AN_AXIS * (len(candidate.mesh) - 1)
    return max(0.0, candidate.bytes - memory), candidate.ns * simpler


def _meshes(request: PlanRequest, found: Sequence[PlanCandidate]) -> Iterator[MeshShape]:
    """Yields the meshes to try: one axis, two divided where the fast network ends, and others."""
    devices = request.devices
    if request.axes:
        yield request.axes
        return
    yield ((AXES[0], devices),)
    # Collectives within the fast network are many times as fast, so an axis should end there.
    fast = request.hardware.networks[0].devices or 0
    inner = [number for number in range(2, devices) if devices % number == 0]
    inner.sort(key=lambda each: (each != fast, abs(math.log(each * each / devices)), each))
    for number, fastest in enumerate(inner):
        if number and found[-1].choices.ns > _NEAR * min(each.choices.ns for each in found):
            return
        yield ((AXES[0], devices // fastest), (AXES[1], fastest))


def _divide(artifact: Artifact, request: PlanRequest, mesh: MeshShape) -> PlanCandidate:
    """Divides a copy of a program over one mesh, by the model."""
    copy = artifact.copy()
    _state_mesh(copy.module, mesh)
    main = entry_function(copy.module)
    # Without donation, a result of an argument's type is taken for its next value.
    arrays = [n for n, each in enumerate(Function(main).body.arguments) if shape_of(each)]
    ties = next_values(main) or pair_by_type(main, arrays)
    pins = _pins(main, request.keep)
    room = _ROOM * request.limit
    choices = choose_border_of(copy.module, request.hardware, room, ties, pins)
    return PlanCandidate(mesh, choices)


def _state_mesh(module: ir.Module, mesh: MeshShape) -> None:
    devices = math.prod(count for _, count in mesh)
    number = ir.IntegerAttr.get(ir.IntegerType.get_signless(32, module.context), devices)
    module.operation.attributes["mhlo.num_partitions"] = number
    for op in list(module.body.operations):
        if op.operation.name == MESH:
            op.operation.erase()
    write_mesh(module, MESH_NAME, mesh)


def _pins(main: ir.Operation, keep: Mapping[str, Dims]) -> dict[int, Dims]:
    paths = {path_of(each): n for n, each in enumerate(Function(main).body.arguments)}
    for path in keep:
        if path not in paths:
            raise ToolError(f"no argument is called {path!r}; they are: {', '.join(paths)}")
    pins: dict[int, Dims] = {}
    # A PartitionSpec may leave out its last entries.
    for path, dims in keep.items():
        rank = len(shape_of(Function(main).body.arguments[paths[path]]))
        if len(dims) > rank:
            raise ToolError(f"--keep {path}: {len(dims)} entries for {rank} dimensions")
        pins[paths[path]] = (*dims, *((),) * (rank - len(dims)))
    return pins


def _compile_candidates(
    artifact: Artifact,
    request: PlanRequest,
    candidates: Sequence[PlanCandidate],
    until: float,
    watch: Callable[[str], None],
) -> Iterator[PlanCandidate]:
    """Yields candidates with the schedule of the target's compiler; as they are after `until`."""
    for candidate in candidates:
        left = until - time.monotonic()
        if left <= 0:
            yield candidate
            continue
        watch(f"compiling for {mesh_text(candidate.mesh)}")
        try:
            report = time_candidate(artifact, request, candidate, request.target, left)
            yield replace(candidate, report=report)
        except ToolError as error:
            yield replace(candidate, refused=error.diagnostic.message)


def time_candidate(
    artifact: Artifact,
    request: PlanRequest,
    candidate: PlanCandidate,
    target: str,
    timeout: float,
    *,
    with_timeline: bool = False,
) -> ProgramReport:
    """Partitions a candidate and times it, as a target schedules it or as written."""
    planned = write_plan(artifact, candidate)
    pipeline = PIPELINE.replace("partition", f"partition{{hardware={request.hardware.name}}}")
    run_pipeline(planned, Pipeline.parse(pipeline))
    question = Question(request.hardware, (target,), timeout=timeout, with_timeline=with_timeline)
    (report,) = exposure([planned], question)
    return report


def write_plan(artifact: Artifact, candidate: PlanCandidate) -> Artifact:
    """Returns a copy of a program for the devices of a candidate, with its divisions."""
    copy = artifact.copy()
    _state_mesh(copy.module, candidate.mesh)
    main = entry_function(copy.module)
    shardings = ValueShardings(MeshAxes(DeviceMesh(candidate.mesh)), MESH_NAME)
    for side, listed in zip(("arg_attrs", "res_attrs"), candidate.choices.divisions, strict=True):
        for number, dims in enumerate(listed):
            set_entry(main, side, number, SHARDING, shardings.attribute(dims, main.context))
    exported = copy.exported
    # `to_exported` states the shardings of a program for several devices by those of its module.
    if exported is not None:
        exported = replace(exported, nr_devices=math.prod(count for _, count in candidate.mesh))
    return replace(copy, exported=exported)


def drop_plan(artifact: Artifact) -> Artifact:
    """Returns a copy of a program without mesh and shardings. Raises ToolError if it has manual
    computations or collectives, whose values differ from device to device."""
    copy = artifact.copy()
    if drop_shardings(copy.module, 1) != 1 or ops_named(
        copy.module.operation, {MANUAL_COMPUTATION}
    ):
        raise ToolError("the program has manual computations or collectives: it keeps its mesh")
    exported = copy.exported
    if exported is None:
        return copy
    none: Any = {
        "_in_named_shardings": (None,) * len(exported.in_avals),
        "_out_named_shardings": (None,) * len(exported.out_avals),
    }
    return replace(copy, exported=replace(exported, nr_devices=1, **none))


def parse_specs(texts: Sequence[str], axes: MeshShape) -> dict[str, Dims]:
    """Parses texts such as `state['w']=P(None, 'model')`. Raises ToolError."""
    found: dict[str, Dims] = {}
    names = [name for name, _ in axes]
    for text in texts:
        path, _, spec = text.rpartition("=P")
        try:
            entries = ast.literal_eval(f"({spec[1:-1]},)" if spec[1:-1] else "()")
            parts = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]
        except (ValueError, SyntaxError, TypeError):
            raise ToolError(f"--keep {text}: not PATH=P(…), as in batch=P('data')") from None
        unknown = [axis for part in parts for axis in part if axis not in names]
        if not path or unknown:
            why = f"no axis is called {unknown[0]!r}" if unknown else "not PATH=P(…)"
            raise ToolError(f"--keep {text}: {why}; axes: {', '.join(names) or 'none'}")
        found[path] = tuple(tuple(AxisRef(axis) for axis in part) for part in parts)
    return found


def spec_text(dims: Dims) -> str:
    """Returns a division as jax writes it: `P(None, ('data', 'model'))`."""

    def entry(axes: Sequence[AxisRef]) -> str:
        names = [repr(axis.name) for axis in axes]
        return "None" if not names else names[0] if len(names) == 1 else f"({', '.join(names)})"

    entries = [entry(axes) for axes in dims]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"


def mesh_text(mesh: MeshShape) -> str:
    """Returns a mesh as text: `data 8 x model 8`."""
    return " x ".join(f"{name} {count}" for name, count in mesh)
