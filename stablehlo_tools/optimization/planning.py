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
from itertools import islice
from types import MappingProxyType
from typing import Any

from stablehlo_tools.analysis.collectives import (
    find_collectives,
    meshes_of,
    stated_grid,
    tensor_bytes,
)
from stablehlo_tools.analysis.entry import argument_name, next_values, pair_by_type, path_of
from stablehlo_tools.analysis.replica_groups import DeviceMesh
from stablehlo_tools.analysis.shardings import Dims, MeshAxes, ValueShardings, function_sharding
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.exported import argument_leaves
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, size
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.shardings_dropped import drop_shardings
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import MESH, entry_function, ops_named, ops_where
from stablehlo_tools.optimization.plan_forms import STAGE, StepForm, with_microbatches, with_stages
from stablehlo_tools.optimization.plan_request import MeshShape, PlanRequest, mesh_text, spec_text
from stablehlo_tools.optimization.plan_trials import (
    MESH_NAME,
    PlanCandidate,
    PlanTrials,
    passes_of,
    rank,
    state_mesh,
    write_plan,
)
from stablehlo_tools.transforms.partition import choose_border_of, undivided_form
from stablehlo_tools.transforms.parts.partition.choosing.border_choices import AnotherDivision

AXES = ("data", "model", "minor")  # the slow network first
_GAIN = 1.01  # a second axis has to be so much faster before other meshes are tried
_ROOM = 0.9  # share of the memory that a plan may use by the model
_WORK = 80_000  # ops of all meshes together: a long program is tried on fewer
_FEWEST, _MOST = 2, 8  # meshes
_LITTLE, _MOST_OTHERS = 0.1, 3  # share of the time, and number, of arguments that are tried anew
_WHOLE_STATES = 4  # whole states that have to fit before one on each device is tried


class NoPlanError(ToolError):
    """No plan fits the memory."""


@dataclass(frozen=True)
class ArgumentPlan:
    """One argument: its name, type and division, its bytes on a device, and another division."""

    name: str
    type: str
    dims: Dims
    bytes: float
    other: AnotherDivision | None


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

    @property
    def divided(self) -> Artifact:
        """The planned step before its passes, in the global view, written anew."""
        return write_plan(self.given, self.best)

    @property
    def passes(self) -> str:
        """The passes that the planned step has run."""
        return passes_of(self.request, self.best)

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
    if ops_named(artifact.module.operation, {MESH}):
        artifact = drop_plan(artifact)  # jax states shardings of random keys for one device, too
    trials = PlanTrials(artifact, request, watch)
    ranked = trials.judge(_candidates(artifact, request, watch))
    if ranked[0].bytes > request.limit and request.pipeline != "always":
        ranked = trials.sort(
            [*trials.judge(_in_microbatches(artifact, request, ranked, watch)), *ranked]
        )
    if ranked[0].is_compiled:
        ranked = trials.try_others(ranked, _neighbours(request, ranked[0]))
    best = ranked[0]
    if best.artifact is None or best.bytes > request.limit:
        counted = [each.bytes for each in ranked if each.time is not None]
        if not counted:
            raise ToolError(next(each.refused for each in ranked if each.refused))
        least = min(counted)
        raise NoPlanError(
            f"no plan for {request.devices} devices fits: the least memory found is "
            f"{size(least)} a device, and the limit is {size(request.limit)}; more devices, or a "
            "smaller batch, make it smaller"
        )
    listed = tuple(_listed_arguments(artifact, best))
    seconds = time.monotonic() - began
    return DevicePlan(best.artifact, artifact, request, tuple(ranked), listed, seconds)


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


def _neighbours(request: PlanRequest, best: PlanCandidate) -> Iterator[PlanCandidate]:
    """Yields plans that divide one argument, and all that are equal to it, in another way, if that
    costs little by the model; the cheapest first."""
    arguments = Function(entry_function(best.form.program.module)).body.arguments
    divisions = zip(best.choices.arguments, best.choices.others, strict=True)
    groups: dict[tuple[str, Dims, Dims], dict[int, AnotherDivision]] = {}
    for number, (dims, other) in enumerate(divisions):
        if other is not None:
            key = (str(arguments[number].type), dims, other.dims)
            groups.setdefault(key, {})[number] = other
    costs = {key: sum(each.ns for each in group.values()) for key, group in groups.items()}
    cheap = [key for key in groups if costs[key] < _LITTLE * best.choices.ns]
    if not cheap:
        return
    divider = _StepDivider(best.form, request)
    for key in sorted(cheap, key=costs.__getitem__)[:_MOST_OTHERS]:
        pins = {number: other.dims for number, other in groups[key].items()}
        changed = f"{_name_of(arguments[min(pins)])} as {spec_text(key[-1])}"
        found = divider.divide(best.mesh, pins)[0]
        if _is_new(found, [best]):
            yield replace(found, changed=changed)


def _in_microbatches(
    artifact: Artifact,
    request: PlanRequest,
    found: Sequence[PlanCandidate],
    watch: Callable[[str], None],
) -> list[PlanCandidate]:
    """Returns candidates that are loops over more and more microbatches, until one fits."""
    few = [each.mesh for each in _short(found, request)][:1]
    more: list[PlanCandidate] = []
    for form in with_microbatches(artifact) if few else ():
        of_form = _on_meshes(form, request, few, watch)
        more += of_form
        if any(_is_roomy(each, request) for each in of_form):
            break
    return more


def _short(found: Sequence[PlanCandidate], request: PlanRequest) -> list[PlanCandidate]:
    """Returns the fastest divisions that do not fit, if that is so on every mesh."""
    plain = [each for each in found if each.form.stages == 1 and not each.form.recomputes]
    short = [each for each in plain if not _is_roomy(each, request)]
    short.sort(key=lambda each: rank(each, math.inf))
    meshes = list(dict.fromkeys(each.mesh for each in short))
    if len(meshes) < len({each.mesh for each in plain}):
        return []
    return [each for each in short if each.mesh in meshes[:_FEWEST]]


def _is_roomy(candidate: PlanCandidate, request: PlanRequest) -> bool:
    return candidate.modelled_bytes <= _ROOM * request.limit


def _on_meshes(
    form: StepForm,
    request: PlanRequest,
    given: Sequence[MeshShape] | None,
    watch: Callable[[str], None],
) -> list[PlanCandidate]:
    """Returns the divisions of a form of the step over meshes: the given ones, or all worth it."""
    divider = _StepDivider(form, request)
    found: list[PlanCandidate] = []
    for mesh in islice(given or _meshes(request, form, found), divider.most):
        watch(f"dividing over {mesh_text(mesh)}{form.said}")
        # A second axis that divides nothing gives the plan of the first one again.
        found += (each for each in divider.divide(mesh) if _is_new(each, found))
    best = min(found, key=lambda each: rank(each, request.limit))
    # Compilers treat the sums of a whole state in their own way: let them decide, if that is cheap.
    state = best.choices.taken * request.devices
    if request.compiler and form.stages == 1 and _WHOLE_STATES * state < request.limit:
        found += (e for e in divider.divide(best.mesh, divider.whole_state) if _is_new(e, found))
    return found


def _is_new(candidate: PlanCandidate, found: Sequence[PlanCandidate]) -> bool:
    return all(candidate.choices.divisions != each.choices.divisions for each in found)


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
    best: PlanCandidate | None = None
    for number, fastest in enumerate(inner):
        yield ((AXES[0], devices // fastest), (AXES[1], fastest))
        two = [each for each in found if len(each.mesh) > 1]
        best = min(two, key=lambda each: each.choices.ns, default=None)
        if not number and (best is None or _GAIN * best.choices.ns > found[0].choices.ns):
            return
    if best is not None:
        (_, slow), (_, quick) = best.mesh
        for sizes in (*((slow, *each) for each in _halves(quick)), *_halves(slow, quick)):
            yield tuple(zip(AXES, sizes, strict=True))


def _halves(count: int, *rest: int) -> Iterator[tuple[int, ...]]:
    """Yields a number as the product of its smallest factor and another one, if it has two."""
    factor = next(number for number in range(2, count + 1) if count % number == 0)
    if factor < count:
        yield (count // factor, factor, *rest)


class _StepDivider:
    """Divides a form of the step over meshes, by the model. `most`: meshes that are worth the
    time."""

    def __init__(self, form: StepForm, request: PlanRequest) -> None:
        copy = form.program.copy()
        state_mesh(copy.module, ((MESH_NAME, request.devices),))
        self._program = undivided_form(copy.module)
        self._form, self._request = form, request
        main = entry_function(self._program)
        # Without donation, a result of an argument's type is taken for its next value.
        arrays = [n for n, each in enumerate(Function(main).body.arguments) if shape_of(each)]
        self._ties = next_values(main) or pair_by_type(main, arrays)
        given = entry_function(form.program.module)
        self._pins = {**request.stated, **_pins(given, request.keep)}
        exported = form.program.exported
        for n, leaf in argument_leaves(exported, given).items() if exported is not None else ():
            rank = len(shape_of(Function(given).body.arguments[n]))
            # A PartitionSpec cannot divide the words of random keys, so these stay whole.
            if exported is not None and exported.in_avals[leaf].ndim < rank:
                self._pins.setdefault(n, ((),) * rank)
        self.most = max(_FEWEST, min(_MOST, _WORK // len(ops_where(main, lambda _: True))))

    @property
    def whole_state(self) -> dict[int, Dims]:
        """The divisions of the state by which every device has all of it."""
        arguments = Function(entry_function(self._program)).body.arguments
        return {each: ((),) * len(shape_of(arguments[each])) for each in self._ties.values()}

    def divide(
        self, mesh: MeshShape, pins: Mapping[int, Dims] = MappingProxyType({})
    ) -> list[PlanCandidate]:
        """Returns the divisions of `choose_border`. `pins` are divisions of arguments; those that
        the request gives are stronger."""
        room = _ROOM * self._request.limit * self._form.stages
        pins = {**pins, **self._pins}
        found = choose_border_of(
            self._program, DeviceMesh(mesh), self._request.hardware, room, self._ties, pins
        )
        return [PlanCandidate(self._form, mesh, choices) for choices in found]


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


def _listed_arguments(given: Artifact, best: PlanCandidate) -> Iterator[ArgumentPlan]:
    arguments = Function(entry_function(given.module)).body.arguments
    sizes = dict(best.whole_mesh)
    for argument, dims, other in zip(
        arguments, best.choices.arguments, best.choices.others, strict=True
    ):
        whole_dims = best.on_all(argument, dims)
        parts = math.prod(sizes[axis.name] for axes in whole_dims for axis in axes)
        taken = (tensor_bytes(ir.RankedTensorType(argument.type)) or 0) / parts
        yield ArgumentPlan(_name_of(argument), str(argument.type), whole_dims, taken, other)


def _name_of(argument: ir.Value) -> str:
    return path_of(argument) or argument_name(argument)


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
