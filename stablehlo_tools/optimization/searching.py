"""The search: which candidates are rewritten, which of them compiled, in which order.

The compiler decides, the model leads. From the export on, the neighbours of the best candidates are
rewritten; a neighbour is expected to take what the candidate took in the compiler's schedule, times
what the model says of the one against the other. The most promising are compiled, a few
at a time, and so on, until there is nothing left, the budget is spent, or many in a row brought
nothing. Candidates that come out as the same module are one.

Rounds do not depend on who was ready first, so that the same number of candidates gives the same
answer on any machine.
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
from stablehlo_tools.optimization.crew import Crew, Module, OutOfTimeError
from stablehlo_tools.optimization.figures import Figures
from stablehlo_tools.optimization.road import Candidate, Change, Road, change_between, neighbours
from stablehlo_tools.passes.road import Stage

BUDGET_SPENT = "the budget was spent"  # how a search ended
_AT_ONCE = 4  # candidates compiled in a round, on any number of cores
_EXPANDED = 2  # candidates whose neighbours are looked at in a round
_FORESEEN = 1  # such that are not yet compiled
_HOPELESS = 1.3  # times the best: neither compiled nor built upon
_NOVELTY = 0.05  # of the time: how much less is hoped of what was never tried
_ALIKE_BYTES = 0.02  # of the memory: what exceeds it by so little more is as good
_MICROBATCHES = 0.75  # of the memory: what is hoped of a loop over microbatches, without a model
_PATIENCE = 32  # candidates in a row that bring nothing
_WORTH = 1e-3  # of the time: less is no gain
_POLL = 0.2  # seconds


@dataclass(frozen=True)
class Trial:
    """A candidate that was compiled, or why it was not.

    `expected_ns`, `expected_bytes`: what the model took it to be. `change`: what it was made by
    from the candidate that it is a neighbour of.
    """

    candidate: Candidate
    module: Module | None = None
    figures: Figures | None = None
    expected_ns: float | None = None
    expected_bytes: float = 0.0
    refused: str = ""
    change: Change | None = None


@dataclass(frozen=True)
class Progress:
    """What is being done, for who watches."""

    doing: str
    tried: int
    best: Trial | None


@dataclass
class Outcome:
    """All that was tried, in order, the export first; why the search ended."""

    trials: list[Trial] = field(default_factory=list[Trial])
    refused: dict[str, str] = field(default_factory=dict[str, str])  # by every candidate, and why
    ended: str = ""


def candidates(count: int) -> str:
    """`1 candidate`, `2 candidates`."""
    return f"{count} candidate{'' if count == 1 else 's'}"


def rank(figures: Figures, memory: float) -> tuple[float, float]:
    """What comes first is better: what fits, then what is faster; else what needs less memory."""
    excess = max(0.0, figures.needed_bytes - memory)
    return (excess, figures.contended_ns)


class Search:
    """One search; `outcome` is what it has found so far, at any time.

    It ends once so many `candidates` have been compiled; `memory` is in bytes of a device.
    """

    def __init__(
        self,
        crew: Crew,
        memory: float,
        candidates: int | None,
        workers: int,
        watch: Callable[[Progress], None],
        stop: threading.Event,
    ) -> None:
        self.outcome = Outcome()
        self._crew = crew
        self._memory = memory
        self._candidates = candidates
        self._workers = workers
        self._watch = watch
        self._stop = stop
        self._modules: dict[Candidate, Module | None] = {}
        self._known: set[object] = set()  # by what all that was compiled, or is waiting, is known
        self._waiting: list[Trial] = []
        self._expanded: set[Candidate] = set()
        self._in_vain = 0
        self._slow: frozenset[str] = frozenset()
        self._slow_neighbours: list[tuple[Trial, Candidate]] = []
        self._accepted: set[str] = set()
        self._refused: dict[str, str] = {}

    def base(self) -> Trial:
        """The export as the compiler schedules it. Raises ToolError where it refuses that."""
        self._say("compiling the export")
        with ThreadPoolExecutor(self._workers) as pool:
            root = pool.submit(self._crew.rewrite, None, "")
            compiled = pool.submit(self._crew.evaluate, None)
            self._all([root, compiled])
        module, figures = root.result(), compiled.result()
        self._modules[Candidate()] = module
        self._is_new(module)
        trial = Trial(Candidate(), module, figures)
        self.outcome.trials.append(trial)
        return trial

    def run(
        self,
        road: Road,
        slow: frozenset[str] = frozenset(),
        advised: Callable[[], Sequence[Candidate]] = list,
    ) -> None:
        """Searches until it ends by itself, or is stopped.

        `slow` choices are only made once the first candidates have been compiled. `advised` are
        rewritten before any neighbour: the model knows more of them than it sees one step ahead.
        """
        self._slow = slow
        try:
            with ThreadPoolExecutor(self._workers) as pool:
                self._say("looking for what to do")
                (asked,) = self._all([pool.submit(advised)])
                base = self.outcome.trials[0]
                self._rewrite([(base, candidate) for candidate in asked.result()], pool)
                self._rounds(road, pool)
        except OutOfTimeError:
            self.outcome.ended = self._cut_short()
        refused = self._refused.items()
        self.outcome.refused = {text: why for text, why in refused if text not in self._accepted}

    def record(self) -> dict[str, Any]:
        """What was tried, for `replay`."""
        return {
            "trials": [trial.candidate.to_json() for trial in self.outcome.trials[1:]],
            "expected": [trial.expected_ns for trial in self.outcome.trials[1:]],
            "refused": self.outcome.refused,
            "ended": self.outcome.ended,
        }

    def replay(self, record: dict[str, Any]) -> None:
        """Tries what an earlier search tried, whose answers are known."""
        tried = [Candidate.from_json(each) for each in record["trials"]]
        try:
            with ThreadPoolExecutor(self._workers) as pool:
                modules = self._all([pool.submit(self._module, each) for each in tried])
                trials = [
                    Trial(candidate, module.result(), expected_ns=expected)
                    for candidate, module, expected in zip(
                        tried, modules, record["expected"], strict=True
                    )
                    if module.result() is not None
                ]
                compiled = self._all([pool.submit(self._compiled_trial, t) for t in trials])
        except OutOfTimeError:
            self.outcome.ended = f"looking up an earlier run, {self._cut_short()}"
            return
        self.outcome.trials += [future.result() for future in compiled]
        self.outcome.refused = record["refused"]
        self.outcome.ended = (
            f"looked up from an earlier run, in which {record['ended']}; --no-cache searches anew"
        )

    def _cut_short(self) -> str:
        return "interrupted" if self._stop.is_set() else BUDGET_SPENT

    def replace(self, trial: Trial, other: Trial) -> bool:
        """Puts another trial in the place of one; whether that is now the best."""
        self.outcome.trials = [other if each is trial else each for each in self.outcome.trials]
        return self.best is other

    def reject(self, trial: Trial, reason: str) -> None:
        """Takes a trial out of the running."""
        out = replace(trial, figures=None, refused=reason)
        self.outcome.trials = [out if each is trial else each for each in self.outcome.trials]

    @property
    def best(self) -> Trial:
        """The best of what was compiled, the export where nothing is better by enough.

        Where nothing fits, less memory is only better if it takes no longer.
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
            if most_trials is not None and len(self.outcome.trials) > most_trials:
                were = "was" if most_trials == 1 else "were"
                self.outcome.ended = f"{candidates(most_trials)} {were} compiled"
                return
            for trial in self._promising():
                self._expand(trial, road, pool)
            if len(self.outcome.trials) > 1:  # first what the others are measured by
                most = self._most_ns()
                fresh = [
                    trial for trial in self._by_promise() if trial.candidate not in self._expanded
                ]
                for trial in [trial for trial in fresh[:_FORESEEN] if _time_of(trial) <= most]:
                    self._expand(trial, road, pool)
            chosen = self._chosen()
            if len(self.outcome.trials) > 1 or not chosen:
                # Rewrites the neighbours that were left for later.
                later = [pair for pair in self._slow_neighbours if pair[1] not in self._modules]
                self._slow_neighbours = []
                self._say(f"rewriting {len(later)} more")
                self._rewrite(later, pool)
                chosen = chosen or self._chosen()
            if not chosen:
                self.outcome.ended = self.outcome.ended or "nothing was left to try"
                return
            before = self.best
            self._say(", ".join(str(trial.candidate) for trial in chosen))
            futures = [pool.submit(self._compiled_trial, trial) for trial in chosen]
            try:
                self._all(futures)
            finally:
                done = [f for f in futures if f.done() and not f.cancelled() and not f.exception()]
                self.outcome.trials += [future.result() for future in done]
            improved = self._gains(self.best, before)
            self._in_vain = 0 if improved else self._in_vain + len(chosen)
            self._say("")
            if self._in_vain >= _PATIENCE:
                self.outcome.ended = f"{_PATIENCE} candidates in a row brought nothing"
                return

    def _promising(self) -> list[Trial]:
        """The best whose neighbours nobody has looked at.

        Of those that the compiler schedules alike, the second comes after all others; so does what
        it did not take, which a neighbour may mend.
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

    def _expand(self, trial: Trial, road: Road, pool: ThreadPoolExecutor) -> None:
        """Rewrites the neighbours of a candidate; those that are new wait to be compiled."""
        self._expanded.add(trial.candidate)
        around = [c for c in neighbours(trial.candidate, road) if c not in self._modules]
        slow = [c for c in around if not self._slow.isdisjoint(c.passes)]
        self._slow_neighbours += [(trial, candidate) for candidate in slow]
        quick = [(trial, candidate) for candidate in around if candidate not in slow]
        self._say(f"rewriting {len(quick)} neighbours of {trial.candidate or 'the export'}")
        self._rewrite(quick, pool)

    def _rewrite(self, pairs: Sequence[tuple[Trial, Candidate]], pool: ThreadPoolExecutor) -> None:
        """Rewrites candidates, each with what it is a neighbour of; the new ones then wait."""
        futures = [pool.submit(self._module, candidate) for _, candidate in pairs]
        for (trial, candidate), future in zip(pairs, self._all(futures), strict=True):
            module = future.result()
            self._modules[candidate] = module
            if module is None or not self._is_new(module):
                continue
            change = change_between(trial.candidate, candidate)
            self._waiting.append(
                Trial(
                    candidate,
                    module,
                    expected_ns=_expected_ns(trial, module),
                    expected_bytes=_expected_bytes(trial, module, change),
                    change=change,
                )
            )

    def _is_new(self, module: Module) -> bool:
        """Whether nothing came out like a module before, in its bytes, or of programs for all
        devices in what the model says of them partitioned; it is known from now on."""
        told = (module.predicted_ns, module.predicted_bytes)
        alike: set[object] = {module.digest}
        if module.whole and None not in told:
            alike.add(told)
        is_new = self._known.isdisjoint(alike)
        self._known |= alike
        return is_new

    def _module(self, candidate: Candidate) -> Module | None:
        """The module of a candidate; None where a pass refuses."""
        module = self._modules[Candidate()]
        assert module is not None, "the export is a module"
        for stage, text in candidate.choices:
            if self._stop.is_set():
                raise OutOfTimeError
            try:
                module = self._crew.rewrite(module, text)
            except ToolError as error:
                # Of the whole program, passes for one device's say no more than that it is whole.
                if not module.whole or stage <= Stage.PARTITION:
                    self._refused.setdefault(text, error.diagnostic.message)
                return None
            self._accepted.add(text)
        return module

    def _chosen(self) -> list[Trial]:
        """The next to compile: what is expected to be fastest."""
        most = self._most_ns()
        hopeful = [trial for trial in self._by_promise() if _time_of(trial) <= most]
        count = _AT_ONCE
        if self._candidates is not None:
            count = min(count, self._candidates - (len(self.outcome.trials) - 1))
        chosen = _varied(hopeful, count)
        self._waiting = [trial for trial in self._waiting if trial not in chosen]
        return chosen

    def _by_promise(self) -> list[Trial]:
        """What waits to be compiled, the most promising first."""
        experience = _Experience(self.outcome.trials, self._memory)
        return sorted(self._waiting, key=experience.promise)

    def _most_ns(self) -> float:
        """What takes longer is not looked at; where nothing fits yet, time does not matter."""
        best = self.best.figures
        assert best is not None
        fits = best.needed_bytes <= self._memory
        return _HOPELESS * best.contended_ns if fits else float("inf")

    def _compiled_trial(self, trial: Trial) -> Trial:
        assert trial.module is not None
        try:
            figures = self._crew.evaluate(trial.module)
        except ToolError as error:
            return replace(trial, refused=error.diagnostic.message)
        return replace(trial, figures=figures)

    def _all[F: Future[Any]](self, futures: list[F]) -> list[F]:
        """Waits for all; raises OutOfTimeError where one ran out of time, or somebody stops it."""
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

    def _rank(self, trial: Trial) -> tuple[tuple[float, float], int]:
        assert trial.figures is not None
        return rank(trial.figures, self._memory), len(trial.candidate.choices)

    def _gains(self, trial: Trial, other: Trial) -> bool:
        """Whether one is better than another by more than nothing."""
        assert trial.figures is not None
        assert other.figures is not None
        excess, ns = rank(trial.figures, self._memory)
        more, longer = rank(other.figures, self._memory)
        return excess < more or (excess == more and ns < (1 - _WORTH) * longer)

    def _say(self, doing: str) -> None:
        compiled = self.outcome.trials
        best = self.best if compiled else None
        self._watch(Progress(doing, max(0, len(compiled) - 1), best))


def _varied(trials: Sequence[Trial], count: int) -> list[Trial]:
    """The first trials, but none of a stage that has one already while there are others.

    Variants of one pass mostly come out alike: what one of them shows, the others would not add to.
    What differs in several stages is like no other.
    """
    seen: set[Stage | Candidate] = set()
    first: list[Trial] = []
    for trial in trials:
        stage = trial.candidate if trial.change is None else trial.change.stage
        if stage not in seen:
            first.append(trial)
        seen.add(stage)
    rest = [trial for trial in trials if trial not in first]
    return (first + rest)[:count]


class _Experience:
    """What the compiler made of changes so far, beside what the model had said of them.

    The model is off by some per cent, and mostly alike for one pass; and a stage of which nothing
    has been compiled is worth a try, even if the model expects a little less of it.
    """

    def __init__(self, trials: Sequence[Trial], memory: float) -> None:
        self._memory = memory
        self._tried: Counter[Stage] = Counter()
        logs: dict[Change, list[float]] = {}
        for trial in trials:
            if trial.change is None:
                continue
            self._tried[trial.change.stage] += 1
            if trial.figures is not None and trial.figures.runs and trial.expected_ns:
                ratio = math.log(trial.figures.contended_ns / trial.expected_ns)
                logs.setdefault(trial.change, []).append(ratio)
        self._off = {change: sum(each) / (1 + len(each)) for change, each in logs.items()}

    def promise(self, trial: Trial) -> tuple[int, float, bool, bool, Candidate]:
        """A key that is least for what to compile next: what is expected to fit, then to be fast.

        Of equals, what has a model, and what holds the compiler to the order the model counts on.
        """
        excess = max(0.0, trial.expected_bytes - self._memory)
        unknown = trial.module is None or trial.module.predicted_ns is None
        ordered = any(stage is Stage.ORDER for stage, _ in trial.candidate.choices)
        steps = round(excess / (_ALIKE_BYTES * self._memory))
        hope = trial.expected_ns or 0.0
        if trial.change is not None:
            novelty = _NOVELTY / (1 + self._tried[trial.change.stage])
            hope = hope * math.exp(self._off.get(trial.change, 0.0)) * (1 - novelty)
        return steps, hope, unknown, not ordered, trial.candidate


def _time_of(trial: Trial) -> float:
    """The compiler's time of a candidate; what was expected of it where the compiler has none."""
    if trial.figures is not None:
        return trial.figures.contended_ns
    return trial.expected_ns or 0.0


def _expected_bytes(origin: Trial, module: Module, change: Change | None) -> float:
    """What a neighbour needs of memory, if the model is as wrong about both."""
    assert origin.module is not None
    needed = origin.expected_bytes if origin.figures is None else origin.figures.needed_bytes
    before, after = origin.module.predicted_bytes, module.predicted_bytes
    if before and after:
        return needed * after / before
    saves = change is not None and change.stage is Stage.MICROBATCHES and change.text is not None
    return needed * (_MICROBATCHES if saves else 1.0)


def _expected_ns(origin: Trial, module: Module) -> float:
    """The compiler's time of a neighbour, if the model is as wrong about both."""
    assert origin.module is not None
    before, after = origin.module.predicted_ns, module.predicted_ns
    if math.isinf(_time_of(origin)):
        return after or 0.0
    ratio = after / before if before and after else 1.0
    return _time_of(origin) * ratio
