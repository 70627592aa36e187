"""Optimizes one program for one machine: searches candidates, proves the best, reports why.

    optimum = optimize(artifact, Request(target="gpu"))
    optimum.artifact, optimum.pipeline, optimum.before.total_ns, optimum.after.total_ns

The answer is never worse than the export as scheduled by the target's compiler. It is the export if
no candidate is better, or if no better candidate can be proven.
"""

from __future__ import annotations

import gzip
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import meshes_of
from stablehlo_tools.analysis.replica_groups import mesh_with
from stablehlo_tools.artifacts import artifact as artifacts
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.hardware import Hardware, load_hardware
from stablehlo_tools.diagnostics import GIB, ToolError, naming
from stablehlo_tools.optimization.candidate_search import (
    CandidateTrial,
    OptimizationSearch,
    Progress,
    candidates,
)
from stablehlo_tools.optimization.crew import (
    CompilationMachine,
    Crew,
    OptimizedProgram,
    OutOfTimeError,
)
from stablehlo_tools.optimization.figures import Figures
from stablehlo_tools.optimization.layer_twins import DEPTHS, TwinCrew, twin_crew
from stablehlo_tools.optimization.option_trials import OptionTrial, try_options
from stablehlo_tools.optimization.proof import CandidateProof, ProofItem, memory_finding
from stablehlo_tools.optimization.road import (
    Circumstances,
    RoadCandidate,
    on_the_road,
    road,
    slow_choices,
)
from stablehlo_tools.optimization.store import AnswerStore, default_directory, is_writable
from stablehlo_tools.targets.chips import DEFAULT_HARDWARE, Target, chip_for
from stablehlo_tools.targets.compiler_options import NO_OPTIONS, CompilerOptions
from stablehlo_tools.targets.topologies import check_installed, compiler_version

DEFAULT_BUDGET = 600.0  # seconds
_TO_FINISH = 600.0  # seconds, beyond the budget, to rewrite an answer in one go and prove it
_PIPELINE = "expand-pipeline"  # the pass that uses `pipeline_axis`
_SHARE_OF_OPTIONS = 0.25  # time for compiler options beyond the budget, as a share of it
_WITH_ALL = 4  # candidates of a search with twins that are then compiled with all layers
_MEMORY_OF_TWINS = 1.5  # of the device's, up to which a candidate may still fit
_SHARE_OF_TWINS = 0.6  # of the time, until these are compiled
_MOST_WORKERS = 8  # compiling a large program needs some GiB


@dataclass(frozen=True)
class OptimizationRequest:
    """The options of an optimization.

    `target`: the compiler that decides, gpu or tpu. `hardware`: name or file of the device's
    profile (default: the target's usual one). `memory_limit`: GiB of a device (default: the
    device's memory). `budget`: seconds of search. `candidates`: number of compilations besides the
    export, without a time limit; gives the same answer on any machine. `pipeline_axis`: a mesh axis
    that is free for pipeline parallelism over layers. `workers`: number of compilations in parallel
    (default: one per core, at most `_MOST_WORKERS`). `cache`: directory of answers; False: none.
    `options`: compiler options of the export and all candidates. `try_options`: also try others on
    the answer. `executor`: whose workers compile; they need this package with its extra `aot`.
    """

    target: str = "gpu"
    hardware: str | None = None
    memory_limit: float | None = None
    budget: float | None = None
    candidates: int | None = None
    pipeline_axis: str | None = None
    workers: int | None = None
    cache: Path | bool = True
    options: CompilerOptions = NO_OPTIONS
    try_options: bool = True
    executor: Executor | None = None

    def _check(self) -> None:
        if self.target not in DEFAULT_HARDWARE:
            known = " or ".join(DEFAULT_HARDWARE)
            raise ToolError(
                f"target {self.target!r}: a program is optimized for {known}",
                hint=" or ".join(f'target="{name}"' for name in DEFAULT_HARDWARE),
            )
        for what, given in (
            ("memory_limit", self.memory_limit),
            ("budget", self.budget),
            ("candidates", self.candidates),
        ):
            if given is not None and not given > 0:
                raise ToolError(
                    f"{what}={given}: it must be more than 0", hint=f"without {what}, or {what}=60"
                )

    def machine(self) -> tuple[CompilationMachine, Hardware]:
        """Returns the machine and its profile.

        Raises ToolError if the machine is unknown, its compiler is not installed, or a limit is
        invalid."""
        self._check()
        target = Target(self.target)
        check_installed(target)
        name = self.hardware or DEFAULT_HARDWARE[self.target]
        profile = load_hardware(name)
        chip_for(target, profile)  # raises if the profile is not of this target
        machine = CompilationMachine(
            self.target, name, repr(profile), compiler_version(target), self.options.texts()
        )
        return machine, profile

    @property
    def seconds(self) -> float:
        """The longest time of the search."""
        if self.budget is not None:
            return self.budget
        return DEFAULT_BUDGET if self.candidates is None else 24 * 3600.0


@dataclass(frozen=True)
class Optimum:
    """The result of an optimization. `pipeline` is "" if the export is not changed.

    `trials`: all compiled candidates, the export first. `refused`: reasons by the texts of refused
    passes. `remarks`: notes for the user. `seconds`: the total time. `given`: the compiler options
    of all figures; `options`: the trials of other options.
    """

    artifact: Artifact
    pipeline: str
    before: Figures
    after: Figures
    hardware: Hardware
    target: str
    memory_limit: float  # bytes
    trials: tuple[CandidateTrial, ...]
    refused: dict[str, str]
    ended: str
    proof: CandidateProof
    seconds: float
    schedules: tuple[str, str]  # scheduled HLO, before and after
    remarks: tuple[str, ...] = ()
    given: CompilerOptions = NO_OPTIONS
    options: tuple[OptionTrial, ...] = ()

    @property
    def changed(self) -> bool:
        """True if a candidate was better than the export."""
        return bool(self.pipeline)

    def fits(self, figures: Figures) -> bool:
        """Returns True if one side, `before` or `after`, fits the memory."""
        return figures.needed_bytes <= self.memory_limit

    @property
    def ratio(self) -> float | None:
        """The time after divided by the time before; None if only the answer fits the memory, or if
        one side does not run."""
        if self.fits(self.after) and not self.fits(self.before):
            return None
        return self.after.ratio_to(self.before)


def optimize(
    artifact: Artifact,
    request: OptimizationRequest | None = None,
    watch: Callable[[Progress], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> Optimum:
    """Returns the fastest candidate that was found and proven, by the target's compiler.

    The given artifact is not changed. `watch` is called with the progress. `stop` ends the search,
    and the best candidate so far is used. Raises ToolError if the compiler refuses the export.
    """
    request = request or OptimizationRequest()
    meshes = meshes_of(artifact.module)
    if request.pipeline_axis is not None and meshes:
        with naming(artifact.name):
            mesh_with(
                request.pipeline_axis, meshes, "optimize: pipeline-axis", "", None, for_stages=True
            )
    with _store(request) as store:
        return _Optimizer(artifact, request, store, watch, stop or threading.Event()).run()


class _TwinSearch(NamedTuple):
    """A search with twins, which are compiled."""

    crew: TwinCrew
    search: OptimizationSearch


class _Optimizer:
    """One run."""

    def __init__(
        self,
        artifact: Artifact,
        request: OptimizationRequest,
        store: AnswerStore,
        watch: Callable[[Progress], None],
        stop: threading.Event,
    ) -> None:
        self._began = time.monotonic()
        self._artifact = artifact
        self._request = request
        self._store = store
        self._watch = watch
        self._stop = stop
        self._machine, self._hardware = request.machine()
        self._memory = (
            self._hardware.memory_bytes
            if request.memory_limit is None
            else request.memory_limit * GIB
        )
        data = artifacts.encode(artifact, artifact.binary_form)
        self._program = OptimizedProgram(store.keep_blob(data), artifact.name)
        cores = _MOST_WORKERS if request.executor else (os.cpu_count() or 1)
        self._workers = request.workers or min(_MOST_WORKERS, cores)
        self._remarks: list[str] = []

    def run(self) -> Optimum:
        """Searches and proves."""
        deadline = self._began + self._request.seconds
        crew = self._crew(self._workers, deadline, self._request.executor)
        search = OptimizationSearch(
            crew, self._memory, self._request.candidates, self._workers, self._watch, self._stop
        )
        try:
            self._search(crew, search)
        except OutOfTimeError:
            # Interrupted before the export was compiled: there is no answer yet.
            if self._stop.is_set():
                raise KeyboardInterrupt from None
            raise ToolError(
                f"the export did not compile within {self._request.seconds:g} s; --budget gives "
                "it more time"
            ) from None
        finally:
            crew.end()
        return self._prove_best(search)

    def _crew(
        self,
        workers: int,
        deadline: float,
        executor: Executor | None = None,
        program: OptimizedProgram | None = None,
    ) -> Crew:
        program, machine = program or self._program, self._machine
        return Crew(workers, self._store, program, machine, deadline, executor, self._remarks)

    def _begin_with_twins(self, crew: Crew) -> _TwinSearch | None:
        """Compiles the twins of the export; returns None if it has none."""
        until = self._began + _SHARE_OF_TWINS * self._request.seconds

        def crew_of(digest: str) -> Crew:
            program = OptimizedProgram(digest, self._artifact.name)
            return self._crew(self._workers, until, self._request.executor, program)

        try:
            heeded = self._hardware.memory_bytes if self._machine.target == "gpu" else math.inf
            twins = twin_crew(crew, crew_of, heeded)
            if twins is None:
                return None
            most = self._request.candidates
            search = OptimizationSearch(
                twins, _MEMORY_OF_TWINS * self._memory, most, self._workers, self._watch, self._stop
            )
            search.base()
        except (ToolError, OutOfTimeError):
            return None
        return _TwinSearch(twins, search)

    def _search(self, crew: Crew, search: OptimizationSearch) -> None:
        """Searches, or replays the trials of an earlier search for the same question."""
        request = self._request
        limits = [self._memory, request.seconds, request.candidates, request.pipeline_axis]
        question = ("search", self._program.digest, astuple(self._machine), limits)
        known = self._store.answer(*question)
        if known is not None:
            search.base()
            search.replay(known)
            return
        with ThreadPoolExecutor(1) as pool:
            base = pool.submit(search.base)
            twins = self._begin_with_twins(crew)
            if twins is not None:
                self._run(twins.search, twins.crew)
                twins.crew.end()
            base.result()
        if twins is None:
            self._run(search, crew)
        else:
            compiled = twins.search.outcome
            # More memory than twins need makes XLA order the program otherwise. So the fastest
            # alternate with the fastest that would fit.
            fastest = twins.search.best_first(_MEMORY_OF_TWINS * self._memory)
            pairs = zip_longest(fastest, twins.search.best_first(self._memory))
            best = list(dict.fromkeys(filter(None, chain(*pairs))))[:_WITH_ALL]
            search.compile_all([(t.candidate, t.figures and t.figures.contended_ns) for t in best])
            search.outcome.refused = compiled.refused
            search.outcome.ended = (
                f"before, {candidates(len(compiled.trials) - 1)} with {DEPTHS[0]} and with "
                f"{DEPTHS[1]} of {twins.crew.layers} layers: {compiled.ended}"
            )
        if not self._stop.is_set():
            self._store.keep(search.record(), *question)

    def _run(self, search: OptimizationSearch, crew: Crew | TwinCrew) -> None:
        """Runs a search whose export is compiled, with the advice of `inspect`."""
        base = search.outcome.trials[0].figures
        assert base is not None
        circumstances = Circumstances(
            self._machine.hardware,
            self._request.memory_limit,
            too_large=base.needed_bytes > self._memory,
            axis=self._request.pipeline_axis,
        )
        choices = road(circumstances)

        def advised_candidates() -> list[RoadCandidate]:
            """Returns the advice of `inspect`; [] and a remark if `inspect` fails."""
            try:
                return on_the_road(crew.advise(), choices, circumstances)
            except ToolError as error:
                why = error.diagnostic.message
                self._remarks.append(f"the advice of inspect was not tried: {why}")
                return []

        search.run(choices, slow_choices(circumstances), advised_candidates)

    def _prove_best(self, search: OptimizationSearch) -> Optimum:
        """Returns the best candidate that is proven; the export if none is."""
        base = search.outcome.trials[0]
        assert base.figures is not None
        memory = memory_finding(base.figures, self._memory)
        while (best := search.best) is not base:
            self._watch(search.progress(f"proving {best.candidate}"))
            crew = self._crew(2, time.monotonic() + _TO_FINISH)
            try:
                whole = rewrite_in_one_run(crew, best)
                if not search.replace(best, whole):
                    self._remarks.append(
                        f"{best.candidate} was rejected: its passes in one run give another program"
                    )
                    continue
                best = whole
                assert base.figures is not None
                assert best.figures is not None
                assert best.module is not None
                with ThreadPoolExecutor(1) as pool:
                    code = pool.submit(crew.evaluate, best.module, with_code=True)
                    proof = crew.prove(best.module, (base.figures, best.figures), self._memory)
                    code.result()
            except (ToolError, OutOfTimeError) as error:
                why = (
                    error.diagnostic.message
                    if isinstance(error, ToolError)
                    else f"rewriting and proving it took more than {_TO_FINISH:g} s"
                )
                self._remarks.append(f"{best.candidate} was rejected: {why}")
                search.reject(best, why)
                continue
            finally:
                crew.end()
            if proof.holds:
                data = self._kept(best.module.digest)
                module = bindings.parse_module(data, self._artifact.module.context)
                taken = replace(self._artifact, module=module)
                return self._optimum(search, best, taken, proof)
            self._remarks.append(f"{best.candidate} was rejected: {proof.summary()}")
            search.reject(best, proof.summary())
        same = ProofItem("proven", "the program is the export, unchanged")
        return self._optimum(search, base, self._artifact, CandidateProof(same, same, memory))

    def _optimum(
        self,
        search: OptimizationSearch,
        best: CandidateTrial,
        artifact: Artifact,
        proof: CandidateProof,
    ) -> Optimum:
        base = search.outcome.trials[0]
        assert base.figures is not None
        assert best.figures is not None
        options = self._options(search, best, base)
        said = best.module.said if best.module is not None else ()
        stand_in = base.figures.stand_in
        axis = self._request.pipeline_axis
        for text, why in search.outcome.refused.items():
            if axis is not None and text.startswith(_PIPELINE):
                self._remarks.append(f"no pipeline over {axis!r}: {why}")
                break
        return Optimum(
            artifact=artifact,
            pipeline=str(best.candidate),
            before=base.figures,
            after=best.figures,
            hardware=self._hardware,
            target=self._request.target,
            memory_limit=self._memory,
            trials=tuple(search.outcome.trials),
            refused=search.outcome.refused,
            ended=search.outcome.ended,
            proof=proof,
            seconds=time.monotonic() - self._began,
            schedules=(self._schedule(base.figures), self._schedule(best.figures)),
            remarks=tuple(dict.fromkeys(filter(None, (stand_in, *self._remarks, *said)))),
            given=self._request.options,
            options=options,
        )

    def _options(
        self, search: OptimizationSearch, best: CandidateTrial, base: CandidateTrial
    ) -> tuple[OptionTrial, ...]:
        """Tries compiler options on the answer; none if it has no collectives to speed up."""
        assert best.figures is not None
        wanted = self._request.try_options and not self._stop.is_set()
        if not wanted or not best.figures.collectives or not best.figures.runs:
            return ()
        self._watch(search.progress("trying other compiler options"))
        seconds = self._request.seconds
        if self._request.candidates is None:  # limited by time
            seconds *= _SHARE_OF_OPTIONS
        crew = self._crew(self._workers, time.monotonic() + seconds, self._request.executor)
        try:
            return try_options(
                crew,
                Target(self._machine.target),
                self._request.options,
                None if best is base else best.module,
                self._memory,
                self._workers,
                self._stop.is_set,
            )
        finally:
            crew.end()

    def _schedule(self, figures: Figures) -> str:
        return gzip.decompress(self._kept(figures.schedule)).decode()

    def _kept(self, digest: str) -> bytes:
        data = self._store.blob(digest)
        if data is None:
            raise ToolError("another process emptied the cache")
        return data


def rewrite_in_one_run(crew: Crew, best: CandidateTrial) -> CandidateTrial:
    """Rewrites the candidate in one run of `opt -p`, whose module is written as the answer.

    The search ran the passes one by one. If this module has other bytes, it is compiled. A pass
    that says why it changed nothing is left out.
    """
    module = crew.rewrite(None, str(best.candidate))
    for stage, text in best.candidate.choices:
        name = text.partition("{")[0]
        if any(f"{name}: " in said for said in module.said):
            rest = tuple(each for each in best.candidate.choices if each != (stage, text))
            shorter = crew.rewrite(None, str(RoadCandidate(rest)))
            if shorter.digest == module.digest:
                best, module = replace(best, candidate=RoadCandidate(rest)), shorter
    if best.module is not None and module.digest == best.module.digest:
        return replace(best, module=module)
    return replace(best, module=module, figures=crew.evaluate(module))


@contextmanager
def _store(request: OptimizationRequest) -> Generator[AnswerStore]:
    """Yields the store of answers: the cache of later runs, or a temporary directory.

    A temporary directory is also used if the user's cache directory is not writable.
    """
    directory = default_directory() if request.cache is True else request.cache
    if directory is False or (request.cache is True and not is_writable(directory)):
        with tempfile.TemporaryDirectory(prefix="stablehlo-tools-") as path:
            yield AnswerStore(Path(path))
        return
    store = AnswerStore(directory)
    yield store
    store.prune()
