"""The schedules by name, including `auto`, and a comparison of all of them for one setting.

The names are those of the command line. `compare` recommends one of them, in a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stablehlo_tools.diagnostics import ToolError, nearest
from stablehlo_tools.schedules.explicit_tables import with_communication
from stablehlo_tools.schedules.generators.named import (
    AUTO,
    MOST_CHUNKS,
    NAMED,
    NamedSchedule,
    buildable,
)
from stablehlo_tools.schedules.lockstep import (
    backward_lockstep,
    forward_lockstep,
    training_lockstep,
)
from stablehlo_tools.schedules.setting import Costs, ScheduleSetting
from stablehlo_tools.schedules.table import Table, drop_idle_cells
from stablehlo_tools.schedules.table_simulator import Timeline, simulate
from stablehlo_tools.schedules.validator import check

# Schedules that `expand-pipeline` writes as one program for all ranks.
ONE_PROGRAM = frozenset({"gpipe", "circular", "1f1b", "eager-1f1b"})
_ONE_PROGRAM = "expand-pipeline"
_SAME = 5e-4  # makespans that differ by no more than this share of one count as equal


def meant_by(name: str, *others: str) -> str:
    """Returns the name of a schedule, or one of `others`, that is near `name`; "" if none is."""
    return nearest(name.lower(), [*(entry.name for entry in _ENTRIES), *others])


def entries() -> tuple[NamedSchedule, ...]:
    """Every named schedule, in the order in which `compare` breaks ties."""
    return _ENTRIES


def build(name: str, setting: ScheduleSetting) -> Table:
    """Builds the named schedule for a setting. Raises ToolError if there is none."""
    return entry_named(name).table(setting)


def entry_named(name: str) -> NamedSchedule:
    """Returns the schedule of that name. Raises ToolError if there is none."""
    entry = {entry.name: entry for entry in _ENTRIES}.get(name)
    if entry is None:
        known = [entry.name for entry in _ENTRIES]
        near = meant_by(name)
        meant = f"did you mean {near!r}? " if near else ""
        raise ToolError(
            f"unknown schedule {name!r}; {meant}known are: {', '.join(known)}",
            instead=(name, near) if near else None,
        )
    return entry


def compare(
    setting: ScheduleSetting,
    max_chunks: int = MOST_CHUNKS,
    blocking: bool = False,
    search: bool = True,
) -> ScheduleComparison:
    """Builds, validates and times every training schedule of the catalogue.

    Sorted: those that fit the memory limit first, then by makespan, memory and the catalogue's
    order. Without a number of chunks in the setting, those that leave it free are tried with
    several, up to `max_chunks`. `auto`, which searches, is left out unless `search`.
    """
    tables: list[tuple[str, Table]] = []
    why = {
        entry.name: "forward only: not compared with training schedules"
        for entry in entries()
        if not entry.training
    }
    for entry, built in buildable(setting, max_chunks):
        if isinstance(built, ToolError):
            why.setdefault(entry.name, built.diagnostic.message.removeprefix(f"{entry.name}: "))
        elif setting.chunks is None and built.placement.chunks > max_chunks:
            why.setdefault(entry.name, f"it has more stages a rank than {max_chunks}")
        else:
            tables.append((entry.name, built))
    bound = None
    if search:
        # The search is imported only if needed: most commands write one named schedule.
        from stablehlo_tools.schedules.search.auto import find_best

        try:
            named = [table for _, table in tables if table.sequence_slices == 1]
            best = find_best(setting, most_chunks=max_chunks, named=named)
            tables.append((AUTO, best.table))
            bound = best.bound
        except ToolError as error:
            why[AUTO] = error.diagnostic.message
    candidates = [candidate_of(name, table, setting, blocking) for name, table in tables]
    candidates += [
        _in_lockstep(candidate, table, setting.costs_of(table))
        for candidate, (_, table) in zip(candidates, tables, strict=True)
        if candidate.name in ONE_PROGRAM
    ]
    # A schedule of several chunk counts may fail for one and exist for another.
    there = {name for name, _ in tables}
    refusals = [Refusal(name, reason) for name, reason in why.items() if name not in there]
    return ScheduleComparison(setting, tuple(sorted(candidates, key=order)), tuple(refusals), bound)


@dataclass(frozen=True)
class ScheduleComparison:
    """The schedules for a setting, best first, and the refusals of the others.

    bound: a lower bound on the makespan on the searched placements; None without a search.
    """

    setting: ScheduleSetting
    candidates: tuple[ScheduleCandidate, ...]
    refusals: tuple[Refusal, ...]
    bound: float | None

    @property
    def advice(self) -> str:
        """A sentence that recommends a schedule; if none fits the limit, it names the smallest."""
        searched = next((each.why for each in self.refusals if each.name == AUTO), None)
        return searched or advice(self.candidates, self.setting.limit)


class ScheduleCandidate(NamedTuple):
    """A schedule, its chunks per rank, and its figures.

    activations: the most live activations on a rank, in units of those of one microbatch for the
    rank's whole share of the model. memory: the most bytes that a rank holds. splits: weight
    gradients run separately. runs_with: the command that writes it, as a program
    for each rank (expand-mpmd) or as one program for all (expand-pipeline).
    """

    name: str
    chunks: int
    makespan: float
    bubble: float
    bubble_of_span: float
    activations: float
    memory: float
    messages: int
    fits: bool
    splits: bool
    runs_with: str

    @property
    def label(self) -> str:
        """`zb-v`, or `looped-bfs with 4 chunks`."""
        return self.name if self.chunks == 1 else f"{self.name} with {self.chunks} chunks"


class Refusal(NamedTuple):
    """A schedule that does not exist for the setting, and the reason."""

    name: str
    why: str


def advice(candidates: Sequence[ScheduleCandidate], limit: float | None) -> str:
    """Returns a sentence that recommends one of the candidates, which are sorted best first."""
    if not candidates:
        return "no named schedule exists for this setting"
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        least = min(candidates, key=lambda candidate: candidate.memory)
        return (
            f"no schedule fits {limit:g}: the smallest is {least.label}, which needs "
            f"{least.memory:g}"
        )
    best = fitting[0]
    fit = "" if limit is None else " that fits"
    others = [each for each in fitting if each.name not in (best.name, AUTO)]
    searched = any(candidate.name == AUTO for candidate in candidates)
    if not others:
        return f"use {best.label}: it is the only one{fit}"
    nothing = "; the search (auto) finds nothing better" if searched and best.name != AUTO else ""
    second = others[0]
    faster = second.makespan / best.makespan - 1 if best.makespan else 0.0
    if faster > _SAME:
        ahead = f"{100 * faster:.1f} % faster than the next{fit}, {second.label}"
    elif second.memory > best.memory * (1 + _SAME):
        ahead = f"as fast as {second.label}, but holds less ({best.memory:g})"
    else:
        ahead = f"as fast as {second.label}, and holds as much"
    said = f"use {best.label}, by {best.runs_with}: {ahead}{nothing}{_unsplit(best, fitting, fit)}"
    single = next((each for each in fitting if each.runs_with == _ONE_PROGRAM), None)
    if single is None or single == best:
        return said
    slower = single.makespan / best.makespan - 1 if best.makespan else 0.0
    alone = f"in one program, by {single.runs_with}, {single.label}"
    return f"{said}; {alone}, {100 * slower:.1f} % slower"


def _auto(setting: ScheduleSetting) -> Table:
    from stablehlo_tools.schedules.search.auto import find_best

    return find_best(setting).table


_ENTRIES = (*NAMED, NamedSchedule(AUTO, "the best that a search finds", _auto, None))


def _unsplit(best: ScheduleCandidate, fitting: Sequence[ScheduleCandidate], fit: str) -> str:
    """Returns advice for programs that cannot split off weight gradients; "" if none is needed."""
    if not best.splits:
        return ""
    whole = next((candidate for candidate in fitting if not candidate.splits), None)
    if whole is None:
        return f"; without split weight gradients there is none{fit}"
    slower = whole.makespan / best.makespan - 1 if best.makespan else 0.0
    return f"; without split weight gradients {whole.label}, {100 * slower:.1f} % slower"


def order(candidate: ScheduleCandidate) -> tuple[bool, float, float]:
    """Returns the sort key of a candidate; sums that differ only by rounding are equal."""
    makespan, memory = (float(f"{x:.9g}") for x in (candidate.makespan, candidate.memory))
    return not candidate.fits, makespan, memory


def time_schedule(
    table: Table, costs: Costs, blocking: bool = False, transfers: bool = False, buffers: int = 0
) -> Timeline:
    """Validates a table and times it without its idle cells.

    With `blocking`, sends and receives occupy their ranks. With `blocking` or `transfers`, they are
    inserted if the table has none. `buffers` is the validator's. Raises ToolError if the table is
    invalid.
    """
    if (blocking or transfers) and not table.communicates:
        table = with_communication(table, costs, late=blocking)
    check(table, buffers=buffers)
    return simulate(drop_idle_cells(table), costs, blocking and table.communicates, buffers)


def candidate_of(
    name: str, table: Table, setting: ScheduleSetting, blocking: bool = False
) -> ScheduleCandidate:
    """A schedule, validated and timed."""
    costs = setting.costs_of(table)
    timeline = time_schedule(table, costs, blocking)
    memory = max(timeline.peak_bytes)
    return ScheduleCandidate(
        name=name,
        chunks=table.placement.chunks,
        makespan=timeline.makespan,
        bubble=timeline.bubble,
        bubble_of_span=timeline.bubble_of_span,
        activations=max(timeline.peak_activations)
        * table.ranks
        / (table.stages * table.sequence_slices),
        memory=memory,
        messages=timeline.messages,
        fits=setting.fits(memory),
        splits=table.splits,
        runs_with="expand-mpmd",
    )


def _in_lockstep(candidate: ScheduleCandidate, table: Table, costs: Costs) -> ScheduleCandidate:
    """Returns a schedule as one program for all ranks.

    A tick takes as long as its longest rank; then all ranks permute."""
    shape = table.ranks, table.microbatches, table.placement.chunks
    if "1f1b" in candidate.name:
        programs = [training_lockstep(*shape, together=candidate.name == "eager-1f1b")]
    else:
        programs = [forward_lockstep(*shape), backward_lockstep(*shape)]
    makespan, messages = 0.0, 0
    for program in programs:
        messages += program.ticks * program.ranks * len(program.directions)
        phases = ((program.forward, costs.forward), (program.backward, costs.backward))
        for tick in range(program.ticks):
            ranks = [0.0] * program.ranks
            for direction, times in phases:
                for rank, cell in enumerate(direction.cells[tick] if direction else ()):
                    ranks[rank] += 0.0 if cell is None else times[cell.chunk * len(ranks) + rank]
            # The permute after each tick is a meeting of all ranks.
            makespan += max(ranks) + costs.communication
    work = table.microbatches * sum(costs.microbatch)
    bubble = 1 - work / (table.ranks * makespan) if makespan else 0.0
    return candidate._replace(
        makespan=makespan,
        bubble=bubble,
        bubble_of_span=bubble,
        messages=messages,
        runs_with=_ONE_PROGRAM,
    )
