"""The search: decides which candidates are rewritten and compiled, and in which order.

The model guides the search and the compiler decides. Starting from the export, each round rewrites
the neighbours of the best candidates and compiles the most promising ones:

    expected time = compiler's time of the candidate * model(neighbour) / model(candidate)

The search ends if no candidate is left, the budget is spent, or many in a row bring no gain.
Candidates with the same module count as one.

A round does not depend on which compilation ends first. So the same number of candidates gives the
same answer on any machine.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.optimization.crew import CandidateModule, Crew, OutOfTimeError
from stablehlo_tools.optimization.figures import Figures
from stablehlo_tools.optimization.layer_twins import TwinCrew
from stablehlo_tools.optimization.road import (
    Change,
    Road,
    RoadCandidate,
    change_between,
    neighbours,
)
from stablehlo_tools.passes.base import RoadStage

BUDGET_SPENT = "the budget was spent"  # a value of `SearchOutcome.ended`
_AT_ONCE = 4  # candidates compiled in a round; without a number of candidates, one for each worker
_EXPANDED = 2  # candidates whose neighbours are rewritten in a round
_FORESEEN = 1  # likewise, of candidates that are not yet compiled
_HOPELESS = 1.3  # times the best time: slower candidates are neither compiled nor expanded
_NOVELTY = 0.05  # share by which the expected time of an untried stage is lowered
_ALIKE_BYTES = 0.02  # share of the memory: excesses that differ by less count as equal
_MICROBATCHES = 0.75  # expected memory of a loop over microbatches without a model, as a factor
_PATIENCE = 32  # candidates in a row without a gain, after which the search ends
_WORTH = 1e-3  # least gain, as a share of the time
_POLL = 0.2  # seconds


@dataclass(frozen=True)
class CandidateTrial:
    """A candidate with its figures, or with the reason why the compiler refused it.

    `expected_ns`, `expected_bytes`: the time and memory expected before compiling. `change`: the
    change from the candidate that it is a neighbour of.
    """

    candidate: RoadCandidate
    module: CandidateModule | None = None
    figures: Figures | None = None
    expected_ns: float | None = None
    expected_bytes: float = 0.0
    refused: str = ""
    change: Change | None = None


@dataclass(frozen=True)
class Progress:
    """The current activity of a search, for `watch`: `tried` of `known` candidates are compiled."""

    doing: str
    tried: int
    known: int
    best: CandidateTrial | None


@dataclass
class SearchOutcome:
    """All trials in order, the export first, and the reason why the search ended."""

    trials: list[CandidateTrial] = field(default_factory=list[CandidateTrial])
    # Passes that refused every candidate, with the reason.
    refused: dict[str, str] = field(default_factory=dict[str, str])
    ended: str = ""


def candidates(count: int) -> str:
    """Returns `1 candidate`, `2 candidates`."""
    return f"{count} candidate{'' if count == 1 else 's'}"


def rank(figures: Figures, memory: float) -> tuple[float, float]:
    """Returns a sort key, best first: (bytes above `memory`, contended time)."""
    excess = max(0.0, figures.needed_bytes - memory)
    return (excess, figures.contended_ns)


class OptimizationSearch:
    """One search; `outcome` holds its results so far, at any time.

    It ends after `candidates` compilations; `memory` is in bytes of a device.
    """

    def __init__(
        self,
        crew: Crew | TwinCrew,
        memory: float,
        candidates: int | None,
        workers: int,
        watch: Callable[[Progress], None],
        stop: threading.Event,
    ) -> None:
        self.outcome = SearchOutcome()
        self._crew, self._workers, self._watch, self._stop = crew, workers, watch, stop
        self._memory, self._candidates = memory, candidates
        self._modules: dict[RoadCandidate, CandidateModule | None] = {}
        self._known: set[object] = set()  # keys of all modules that are compiled or waiting
        self._waiting: list[CandidateTrial] = []
        self._expanded: set[RoadCandidate] = set()
        self._in_vain = 0
        self._slow: frozenset[str] = frozenset()
        self._slow_neighbours: list[tuple[CandidateTrial, RoadCandidate]] = []
        self._last_neighbours: list[tuple[CandidateTrial, RoadCandidate]] = []
        self._accepted: set[str] = set()
        self._refused: dict[str, str] = {}

    def base(self) -> CandidateTrial:
        """Compiles the export and returns its trial. Raises ToolError if that is refused."""
        self._say("compiling the export")
        with ThreadPoolExecutor(1) as pool:
            (compiled,) = self._all([pool.submit(self._crew.evaluate, None)])
        trial = CandidateTrial(RoadCandidate(), None, compiled.result())
        self.outcome.trials.append(trial)
        return trial

    def run(
        self,
        road: Road,
        slow: frozenset[str] = frozenset(),
        advised: Callable[[], Sequence[RoadCandidate]] = list,
    ) -> None:
        """Searches until it ends by itself, or is stopped.

        `slow` choices are rewritten only after the first candidates have been compiled. `advised`
        are rewritten with the neighbours of the export, from which they may be several steps away.
        """
        self._slow = slow
        try:
            with ThreadPoolExecutor(self._workers) as pool:
                asked, root = pool.submit(advised), pool.submit(self._crew.rewrite, None, "")
                self._all([root])
                base = replace(self.outcome.trials[0], module=root.result())
                self.outcome.trials[0] = base
                self._modules[RoadCandidate()] = base.module
                # Recorded, so that a candidate that changes nothing is not compiled.
                self._is_new(root.result())
                self._expand(base, road, pool)
                self._all([asked])
                new = (each for each in asked.result() if each not in self._modules)
                self._rewrite([(base, candidate) for candidate in new], pool)
                self._rounds(road, pool)
        except OutOfTimeError:
            self.outcome.ended = self._cut_short()
        refused = self._refused.items()
        self.outcome.refused = {text: why for text, why in refused if text not in self._accepted}

    def record(self) -> dict[str, Any]:
        """Returns the trials as plain data, for `replay`."""
        return {
            "trials": [trial.candidate.to_json() for trial in self.outcome.trials[1:]],
            "expected": [trial.expected_ns for trial in self.outcome.trials[1:]],
            "refused": self.outcome.refused,
            "ended": self.outcome.ended,
        }

    def replay(self, record: dict[str, Any]) -> None:
        """Repeats the trials of an earlier search, whose answers are in the store."""
        tried = [RoadCandidate.from_json(each) for each in record["trials"]]
        if self.compile_all(list(zip(tried, record["expected"], strict=True))):
            self.outcome.refused = record["refused"]
            self.outcome.ended = (
                f"read from an earlier run, in which {record['ended']}; --no-cache searches again"
            )
        else:
            self.outcome.ended = f"looking up an earlier run, {self.outcome.ended}"

    def compile_all(self, listed: Sequence[tuple[RoadCandidate, float | None]]) -> bool:
        """Rewrites and compiles candidates, given with their expected ns, in this order.

        Returns False if the search was cut short before the last one.
        """
        try:
            with ThreadPoolExecutor(self._workers) as pool:
                for start in range(0, len(listed), self._workers):
                    some = listed[start : start + self._workers]
                    modules = self._all([pool.submit(self._module, each) for each, _ in some])
                    trials = [
                        CandidateTrial(candidate, module.result(), expected_ns=expected)
                        for (candidate, expected), module in zip(some, modules, strict=True)
                        if module.result() is not None
                    ]
                    self._compile(trials, pool)
        except OutOfTimeError:
            self.outcome.ended = self._cut_short()
            return False
        return True

    def best_first(self, memory: float) -> list[CandidateTrial]:
        """Returns the compiled trials that are better than the export, the best first.

        `memory` is in bytes of a device.
        """
        ranked = sorted(
            (rank(trial.figures, memory), len(trial.candidate.choices), number)
            for number, trial in enumerate(self.outcome.trials)
            if trial.figures is not None
        )
        numbers = [number for *_, number in ranked]
        return [self.outcome.trials[number] for number in numbers[: numbers.index(0)]]

    def _cut_short(self) -> str:
        return "interrupted" if self._stop.is_set() else BUDGET_SPENT

    def replace(self, trial: CandidateTrial, other: CandidateTrial) -> bool:
        """Replaces a trial by another; returns True if the other is now the best."""
        self.outcome.trials = [other if each is trial else each for each in self.outcome.trials]
        return self.best is other

    def reject(self, trial: CandidateTrial, reason: str) -> None:
        """Removes the figures of a trial, so that it cannot be the best."""
        out = replace(trial, figures=None, refused=reason)
        self.outcome.trials = [out if each is trial else each for each in self.outcome.trials]

    @property
    def best(self) -> CandidateTrial:
        """The best compiled trial; the export if none is better by `_WORTH`.

        If none fits the memory, a trial with less memory is better only if it is no slower.
        """
        base = self.outcome.trials[0]
        assert base.figures is not None
        too_large = base.figures.needed_bytes > self._memory
        # No slower than the export without contention; anything if that does not fit the memory.
        allowed = [
            trial
            for trial in self.outcome.trials
            if trial.figures is not None
            and (too_large or trial.figures.total_ns <= base.figures.total_ns)
        ]
        best = min(allowed, key=self._rank)
        assert best.figures is not None
        if best.figures.needed_bytes > self._memory:
            most = base.figures.contended_ns
            best = min((t for t in allowed if _time_of(t) <= most), key=self._rank)
        return best if self._gains(best, base) else base

    def _rounds(self, road: Road, pool: ThreadPoolExecutor) -> None:
        most_trials = self._candidates
        while True:
            # The first trial is the export, which is not counted.
            if most_trials is not None and len(self.outcome.trials) > most_trials:
                were = "was" if most_trials == 1 else "were"
                self.outcome.ended = f"{candidates(most_trials)} {were} compiled"
                return
            for trial in self._promising():
                self._expand(trial, road, pool)
            # Candidates are expanded by their expected time only once one has been compiled.
            if len(self.outcome.trials) > 1:
                most = self._most_ns()
                fresh = [
                    trial for trial in self._by_promise() if trial.candidate not in self._expanded
                ]
                for trial in [trial for trial in fresh[:_FORESEEN] if _time_of(trial) <= most]:
                    self._expand(trial, road, pool)
            chosen = self._take_next_trials()
            if len(self.outcome.trials) > 1 or not chosen:
                # Rewrites the neighbours that were deferred.
                later, self._slow_neighbours = self._slow_neighbours, []
                if not chosen:
                    later, self._last_neighbours = later + self._last_neighbours, []
                later = [pair for pair in later if pair[1] not in self._modules]
                self._say(f"rewriting {len(later)} more")
                self._rewrite(later, pool)
                chosen = chosen or self._take_next_trials()
            if not chosen:
                self.outcome.ended = self.outcome.ended or "no candidate was left to try"
                return
            before = self.best
            self._compile(chosen, pool)
            improved = self._gains(self.best, before)
            self._in_vain = 0 if improved else self._in_vain + len(chosen)
            self._say("")
            if self._in_vain >= _PATIENCE:
                self.outcome.ended = f"{_PATIENCE} candidates in a row gained no time"
                return

    def _promising(self) -> list[CandidateTrial]:
        """Returns the best trials that are not yet expanded.

        A trial with the same schedule times as an earlier one comes after all others. So does a
        trial that the compiler refused: one of its neighbours may compile.
        """
        most = self._most_ns()
        seen: set[tuple[float, ...]] = set()
        fresh: list[tuple[bool, bool, float, float, int]] = []
        for number, trial in enumerate(self.outcome.trials):
            figures = trial.figures
            alike = figures is not None and figures.times in seen
            seen.update([figures.times] if figures is not None else [])
            expected = _time_of(trial)
            if trial.candidate not in self._expanded and expected <= most:
                excess = 0.0 if figures is None else rank(figures, self._memory)[0]
                fresh.append((alike, figures is None, excess, expected, number))
        return [self.outcome.trials[number] for *_, number in sorted(fresh)[:_EXPANDED]]

    def _expand(self, trial: CandidateTrial, road: Road, pool: ThreadPoolExecutor) -> None:
        """Rewrites the neighbours of a candidate; new modules wait to be compiled."""
        self._expanded.add(trial.candidate)
        around = [c for c in neighbours(trial.candidate, road) if c not in self._modules]
        slow = [c for c in around if not self._slow.isdisjoint(c.passes)]
        self._slow_neighbours += [(trial, candidate) for candidate in slow]
        # Passes for per-device programs refuse most whole ones, so these come last.
        is_whole = trial.module is not None and trial.module.whole
        last = [
            c
            for c in around
            if is_whole and c not in slow and RoadStage.PARTITION not in dict(c.choices)
            if c.choices and c.choices[-1][0] > RoadStage.PARTITION
        ]
        self._last_neighbours += [(trial, candidate) for candidate in last]
        quick = [(trial, c) for c in around if c not in slow and c not in last]
        self._say(f"rewriting {len(quick)} neighbours of {trial.candidate or 'the export'}")
        self._rewrite(quick, pool)

    def _rewrite(
        self, pairs: Sequence[tuple[CandidateTrial, RoadCandidate]], pool: ThreadPoolExecutor
    ) -> None:
        """Rewrites candidates, each paired with the trial that it is a neighbour of."""
        futures = [pool.submit(self._module, candidate) for _, candidate in pairs]
        for (trial, candidate), future in zip(pairs, self._all(futures), strict=True):
            module = future.result()
            self._modules[candidate] = module
            if module is None or not self._is_new(module):
                continue
            change = change_between(trial.candidate, candidate)
            # The expected time is that of `trial` times the model's ratio of the two.
            assert trial.module is not None
            before, after = trial.module.predicted_ns, module.predicted_ns
            ratio = after / before if before and after else 1.0
            ns = (after or 0.0) if math.isinf(_time_of(trial)) else _time_of(trial) * ratio
            self._waiting.append(
                CandidateTrial(
                    candidate,
                    module,
                    expected_ns=ns,
                    expected_bytes=_expected_bytes(trial, module, change),
                    change=change,
                )
            )

    def _is_new(self, module: CandidateModule) -> bool:
        """Returns True if no earlier module is the same, and records this one.

        Modules are the same if their bytes are equal. Programs for all devices are also the same if
        the model predicts equal time and memory for them, partitioned."""
        told = (module.predicted_ns, module.predicted_bytes)
        alike: set[object] = {module.digest}
        if module.whole and None not in told:
            alike.add(told)
        is_new = self._known.isdisjoint(alike)
        self._known |= alike
        return is_new

    def _module(self, candidate: RoadCandidate) -> CandidateModule | None:
        """Rewrites the export by a candidate's passes; None if a pass refuses."""
        module: CandidateModule | None = None
        for stage, text in candidate.choices:
            if self._stop.is_set():
                raise OutOfTimeError
            try:
                module = self._crew.rewrite(module, text)
            except ToolError as error:
                # Passes for per-device programs refuse every whole program: no reason to report.
                before = module or self._modules.get(RoadCandidate())
                if stage <= RoadStage.PARTITION or not (before and before.whole):
                    self._refused.setdefault(text, error.diagnostic.message)
                return None
            self._accepted.add(text)
        return module

    def _take_next_trials(self) -> list[CandidateTrial]:
        """Removes and returns the waiting trials to compile next, those expected to be fastest."""
        most = self._most_ns()
        hopeful: list[CandidateTrial] = []
        for trial in self._by_promise():
            # `partition` alone is always compiled: the model takes the export to be partitioned as
            # Shardy does, but the compiler may do worse.
            (stage, text), *others = trial.candidate.choices
            alone = not others and stage is RoadStage.PARTITION and "partitioner=" not in text
            if alone or _time_of(trial) <= most:
                hopeful.append(trial)
        count = max(_AT_ONCE, self._workers)
        if self._candidates is not None:
            count = min(_AT_ONCE, self._candidates - (len(self.outcome.trials) - 1))
        chosen = _diverse_trials(hopeful, count)
        self._waiting = [trial for trial in self._waiting if trial not in chosen]
        return chosen

    def _by_promise(self) -> list[CandidateTrial]:
        """Returns the trials that wait to be compiled, the most promising first."""
        return sorted(self._waiting, key=_Experience(self.outcome.trials, self._memory).promise)

    def _most_ns(self) -> float:
        """Returns the longest time that is still considered; infinite if no trial fits."""
        best = self.best.figures
        assert best is not None
        fits = best.needed_bytes <= self._memory
        return _HOPELESS * best.contended_ns if fits else float("inf")

    def _compile(self, trials: Sequence[CandidateTrial], pool: ThreadPoolExecutor) -> None:
        """Compiles trials and adds them to the outcome, those in time also if others are not."""
        self._say(", ".join(str(trial.candidate) for trial in trials))
        futures = [pool.submit(self._compiled_trial, trial) for trial in trials]
        try:
            self._all(futures)
        finally:
            done = [f for f in futures if f.done() and not f.cancelled() and not f.exception()]
            self.outcome.trials += [future.result() for future in done]

    def _compiled_trial(self, trial: CandidateTrial) -> CandidateTrial:
        assert trial.module is not None
        try:
            return replace(trial, figures=self._crew.evaluate(trial.module))
        except ToolError as error:
            return replace(trial, refused=error.diagnostic.message)

    def _all[F: Future[Any]](self, futures: list[F]) -> list[F]:
        """Waits for all; raises OutOfTimeError if one ran out of time or the search is stopped."""
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=_POLL)
            if self._stop.is_set():
                self._crew.end()
            if self._stop.is_set() or any(
                isinstance(future.exception(), OutOfTimeError) for future in done
            ):
                for future in pending:
                    future.cancel()
                self._crew.end()
                wait(pending)
                raise OutOfTimeError
        return futures

    def _rank(self, trial: CandidateTrial) -> tuple[tuple[float, float], int]:
        assert trial.figures is not None
        return rank(trial.figures, self._memory), len(trial.candidate.choices)

    def _gains(self, trial: CandidateTrial, other: CandidateTrial) -> bool:
        """Returns True if a trial exceeds the memory by less, or is faster by at least `_WORTH`."""
        assert trial.figures is not None
        assert other.figures is not None
        excess, ns = rank(trial.figures, self._memory)
        more, longer = rank(other.figures, self._memory)
        return excess < more or (excess == more and ns < (1 - _WORTH) * longer)

    def progress(self, doing: str) -> Progress:
        """Returns the state of the search beside an activity."""
        compiled = self.outcome.trials
        known = sum(module is not None for module in self._modules.values())
        best = self.best if compiled else None
        return Progress(doing, max(0, len(compiled) - 1), known - 1, best)

    def _say(self, doing: str) -> None:
        self._watch(self.progress(doing))


def _diverse_trials(trials: Sequence[CandidateTrial], count: int) -> list[CandidateTrial]:
    """Returns the first `count` trials, with a second trial of a stage only if others run out.

    Variants of one pass mostly give similar figures, so compiling one of them is enough. A trial
    that differs in several stages counts as a stage of its own.
    """
    seen: set[RoadStage | RoadCandidate] = set()
    first: list[CandidateTrial] = []
    for trial in trials:
        stage = trial.candidate if trial.change is None else trial.change.stage
        if stage not in seen:
            first.append(trial)
        seen.add(stage)
    rest = [trial for trial in trials if trial not in first]
    return (first + rest)[:count]


class _Experience:
    """Corrections of the model's expected times, from the compiler's times so far.

    The model is off by some per cent, mostly by the same ratio for one pass. An untried stage is
    worth a trial even if the model expects slightly less of it.
    """

    def __init__(self, trials: Sequence[CandidateTrial], memory: float) -> None:
        self._memory = memory
        self._tried: Counter[RoadStage] = Counter()
        logs: dict[Change, list[float]] = {}
        for trial in trials:
            if trial.change is None:
                continue
            self._tried[trial.change.stage] += 1
            if trial.figures is not None and trial.figures.runs and trial.expected_ns:
                ratio = math.log(trial.figures.contended_ns / trial.expected_ns)
                logs.setdefault(trial.change, []).append(ratio)
        # One more than the count, so that a single time corrects by half only.
        self._off = {change: sum(each) / (1 + len(each)) for change, each in logs.items()}

    def promise(self, trial: CandidateTrial) -> tuple[int, float, bool, bool, RoadCandidate]:
        """Returns a sort key, least for the next trial to compile: expected to fit, then fast.

        Ties go to trials with a model, then to those that fix the order that the model assumes.
        """
        excess = max(0.0, trial.expected_bytes - self._memory)
        unknown = trial.module is None or trial.module.predicted_ns is None
        ordered = any(stage is RoadStage.ORDER for stage, _ in trial.candidate.choices)
        steps = round(excess / (_ALIKE_BYTES * self._memory))
        hope = trial.expected_ns or 0.0
        if trial.change is not None:
            novelty = _NOVELTY / (1 + self._tried[trial.change.stage])
            hope = hope * math.exp(self._off.get(trial.change, 0.0)) * (1 - novelty)
        return steps, hope, unknown, not ordered, trial.candidate


def _time_of(trial: CandidateTrial) -> float:
    """Returns the compiler's time of a candidate in ns; the expected time if it has none."""
    if trial.figures is not None:
        return trial.figures.contended_ns
    return trial.expected_ns or 0.0


def _expected_bytes(
    origin: CandidateTrial, module: CandidateModule, change: Change | None
) -> float:
    """Expected bytes of a neighbour: those of `origin` times the model's ratio of the two."""
    assert origin.module is not None
    needed = origin.expected_bytes if origin.figures is None else origin.figures.needed_bytes
    before, after = origin.module.predicted_bytes, module.predicted_bytes
    if before and after:
        return needed * after / before
    saves = (
        change is not None and change.stage is RoadStage.MICROBATCHES and change.text is not None
    )
    return needed * (_MICROBATCHES if saves else 1.0)
