"""Plans how a program for one device runs on many: the mesh, and how each argument is divided.

For each mesh, the search of `partition` also divides the arguments and results. It uses the model
of kernels, links and memory. If memory is short, the step is planned as a loop over microbatches,
too; if that is asked for, also as a pipeline. The target's compiler then times the best few plans,
and the least time decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stablehlo_tools.analysis.collectives import (
    find_collectives,
    meshes_of,
    stated_grid,
    tensor_bytes,
)
from stablehlo_tools.analysis.entry import argument_name, next_values, pair_by_type, path_of
from stablehlo_tools.analysis.replica_groups import AxisRef, DeviceMesh
from stablehlo_tools.analysis.shardings import (
    SHARDING,
    Dims,
    MeshAxes,
    ValueShardings,
    function_sharding,
)
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, size
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.gspmd_import import write_mesh
from stablehlo_tools.ir.shardy_round_trip import set_entries
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import MESH, entry_function, ops_named, ops_where
from stablehlo_tools.optimization.plan_forms import STAGE, StepForm, with_microbatches, with_stages
from stablehlo_tools.optimization.plan_request import MeshShape, PlanRequest, mesh_text
from stablehlo_tools.optimization.road import for_machine
from stablehlo_tools.passes.pipeline import Pipeline, run_pipeline
from stablehlo_tools.report.document import ProgramReport
from stablehlo_tools.report.exposure import AS_WRITTEN, Question, exposure
from stablehlo_tools.transforms.partition import choose_border_of, undivided_form
from stablehlo_tools.transforms.parts.partition.choosing.border_choices import BorderChoices
from stablehlo_tools.verify.exact.programs import drop_shardings

MESH_NAME = "mesh"
AXES = ("data", "model", "minor")  # the slow network first
_MOST_TRIED = 3  # plans that are compiled
_GAIN = 1.01  # a second axis has to be so much faster before other meshes are tried
_AN_AXIS = 0.005  # share of the time that one more axis has to gain
_ROOM = 0.9  # share of the memory that a plan may use by the model
_WORK = 80_000  # ops of all meshes together: a long program is tried on fewer
_FEWEST, _MOST = 2, 8  # meshes
_RECOMPUTE = "rematerialize"


class NoPlanError(ToolError):
    """No plan fits the memory."""


@dataclass(frozen=True)
class PlanCandidate:
    """A form of the step on a mesh, with its divisions.

    `report` is that of the compiler, or of the program as written, and `artifact` that program.
    `after` are passes that it also needs to fit.
    """

    form: StepForm
    mesh: MeshShape
    choices: BorderChoices
    report: ProgramReport | None = None
    artifact: Artifact | None = None
    after: str = ""
    refused: str = ""

    @property
    def modelled_ns(self) -> float:
        """The time by the model of the search."""
        return self.form.time_share * self.choices.ns

    @property
    def modelled_bytes(self) -> float:
        """The peak of a device by the model of the search."""
        held = self.choices.taken if self.form.recomputes else self.choices.held
        return held / self.form.stages

    @property
    def ns(self) -> float:
        """The time that ranks it: as compiled or written, else as modelled."""
        return self.modelled_ns if self.report is None else self.report.contended_ns

    @property
    def bytes(self) -> float:
        """The peak of a device, as compiled or written, else as modelled."""
        return self.modelled_bytes if self.report is None else self.report.peak_bytes

    @property
    def whole_mesh(self) -> MeshShape:
        """The mesh of all devices: that of a stage after the axis of the stages."""
        stages = ((STAGE, self.form.stages),) if self.form.stages > 1 else ()
        return (*stages, *self.mesh)


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
    first.

    `divided` is the planned step before its passes, in the global view.
    """

    artifact: Artifact
    divided: Artifact
    given: Artifact
    request: PlanRequest
    candidates: tuple[PlanCandidate, ...]
    arguments: tuple[ArgumentPlan, ...]
    seconds: float

    @property
    def best(self) -> PlanCandidate:
        """The chosen candidate."""
        return self.candidates[0]

    @property
    def passes(self) -> str:
        """The passes that the planned step has run."""
        return _passes(self.request, self.best)

    @property
    def gap(self) -> float:
        """By how much the best division of this form may be faster, by the model, as a share of its
        time: all kernels divided, nothing sent."""
        choices = self.best.choices
        return choices.ns / choices.least_ns - 1 if choices.least_ns else 0.0


def plan(
    artifact: Artifact, request: PlanRequest, watch: Callable[[str], None] = lambda _: None
) -> DevicePlan:
    """Chooses a mesh and the divisions of arguments and results for a program for one device.

    If the program is for these devices already, its mesh and the shardings of its arguments stay,
    and the rest is chosen. Raises ToolError for a program for other devices, for devices that fit
    no dimension, and if no plan fits the memory.
    """
    began = time.monotonic()
    artifact, request = _with_stated(artifact, request)
    _check(artifact, request)
    until = began + request.budget
    ranked = _judge_first(artifact, request, _candidates(artifact, request, watch), until, watch)
    if not _fits(ranked[0], request) and request.pipeline != "always":
        ranked = _add_microbatches(artifact, request, ranked, watch)
        ranked = _judge_first(artifact, request, ranked, until, watch)
    best = ranked[0]
    if best.artifact is None or best.bytes > request.limit:
        if best.refused and all(each.artifact is None for each in ranked):
            raise ToolError(best.refused)
        least = min(ranked, key=lambda each: each.bytes).bytes
        raise NoPlanError(
            f"no plan for {request.devices} devices fits: the least memory found is "
            f"{size(least)} a device, and the limit is {size(request.limit)}; more devices, or a "
            "smaller batch, make it smaller"
        )
    divided = write_plan(artifact, best)
    listed = tuple(_listed_arguments(artifact, divided, dict(best.whole_mesh)))
    seconds = time.monotonic() - began
    return DevicePlan(best.artifact, divided, artifact, request, tuple(ranked), listed, seconds)


def _with_stated(artifact: Artifact, request: PlanRequest) -> tuple[Artifact, PlanRequest]:
    """Returns a step for these devices without its mesh, and the request with its shardings."""
    meshes = [mesh for mesh in meshes_of(artifact.module).values() if mesh.size > 1]
    grid = stated_grid(artifact.module)
    if grid is None or grid.size != request.devices or len(meshes) != 1 or meshes[0].device_ids:
        return artifact, request
    main = entry_function(artifact.module)
    (mesh,) = meshes
    if request.axes and request.axes != mesh.axes:
        raise ToolError(
            f"the program has the mesh {mesh_text(mesh.axes)} already, not "
            f"{mesh_text(request.axes)}",
            added=("--replan",),
        )
    shardings = ValueShardings(MeshAxes(mesh), MESH_NAME)
    count = len(Function(main).body.arguments)
    given = {number: function_sharding(main, "arg_attrs", number) for number in range(count)}
    stated = {number: shardings.read(each) for number, each in given.items() if each is not None}
    return drop_plan(artifact), replace(request, axes=mesh.axes, stated=stated)


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
    if grid is not None and grid.size > 1:
        raise ToolError(
            f"the program is for {grid.size} devices already: plan needs a step that was exported "
            f"for one, or for {request.devices}",
            added=("--replan",),
        )
    if ops_named(artifact.module.operation, {MANUAL_COMPUTATION}):
        raise ToolError("the program has manual computations: it keeps its mesh")
    if find_collectives(artifact.module):
        raise ToolError("the program has collectives: plan needs a step for one device")


def _rank(candidate: PlanCandidate, memory: float) -> tuple[float, float]:
    simpler = 1 + _AN_AXIS * (len(candidate.whole_mesh) - 1)
    return max(0.0, candidate.bytes - memory), candidate.ns * simpler


def _candidates(
    artifact: Artifact, request: PlanRequest, watch: Callable[[str], None]
) -> list[PlanCandidate]:
    """Returns the divisions of the step over several meshes, by the model.

    If memory is short on all, also those of the step if it recomputes residuals."""
    found: list[PlanCandidate] = []
    if request.pipeline != "always":
        whole = StepForm(artifact)
        found += _on_meshes(whole, request, None, watch)
        # If memory is short, divisions that do not fit come first: see `choose_border`.
        again = replace(whole, recomputes=True)
        found += [replace(each, form=again) for each in _short(found, request)]
    if request.pipeline != "never":
        for form in with_stages(artifact, request):
            found += _on_meshes(form, request, None, watch)
    if not found:
        raise ToolError(
            "no pipeline was found: it needs a lax.scan over stacked weights, whose layers the "
            "stages divide, and a batch that is cut into microbatches; roll-layers makes such a "
            "loop of layers that are written out"
        )
    return found


def _add_microbatches(
    artifact: Artifact,
    request: PlanRequest,
    found: Sequence[PlanCandidate],
    watch: Callable[[str], None],
) -> list[PlanCandidate]:
    """Returns candidates with those of loops over more and more microbatches, until one fits."""
    few = [each.mesh for each in _short(found, request)]
    more = list(found)
    for form in with_microbatches(artifact):
        of_form = list(_on_meshes(form, request, few, watch))
        more += of_form
        if any(_is_roomy(each, request) for each in of_form):
            break
    return more


def _short(found: Sequence[PlanCandidate], request: PlanRequest) -> list[PlanCandidate]:
    """Returns the fastest divisions that do not fit, if that is so on every mesh."""
    short = [each for each in found if each.form.stages == 1 and not _is_roomy(each, request)]
    short.sort(key=lambda each: _rank(each, math.inf))
    meshes = list(dict.fromkeys(each.mesh for each in short))
    if len(meshes) < len({each.mesh for each in found if each.form.stages == 1}):
        return []
    return [each for each in short if each.mesh in meshes[:_FEWEST]]


def _is_roomy(candidate: PlanCandidate, request: PlanRequest) -> bool:
    return candidate.modelled_bytes <= _ROOM * request.limit


def _on_meshes(
    form: StepForm,
    request: PlanRequest,
    given: Sequence[MeshShape] | None,
    watch: Callable[[str], None],
) -> Iterator[PlanCandidate]:
    """Yields the divisions of a form of the step over meshes: the given ones, or all worth it."""
    divide, most = _divider(form, request)
    found: list[PlanCandidate] = []
    for mesh in given or _meshes(request, form, found):
        watch(f"dividing over {mesh_text(mesh)}{form.said}")
        for candidate in divide(mesh):
            # A second axis that divides nothing gives the plan of the first one again.
            if all(candidate.choices.divisions != each.choices.divisions for each in found):
                found.append(candidate)
                yield candidate
        most -= 1
        if not most:
            return


def _meshes(
    request: PlanRequest, form: StepForm, found: Sequence[PlanCandidate]
) -> Iterator[MeshShape]:
    """Yields the meshes to try: one axis, two divided where the fast network ends; if the second
    one gains, others of two, and of three."""
    devices = request.devices // form.stages
    if request.axes:
        yield tuple(axis for axis in request.axes if axis[0] != STAGE)
        return
    yield ((AXES[0], devices),)
    # Collectives within the fast network are many times as fast, so an axis should end there.
    fast = request.hardware.networks[0].devices or 0
    inner = [number for number in range(2, devices) if devices % number == 0]
    inner.sort(key=lambda each: (each != fast, abs(math.log(each * each / devices)), each))
    for number, fastest in enumerate(inner):
        yield ((AXES[0], devices // fastest), (AXES[1], fastest))
        if not number and _GAIN * found[-1].choices.ns > found[0].choices.ns:
            return
    if inner:
        (_, slow), (_, quick) = min(found[1:], key=lambda each: each.choices.ns).mesh
        for sizes in (*((slow, *each) for each in _halves(quick)), *_halves(slow, quick)):
            yield tuple(zip(AXES, sizes, strict=True))


def _halves(count: int, *rest: int) -> Iterator[tuple[int, ...]]:
    """Yields a number as the product of its smallest factor and another one, if it has two."""
    factor = next(number for number in range(2, count + 1) if count % number == 0)
    if factor < count:
        yield (count // factor, factor, *rest)


def _divider(
    form: StepForm, request: PlanRequest
) -> tuple[Callable[[MeshShape], list[PlanCandidate]], int]:
    """Returns a function that divides a step over a mesh, by the model, and how many meshes are
    worth the time."""
    copy = form.program.copy()
    _state_mesh(copy.module, ((MESH_NAME, request.devices),))
    program = undivided_form(copy.module)
    main = entry_function(program)
    # Without donation, a result of an argument's type is taken for its next value.
    arrays = [n for n, each in enumerate(Function(main).body.arguments) if shape_of(each)]
    ties = next_values(main) or pair_by_type(main, arrays)
    pins = {**request.stated, **_pins(entry_function(form.program.module), request.keep)}
    room = _ROOM * request.limit * form.stages

    def divide(mesh: MeshShape) -> list[PlanCandidate]:
        devices = DeviceMesh(mesh)
        found = choose_border_of(program, devices, request.hardware, room, ties, pins)
        return [PlanCandidate(form, mesh, choices) for choices in found]

    return divide, max(_FEWEST, min(_MOST, _WORK // len(ops_where(main, lambda _: True))))


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


def _judge_first(
    artifact: Artifact,
    request: PlanRequest,
    candidates: Sequence[PlanCandidate],
    until: float,
    watch: Callable[[str], None],
) -> list[PlanCandidate]:
    """Returns the candidates, best first: the target's compiler times the first few.

    Without one, they are timed as written, until one fits."""
    compiles = bool(request.target) and request.budget > 0
    ranked = sorted(candidates, key=lambda each: _rank(each, request.limit))
    judged: list[PlanCandidate] = []
    untried = [each for each in ranked if each.report is None]
    for candidate in untried[:_MOST_TRIED]:
        left = until - time.monotonic()
        if judged and (left <= 0 if compiles else _fits(judged[-1], request)):
            break
        told = mesh_text(candidate.whole_mesh) + candidate.form.said
        watch(f"compiling for {told}" if compiles else f"writing the step for {told}")
        judged.append(
            _time_candidate(artifact, request, candidate, max(left, 1.0) if compiles else 0.0)
        )
    kept = [each for each in ranked if each.report is not None]
    return sorted(
        [*judged, *kept, *untried[len(judged) :]],
        key=lambda each: (each.artifact is None, *_rank(each, request.limit)),
    )


def _fits(candidate: PlanCandidate, request: PlanRequest) -> bool:
    return candidate.report is not None and candidate.bytes <= request.limit


def _time_candidate(
    artifact: Artifact, request: PlanRequest, candidate: PlanCandidate, timeout: float
) -> PlanCandidate:
    """Returns a candidate with its program, timed by the target's compiler within `timeout`
    seconds, or as written if that is 0. Recomputes residuals if it does not fit."""
    timed, refused = candidate, ""
    for after in ("", _RECOMPUTE)[candidate.form.recomputes :]:
        try:
            built = build_plan(artifact, request, replace(candidate, after=after))
            report = time_program(built, request, timeout)
        except ToolError as error:
            refused = refused or error.diagnostic.message
            continue
        timed = replace(candidate, artifact=built, report=report, after=after)
        if _fits(timed, request):
            break
    return timed if timed.report else replace(candidate, refused=refused)


def build_plan(artifact: Artifact, request: PlanRequest, candidate: PlanCandidate) -> Artifact:
    """Returns the program of a candidate, after the passes of its form and of the request."""
    planned = write_plan(artifact, candidate)
    if passes := _passes(request, candidate):
        run_pipeline(planned, Pipeline.parse(passes))
    return planned


def _passes(request: PlanRequest, candidate: PlanCandidate) -> str:
    texts = filter(None, (candidate.form.passes, request.passes, candidate.after))
    return ",".join(for_machine(text, request.machine) for text in texts)


def time_program(
    program: Artifact, request: PlanRequest, timeout: float, *, with_timeline: bool = False
) -> ProgramReport:
    """Times a program as the target schedules it within `timeout` seconds; as written if that is
    0."""
    target, limit = (request.target, timeout) if timeout else (AS_WRITTEN, math.inf)
    question = Question(request.hardware, (target,), timeout=limit, with_timeline=with_timeline)
    (report,) = exposure([program], question)
    return report


def write_plan(artifact: Artifact, candidate: PlanCandidate) -> Artifact:
    """Returns a copy of a program for the devices of a candidate, with its divisions."""
    copy = artifact.copy()
    mesh = candidate.whole_mesh
    _state_mesh(copy.module, mesh)
    main = entry_function(copy.module)
    shardings = ValueShardings(MeshAxes(DeviceMesh(mesh)), MESH_NAME)
    values = Function(main).body.arguments, Function(main).yields
    for side, listed, of_side in zip(
        ("arg_attrs", "res_attrs"), candidate.choices.divisions, values, strict=True
    ):
        stated: dict[int, ir.Attribute] = {}
        for number, (dims, value) in enumerate(zip(listed, of_side, strict=True)):
            if tuple(shape_of(value)) in candidate.form.stacks:
                dims = ((AxisRef(STAGE), *dims[0]), *dims[1:])  # noqa: PLW2901
            stated[number] = shardings.attribute(dims, main.context)
        set_entries(main, side, SHARDING, stated)
    exported = copy.exported
    # `to_exported` states the shardings of a program for several devices by those of its module.
    if exported is not None:
        exported = replace(exported, nr_devices=math.prod(count for _, count in mesh))
    return replace(copy, exported=exported)


def _listed_arguments(
    given: Artifact, divided: Artifact, sizes: Mapping[str, int]
) -> Iterator[ArgumentPlan]:
    main = entry_function(divided.module)
    shardings = ValueShardings(MeshAxes(DeviceMesh(tuple(sizes.items()))), MESH_NAME)
    for number, argument in enumerate(Function(entry_function(given.module)).body.arguments):
        stated = function_sharding(main, "arg_attrs", number)
        assert stated is not None, "`write_plan` states all"
        dims = shardings.read(stated)
        parts = math.prod(sizes[axis.name] for axes in dims for axis in axes)
        whole = tensor_bytes(ir.RankedTensorType(argument.type)) or 0
        name = path_of(argument) or argument_name(argument)
        yield ArgumentPlan(name, str(argument.type), dims, whole / parts)


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
