"""Writes the candidates of a plan and times them: by the target's compiler, or as written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from stablehlo_tools.analysis.replica_groups import AxisRef, DeviceMesh
from stablehlo_tools.analysis.shardings import SHARDING, Dims, MeshAxes, ValueShardings
from stablehlo_tools.artifacts.artifact import Artifact, encode
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.gspmd_import import write_mesh
from stablehlo_tools.ir.shardy_round_trip import set_entries
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import MESH, entry_function
from stablehlo_tools.optimization.crew import EVALUATE
from stablehlo_tools.optimization.plan_forms import STAGE, StepForm
from stablehlo_tools.optimization.plan_request import MeshShape, PlanRequest, mesh_text
from stablehlo_tools.optimization.remote_workers import RemoteWorkers
from stablehlo_tools.optimization.road import for_machine
from stablehlo_tools.passes.pipeline import Pipeline, run_pipeline
from stablehlo_tools.processes.child import decoded_error
from stablehlo_tools.processes.forks import REFUSED
from stablehlo_tools.report.document import ProgramReport
from stablehlo_tools.report.exposure import AS_WRITTEN, Question, exposure
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.transforms.parts.partition.choosing.border_choices import BorderChoices

MESH_NAME = "mesh"
_MOST_TRIED = 3  # plans that are compiled
_AN_AXIS = 0.005  # share of the time that one more axis has to gain
_OVERESTIMATED = 2.5  # the search may count so many times the bytes of the written program
_RECOMPUTE = "rematerialize"
_WRITTEN = "as written"  # the target of such a report
_LEAST = 1.0  # seconds of a compilation


@dataclass(frozen=True)
class PlanTime:
    """The time of a run and the peak of a device, by a target's compiler or as written."""

    contended_ns: float
    peak_bytes: float
    target: str


@dataclass(frozen=True)
class PlanCandidate:
    """A form of the step on a mesh, with its divisions.

    `time` is that of the compiler, or of the program as written, and `artifact` that program.
    `after` are passes that it also needs to fit. `changed` names the argument that it divides in
    another way than the best plan.
    """

    form: StepForm
    mesh: MeshShape
    choices: BorderChoices
    time: PlanTime | None = None
    artifact: Artifact | None = None
    after: str = ""
    changed: str = ""
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
        return self.modelled_ns if self.time is None else self.time.contended_ns

    @property
    def bytes(self) -> float:
        """The peak of a device, as compiled or written, else as modelled."""
        return self.modelled_bytes if self.time is None else self.time.peak_bytes

    @property
    def recomputes(self) -> bool:
        """True if its backward recomputes residuals."""
        return self.form.recomputes or bool(self.after)

    @property
    def attempts(self) -> tuple[str, ...]:
        """The passes that are run last, the next ones if it does not fit after the first."""
        return (_RECOMPUTE,) if self.form.recomputes else ("", _RECOMPUTE)

    @property
    def is_compiled(self) -> bool:
        """True if a compiler has timed it."""
        return self.time is not None and self.time.target != _WRITTEN

    @property
    def whole_mesh(self) -> MeshShape:
        """The mesh of all devices: that of a stage after the axis of the stages."""
        stages = ((STAGE, self.form.stages),) if self.form.stages > 1 else ()
        return (*stages, *self.mesh)

    def on_all(self, value: ir.Value, dims: Dims) -> Dims:
        """Returns the division over all devices of a value that a stage divides so: stages divide
        the stacks of layers."""
        is_stack = tuple(shape_of(value)) in self.form.stacks
        return ((AxisRef(STAGE), *dims[0]), *dims[1:]) if is_stack else dims


def rank(candidate: PlanCandidate, memory: float) -> tuple[float, float]:
    """Returns a sort key, best first: (bytes above `memory`, time), with fewer axes preferred."""
    if candidate.time is None:
        memory *= _OVERESTIMATED
    simpler = 1 + _AN_AXIS * (len(candidate.whole_mesh) - 1)
    return max(0.0, candidate.bytes - memory), candidate.ns * simpler


class PlanTrials:
    """Times the candidates of one plan, on the workers of the request's executor if it has one."""

    def __init__(
        self, artifact: Artifact, request: PlanRequest, watch: Callable[[str], None]
    ) -> None:
        self._artifact, self._request, self._watch = artifact, request, watch
        self._left = request.budget  # seconds of compilation
        executor = request.executor
        self._remote = RemoteWorkers(executor, request.compiler) if executor else None

    def judge(self, candidates: Sequence[PlanCandidate]) -> list[PlanCandidate]:
        """Returns the candidates, best first: the target's compiler times the first few.

        Without a compiler, or if it times none, they are timed as written, until one fits."""
        ranked = sorted(candidates, key=self._rank)
        judged: list[PlanCandidate] = []
        if self._request.compiler:
            judged += self._compile_first(ranked)
        if not any(each.time for each in judged):
            refused = next((each.refused for each in judged), "")
            judged = [replace(each, refused=refused) for each in self._as_written(ranked)]
        return self.sort([*judged, *ranked[len(judged) :]])

    def sort(self, candidates: Sequence[PlanCandidate]) -> list[PlanCandidate]:
        """Returns candidates, best first, those with a program before the others."""
        return sorted(candidates, key=lambda each: (each.time is None, *self._rank(each)))

    def _rank(self, candidate: PlanCandidate) -> tuple[float, float]:
        return rank(candidate, self._request.limit)

    def try_others(
        self, ranked: Sequence[PlanCandidate], others: Iterable[PlanCandidate]
    ) -> list[PlanCandidate]:
        """Returns candidates, best first, after the compiler has timed others, too, as far as the
        time suffices. `others` are of the form of the best one."""
        passes = ranked[0].after
        timed = self._compile(others, lambda _: passes) if self._left > 0 else []
        return self.sort([*ranked, *(each for each in timed if each.time)])

    def _compile_first(self, candidates: Sequence[PlanCandidate]) -> list[PlanCandidate]:
        """Returns the first candidates as the compiler times them, as far as the time suffices; the
        best one with residuals recomputed, if that is faster."""
        found: list[PlanCandidate] = []
        while self._left > 0 and len(found) < len(candidates):
            best = self._best_of(found)
            chosen = candidates[len(found) : len(found) + _MOST_TRIED]
            if best is not None:
                chosen = [each for each in chosen if not self._rank(each)[0]]
                if self._fits(best) or not chosen:
                    break
            timed = self._compile(chosen, lambda each: each.attempts[0])
            unfit = [each for each in timed if not self._fits(each) and len(each.attempts) > 1]
            again = self._compile(unfit, lambda each: each.attempts[1]) if self._left > 0 else []
            better = {id(old): new for old, new in zip(unfit, again, strict=False) if new.time}
            found += [better.get(id(each), each) for each in timed]
        best = self._best_of(found)
        if best is None or best.recomputes or self._left <= 0:
            return found
        (again,) = self._compile([best], lambda _: _RECOMPUTE)
        faster = min(best, again, key=self._rank)
        return [faster if each is best else each for each in found]

    def _best_of(self, candidates: Sequence[PlanCandidate]) -> PlanCandidate | None:
        timed = [each for each in candidates if each.time is not None]
        return min(timed, key=self._rank, default=None)

    def _as_written(self, candidates: Sequence[PlanCandidate]) -> Iterator[PlanCandidate]:
        counted = False
        for candidate in candidates:
            if counted and self._rank(candidate)[0]:
                return
            self._watch(f"writing it for {mesh_text(candidate.whole_mesh)}{candidate.form.said}")
            timed = candidate
            for after in candidate.attempts:
                attempt = self._time(self._build(candidate, after), None)
                timed = timed if timed.time and not attempt.time else attempt
                if self._fits(timed):
                    break
            yield timed
            if self._fits(timed):
                return
            counted = counted or timed.time is not None

    def _fits(self, candidate: PlanCandidate) -> bool:
        return candidate.time is not None and candidate.bytes <= self._request.limit

    def _compile(
        self, candidates: Iterable[PlanCandidate], after: Callable[[PlanCandidate], str]
    ) -> list[PlanCandidate]:
        """Returns candidates as the compiler times them, after some passes, within the time that is
        left. While a remote worker compiles one, the next one is written."""
        began = time.monotonic()
        until = began + self._left
        timed: list[PlanCandidate | Future[PlanCandidate]] = []
        with ThreadPoolExecutor(_MOST_TRIED) as pool:
            for each in candidates:
                if timed and time.monotonic() > until:
                    break
                recomputed = ", recomputed" if after(each) else ""
                told = f"{mesh_text(each.whole_mesh)}{each.form.said}, {each.changed}".rstrip(", ")
                self._watch(f"compiling for {told}{recomputed}")
                built = self._build(each, after(each))
                remote = self._remote is not None
                timed.append(
                    pool.submit(self._time, built, until) if remote else self._time(built, until)
                )
        self._left -= time.monotonic() - began
        return [each.result() if isinstance(each, Future) else each for each in timed]

    def _build(self, candidate: PlanCandidate, after: str) -> PlanCandidate:
        """Returns a candidate with its program after these passes, or the reason why not."""
        candidate = replace(candidate, after=after, time=None, artifact=None)
        try:
            built = build_plan(self._artifact, self._request, candidate)
        except ToolError as error:
            return replace(candidate, refused=error.diagnostic.message)
        return replace(candidate, artifact=built)

    def _time(self, candidate: PlanCandidate, until: float | None) -> PlanCandidate:
        """Returns a candidate as the compiler times it before the clock is at `until`; as written
        if that is None."""
        if candidate.artifact is None:
            return candidate
        left = None if until is None else max(_LEAST, until - time.monotonic())
        try:
            found = None if left is None else self._time_remotely(candidate.artifact, left)
            if found is None:
                report = time_program(candidate.artifact, self._request, left)
                found = PlanTime(report.contended_ns, report.peak_bytes, report.target)
        except ToolError as error:
            return replace(candidate, refused=error.diagnostic.message)
        return replace(candidate, time=found)

    def _time_remotely(self, program: Artifact, seconds: float) -> PlanTime | None:
        """Returns the time by a worker of the executor; None if there is none that works."""
        if self._remote is None:
            return None
        message = {
            "job": EVALUATE,
            "module": None,
            "hardware": self._request.machine.hardware,
            "target": self._request.compiler,
            "options": [],
            "name": program.name,
            "doing": "compiling",
            "seconds": seconds,
        }
        try:
            sent = {"artifact": encode(program, program.binary_form)}
            answer, _ = self._remote.ask(message, sent)
        except TimeoutError:
            raise ToolError(f"not compiled within {seconds:.0f} s") from None
        except BrokenExecutor as error:
            self._remote = None
            self._watch(f"the executor broke, so this machine does the rest: {error}")
            return None
        if REFUSED in answer:
            raise decoded_error(answer[REFUSED])
        title = Target(self._request.compiler).title
        return PlanTime(answer["contended_ns"], answer["peak_bytes"], title)


def build_plan(artifact: Artifact, request: PlanRequest, candidate: PlanCandidate) -> Artifact:
    """Returns the program of a candidate, after the passes of its form and of the request."""
    planned = write_plan(artifact, candidate)
    if passes := passes_of(request, candidate):
        run_pipeline(planned, Pipeline.parse(passes))
    return planned


def passes_of(request: PlanRequest, candidate: PlanCandidate) -> str:
    """Returns the passes that the program of a candidate has run."""
    texts = filter(None, (candidate.form.passes, request.passes, candidate.after))
    return ",".join(for_machine(text, request.machine) for text in texts)


def time_program(
    program: Artifact, request: PlanRequest, timeout: float | None, *, with_timeline: bool = False
) -> ProgramReport:
    """Times a program as the target schedules it within `timeout` seconds; without, as written."""
    target, limit = (AS_WRITTEN, math.inf) if timeout is None else (request.compiler, timeout)
    question = Question(request.hardware, (target,), timeout=limit, with_timeline=with_timeline)
    (report,) = exposure([program], question)
    return report


def write_plan(artifact: Artifact, candidate: PlanCandidate) -> Artifact:
    """Returns a copy of a program for the devices of a candidate, with its divisions."""
    copy = artifact.copy()
    mesh = candidate.whole_mesh
    state_mesh(copy.module, mesh)
    main = entry_function(copy.module)
    shardings = ValueShardings(MeshAxes(DeviceMesh(mesh)), MESH_NAME)
    values = Function(main).body.arguments, Function(main).yields
    for side, listed, of_side in zip(
        ("arg_attrs", "res_attrs"), candidate.choices.divisions, values, strict=True
    ):
        stated: dict[int, ir.Attribute] = {}
        for number, (dims, value) in enumerate(zip(listed, of_side, strict=True)):
            stated[number] = shardings.attribute(candidate.on_all(value, dims), main.context)
        set_entries(main, side, SHARDING, stated)
    exported = copy.exported
    # `to_exported` states the shardings of a program for several devices by those of its module.
    if exported is not None:
        exported = replace(exported, nr_devices=math.prod(count for _, count in mesh))
    return replace(copy, exported=exported)


def state_mesh(module: ir.Module, mesh: MeshShape) -> None:
    """States the only mesh of a module, and its number of devices."""
    devices = math.prod(count for _, count in mesh)
    number = ir.IntegerAttr.get(ir.IntegerType.get_signless(32, module.context), devices)
    module.operation.attributes["mhlo.num_partitions"] = number
    for op in list(module.body.operations):
        if op.operation.name == MESH:
            op.operation.erase()
    write_mesh(module, MESH_NAME, mesh)
