"""The search, on a crew that answers from a table instead of compiling."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.optimization.candidate_search import (
    CandidateTrial,
    OptimizationSearch,
    Progress,
)
from stablehlo_tools.optimization.crew import CandidateModule, OutOfTimeError
from stablehlo_tools.optimization.figures import NEVER, Figures
from stablehlo_tools.optimization.optimizer import rewrite_in_one_run
from stablehlo_tools.optimization.option_trials import PROPOSALS, Proposal, gaining, try_options
from stablehlo_tools.optimization.road import RoadCandidate, neighbours
from stablehlo_tools.passes.base import RoadStage
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.targets.compiler_options import NO_OPTIONS, CompilerOptions

FIGURES = Figures(
    total_ns=100.0,
    contended_ns=100.0,
    exposed_ns=10.0,
    compute_ns=90.0,
    work_ns=80.0,
    floor_ns=90.0,
    peak_bytes=100.0,
    compiler_bytes=100,
    collectives=3,
    same_order=True,
    devices=8,
    compiled_by="a table",
    stand_in="",
    schedule="",
)
ROAD = {
    RoadStage.PARTITION: ("divide",),
    RoadStage.SPLIT: ("halve", "quarter"),
    RoadStage.LOOPS: ("ahead",),
    RoadStage.ORDER: ("order",),
}
EVERYTHING = 1000.0  # bytes: more than any


class Table:
    """A crew whose modules are their passes. `gains`: what the set of passes makes of 100 ns."""

    def __init__(self, gains: Mapping[frozenset[str], float], unchanged: set[str] | None = None):
        self.gains = gains
        self.unchanged = unchanged or set()
        self.refuses: dict[str, str] = {}  # passes, and what has to be there for them
        self.dies: set[frozenset[str]] = set()
        self.peaks: dict[frozenset[str], float] = {}
        self.compiled: list[frozenset[str]] = []
        self.smallest = 100
        self.stop_at = ""
        self.stop = threading.Event()

    def rewrite(self, module: CandidateModule | None, passes: str) -> CandidateModule:
        before = "" if module is None else module.digest
        wanted = self.refuses.get(passes)
        if wanted is not None and wanted not in before.split(","):
            raise ToolError(f"{passes} wants {wanted}")
        changes = passes and passes not in self.unchanged
        digest = ",".join(filter(None, (before, passes if changes else "")))
        return CandidateModule(digest, False, min(self.time_of(digest), 150.0) * 2, 100.0)

    def evaluate(self, module: CandidateModule | None) -> Figures:
        applied = frozenset(filter(None, ("" if module is None else module.digest).split(",")))
        self.compiled.append(applied)
        if applied in self.dies:
            raise ToolError("the compiler was ended by SIGSEGV")
        if self.stop_at in applied:
            self.stop.set()
        peak = self.peaks.get(applied, 100.0)
        total = self.time_of(",".join(applied))
        return replace(
            FIGURES,
            total_ns=total,
            contended_ns=total,
            peak_bytes=peak,
            compiler_bytes=self.smallest,
        )

    def time_of(self, digest: str) -> float:
        return self.gains.get(frozenset(filter(None, digest.split(","))), 100.0)

    def end(self) -> None:
        """Nothing runs."""


def searched(
    table: Table,
    memory: float = EVERYTHING,
    candidates: int | None = None,
    advised: Sequence[RoadCandidate] = (),
) -> OptimizationSearch:
    def watch(_: Progress) -> None:
        pass

    search = OptimizationSearch(table, memory, candidates, 2, watch, table.stop)  # pyright: ignore[reportArgumentType]
    search.base()
    search.run(ROAD, advised=lambda: advised)
    return search


def set_of(*passes: str) -> frozenset[str]:
    return frozenset(passes)


def test_a_gain_that_only_comes_with_three_passes_is_found():
    table = Table({set_of("divide"): 110.0, set_of("divide", "halve", "order"): 60.0})
    best = searched(table).best
    assert str(best.candidate) == "divide,halve,order"
    assert best.figures is not None
    assert best.figures.total_ns == 60.0


def test_what_is_advised_is_compiled_before_its_parts():
    advised = RoadCandidate(
        ((RoadStage.PARTITION, "divide"), (RoadStage.SPLIT, "halve"), (RoadStage.ORDER, "order"))
    )
    table = Table({set_of("divide", "halve", "order"): 60.0})
    assert searched(table, candidates=1, advised=[advised]).best.candidate == advised
    assert table.compiled == [set_of(), set_of("divide", "halve", "order")]
    table.compiled.clear()
    assert str(searched(table, candidates=1).best.candidate) == ""


def test_advice_that_a_pass_refuses_is_one_candidate_less():
    advised = RoadCandidate(((RoadStage.PARTITION, "divide"), (RoadStage.SPLIT, "halve")))
    table = Table({set_of("order"): 60.0})
    table.refuses = {"halve": "nothing"}
    assert str(searched(table, advised=[advised]).best.candidate) == "order"


def test_nothing_better_is_the_export():
    table = Table({set_of("divide"): 99.95})  # less than what counts as a gain
    search = searched(table)
    assert search.best is search.outcome.trials[0]
    assert str(search.best.candidate) == ""


def test_candidates_that_come_out_alike_are_compiled_once():
    table = Table({}, unchanged={"halve", "quarter", "ahead"})
    searched(table)
    assert sorted(table.compiled, key=sorted) == [
        set_of(),
        set_of("divide"),
        set_of("divide", "order"),
        set_of("order"),
    ]


def test_what_fits_comes_before_what_is_fast():
    table = Table({set_of("divide"): 50.0, set_of("halve"): 90.0})
    table.peaks = {set_of("divide"): 300.0}
    assert str(searched(table, memory=200.0).best.candidate) == "halve"


def test_where_nothing_fits_less_memory_is_better():
    table = Table({set_of("divide"): 50.0, set_of("quarter"): 150.0})
    table.peaks = {set_of("halve"): 60.0, set_of("quarter"): 55.0}
    table.smallest = 50
    assert str(searched(table, memory=10.0).best.candidate) == "halve"


def test_what_takes_longer_is_only_taken_where_it_fits():
    table = Table({set_of("halve"): 150.0})
    table.peaks = {set_of("halve"): 60.0}
    table.smallest = 50
    assert str(searched(table, memory=70.0).best.candidate) == "halve"
    assert str(searched(table, memory=55.0).best.candidate) == ""


def test_an_export_that_the_compiler_refuses_for_lack_of_memory_is_where_it_begins():
    table = Table({set_of(): NEVER, set_of("divide"): NEVER, set_of("divide", "halve"): 70.0})
    table.peaks = {set_of(): 900.0, set_of("divide"): 500.0}
    search = searched(table, memory=200.0)
    assert str(search.best.candidate).startswith("divide,halve")
    before, after = search.outcome.trials[0].figures, search.best.figures
    assert before is not None
    assert after is not None
    assert after.ratio_to(before) is None
    assert before.to_json()["total_ns"] is None


def test_a_compiler_that_dies_takes_no_other_candidate_with_it():
    table = Table({set_of("divide"): 50.0, set_of("divide", "order"): 70.0})
    table.dies = {set_of("divide")}
    search = searched(table)
    assert str(search.best.candidate) == "divide,order"
    died = [trial for trial in search.outcome.trials if trial.refused]
    assert [str(trial.candidate) for trial in died] == ["divide"]


def test_only_what_no_candidate_could_take_is_said_to_be_refused():
    table = Table({})
    table.refuses = {"halve": "divide", "quarter": "nothing"}
    assert searched(table).outcome.refused == {"quarter": "quarter wants nothing"}


def test_a_number_of_candidates_bounds_the_search_and_decides_it():
    gains = {set_of("divide"): 95.0, set_of("divide", "order"): 80.0}
    one, other = (searched(Table(gains), candidates=5) for _ in range(2))
    assert len(one.outcome.trials) == 6
    assert [str(t.candidate) for t in one.outcome.trials] == [
        str(t.candidate) for t in other.outcome.trials
    ]
    assert one.outcome.ended == "5 candidates were compiled"


def test_nothing_is_rewritten_for_candidates_that_would_not_be_compiled():
    doing: list[str] = []

    def watch(progress: Progress) -> None:
        doing.append(progress.doing)

    table = Table({set_of("divide"): 50.0})
    search = OptimizationSearch(table, EVERYTHING, 4, 2, watch, table.stop)  # pyright: ignore[reportArgumentType]
    search.base()
    search.run(ROAD)
    assert len(search.outcome.trials) == 5
    rewriting = [number for number, text in enumerate(doing) if text.startswith("rewriting")]
    compiling = [number for number, text in enumerate(doing) if text.startswith("divide")]
    assert max(rewriting) < max(compiling)


def test_slow_choices_come_once_others_have_been_compiled():
    table = Table({set_of("quarter", "divide"): 20.0})
    search = OptimizationSearch(table, EVERYTHING, None, 2, lambda _: None, table.stop)  # pyright: ignore[reportArgumentType]
    search.base()
    search.run(ROAD, frozenset({"quarter"}))
    assert str(search.best.candidate) == "divide,quarter"
    first = [str(trial.candidate) for trial in search.outcome.trials[1:5]]
    assert not any("quarter" in candidate for candidate in first)


def test_interrupted_it_has_the_best_so_far():
    table = Table({set_of("divide"): 50.0, set_of("divide", "order"): 20.0})
    table.stop_at = "divide"
    search = searched(table)
    assert search.outcome.ended == "interrupted"
    assert str(search.best.candidate) in {"divide", "divide,order", "divide,halve"}


def test_interrupted_before_the_export_is_compiled_there_is_nothing():
    table = Table({})
    table.stop.set()
    with pytest.raises(OutOfTimeError):
        searched(table)


def test_what_was_tried_can_be_replayed():
    gains = {set_of("divide"): 95.0, set_of("divide", "order"): 80.0}
    first = searched(Table(gains), candidates=5)
    table = Table(gains)
    again = OptimizationSearch(table, EVERYTHING, 5, 2, lambda _: None, table.stop)  # pyright: ignore[reportArgumentType]
    again.base()
    again.replay(first.record())
    assert again.best.candidate == first.best.candidate
    assert again.outcome.ended == (
        "read from an earlier run, in which 5 candidates were compiled; --no-cache searches again"
    )


def test_neighbours_differ_in_one_stage_and_keep_the_order_of_the_road():
    candidate = RoadCandidate(((RoadStage.PARTITION, "divide"), (RoadStage.ORDER, "order")))
    assert [str(each) for each in neighbours(candidate, ROAD)] == [
        "divide",
        "divide,ahead,order",
        "divide,halve,order",
        "divide,quarter,order",
        "order",
    ]


def test_what_contention_makes_of_a_time_decides_but_no_time_gets_worse():
    table = Table({set_of("divide"): 60.0, set_of("halve"): 50.0})
    search = searched(table)
    trials = search.outcome.trials
    contended = {"divide": 80.0, "halve": 90.0}
    search.outcome.trials = [
        replace(trial, figures=replace(trial.figures, contended_ns=ns))
        if trial.figures and (ns := contended.get(str(trial.candidate)))
        else trial
        for trial in trials
    ]
    assert str(search.best.candidate) == "divide"
    search.outcome.trials = [
        replace(trial, figures=replace(trial.figures, total_ns=101.0))
        if trial.figures and str(trial.candidate) == "divide"
        else trial
        for trial in search.outcome.trials
    ]
    assert str(search.best.candidate) == "halve"


def test_a_pass_that_changed_nothing_is_not_in_the_answer():
    class Crew:
        """Passes of which `split-batch` says that it splits nothing, and `rematerialize` speaks."""

        def rewrite(self, _: str | None, pipeline: str) -> CandidateModule:
            digest = pipeline.replace(",split-batch", "")
            said = [f"{name}: …" for name in ("split-batch", "rematerialize") if name in pipeline]
            return CandidateModule(digest, False, None, None, tuple(said))

        def evaluate(self, _: CandidateModule) -> Figures:
            raise AssertionError("the module is that of the search")

    choices = (
        (RoadStage.PARTITION, "partition{hardware=h100}"),
        (RoadStage.RECOMPUTE, "rematerialize"),
        (RoadStage.SPLIT, "split-batch"),
    )
    module = CandidateModule("partition{hardware=h100},rematerialize", False, None, None)
    best = CandidateTrial(RoadCandidate(choices), module)
    found = rewrite_in_one_run(cast("Any", Crew()), best)
    assert str(found.candidate) == "partition{hardware=h100},rematerialize"


def test_options_that_gain_only_together_are_joined(monkeypatch: pytest.MonkeyPatch):
    names = ("xla_a", "xla_b", "xla_c")
    proposals = tuple(Proposal(CompilerOptions.parse([f"{n}=1"]), n) for n in names)
    monkeypatch.setitem(PROPOSALS, Target.GPU, proposals)
    ns: dict[tuple[str, ...], float] = {
        (): 100.0,
        ("xla_a",): 96.0,
        ("xla_b",): 100.5,
        ("xla_a", "xla_b"): 93.0,
    }

    def evaluate(_: CandidateModule | None, more: CompilerOptions = NO_OPTIONS) -> Figures:
        total = ns.get(tuple(name for name, _ in more.values), 101.0)
        return replace(FIGURES, total_ns=total, contended_ns=total)

    crew: Any = Mock(evaluate=evaluate)
    module = CandidateModule("answer", False, None, None)
    trials = try_options(crew, Target.GPU, NO_OPTIONS, module, EVERYTHING, 2, lambda: False)
    ratio, best = gaining(trials, evaluate(None), EVERYTHING)[0]
    assert best.proposal.options == CompilerOptions.parse(["xla_a=1", "xla_b=1"])
    assert ratio == 0.93
    assert [len(each.proposal.options.values) for each in trials] == [1, 1, 1, 2, 2, 3]
