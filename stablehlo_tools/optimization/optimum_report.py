"""Renders an optimum as text, JSON and a page: trials, answer, proof, exposed collectives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.tasks.mesh_axes import with_axes_of
from stablehlo_tools.cost.accuracy import ACCURACY
from stablehlo_tools.diagnostics import duration, size
from stablehlo_tools.optimization.candidate_search import BUDGET_SPENT, CandidateTrial, candidates
from stablehlo_tools.optimization.figures import NEVER, Figures
from stablehlo_tools.optimization.optimizer import Optimum
from stablehlo_tools.optimization.option_trials import OptionTrial, gaining
from stablehlo_tools.overlap.collective_times import CollectiveRow
from stablehlo_tools.report.cost_text import short_place
from stablehlo_tools.report.document import CandidatePoint, Document, ProgramReport, Section
from stablehlo_tools.report.exposure import program_report
from stablehlo_tools.report.html import render_page
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph

SCHEMA = "stablehlo-tools/optimize/1"
_MOST_TRIALS = 12  # in the text; the page and the JSON have all
_MOST_EXPOSED = 6
_FEW, _ENOUGH = 4, 8  # compiled candidates: too few to decide, and enough
_WORTH_SHOWING = 1e-3  # of the total
EXPORT = "the export"
_NO_FIGURES: dict[str, Any] = dict.fromkeys(("total_ns", "exposed_ns", "peak_bytes"))


def to_json(optimum: Optimum) -> dict[str, Any]:
    """Returns plain data. Times are nanoseconds of one run, sizes bytes on each device."""
    return {
        "schema": SCHEMA,
        "program": Path(optimum.artifact.name).name,
        "target": optimum.target,
        "hardware": optimum.hardware.name,
        "memory_limit_bytes": optimum.memory_limit,
        "changed": optimum.changed,
        "pipeline": optimum.pipeline,
        "ratio": optimum.ratio,
        "before": optimum.before.to_json(),
        "after": optimum.after.to_json(),
        "proof": optimum.proof.to_json(),
        "trials": [
            {
                "pipeline": str(trial.candidate),
                **(_NO_FIGURES if trial.figures is None else trial.figures.shown()),
                "expected_ns": trial.expected_ns,
                "refused": trial.refused or None,
            }
            for trial in optimum.trials
        ],
        "ways_to_fit": [
            {"way": way, "pipeline": str(trial.candidate)} for way, trial in _ways_to_fit(optimum)
        ],
        "refused": optimum.refused,
        "exposed": [
            {
                "collective": row.kind,
                "exposed_ns": row.exposed_ns,
                "place": row.place,
                "why": row.why,
            }
            for row in _exposed_collectives(optimum)
        ],
        "compiler_options": dict(optimum.given.values),
        "options": [each.to_json(optimum.before, optimum.after) for each in optimum.options],
        "ended": optimum.ended,
        "remarks": list(optimum.remarks),
        "seconds": optimum.seconds,
    }


def to_text(optimum: Optimum) -> str:
    """Returns the answer as text for a terminal."""
    return "\n".join(_lines(optimum))


def _lines(optimum: Optimum) -> Iterator[str]:
    name = Path(optimum.artifact.name).name
    yield f"{name}, scheduled by {optimum.after.compiled_by}"
    yield _figures("before", optimum.before, optimum)
    yield _figures("after", optimum.after, optimum)
    yield f"  {ACCURACY}"
    yield ""
    if optimum.changed:
        yield f"  pipeline  {optimum.pipeline}"
    else:
        yield f"  {_why_unchanged(optimum)} as exported"
    yield from (f"  {line}" for line in optimum.proof.lines())
    yield from (f"  note: {remark}" for remark in optimum.remarks)
    yield ""
    compiled = len(optimum.trials) - 1
    yield f"  {candidates(compiled)} in {optimum.seconds:.0f} s; {optimum.ended}"
    if compiled < _FEW and optimum.ended == BUDGET_SPENT:  # of this run, not of a kept one
        each = optimum.seconds / (compiled + 1)  # the export is compiled, too
        longer = 60 * math.ceil(_ENOUGH * each / 60)
        yield f"  too few to decide: about {_ENOUGH} are compiled with --budget {longer}"
    ranked = _trials_by_time(optimum)
    for trial in ranked[:_MOST_TRIALS]:
        time, ratio, peak, expected = _columns(trial, optimum)
        passes = f"{trial.candidate or EXPORT}{_why_not(trial, optimum)}"
        yield f"  {time:>10} {ratio:>6} {peak:>9} {expected:>10}  {passes}"
    if len(ranked) > _MOST_TRIALS:
        yield f"  and {len(ranked) - _MOST_TRIALS} that were slower, or failed: --json lists them"
    ways = _ways_to_fit(optimum)
    if ways:
        yield ""
        yield "  ways to make it fit, each with its fastest compiled candidate:"
    for way, trial in ways:
        assert trial.figures is not None
        yield f"  {duration(trial.figures.total_ns):>10} {size(trial.figures.peak_bytes):>9}  {way}"
    exposed = _exposed_collectives(optimum)
    if exposed:
        yield ""
        yield "  still exposed:"
    for row in exposed:
        why = f": {row.why}" if row.why else ""
        at = f" at {short_place(row.place)}" if row.place else ""
        yield f"  {duration(row.exposed_ns):>10}  {row.kind}{at}{why}"
    yield from _options(optimum)


def _why_unchanged(optimum: Optimum) -> str:
    """Returns why the answer is the export: no candidate compiled in time, or none is faster."""
    if len(optimum.trials) == 1 and BUDGET_SPENT in optimum.ended:
        return "no candidate was compiled (--budget gives them more time): the program stays"
    return "no candidate is faster: the program stays"


def _options(optimum: Optimum) -> Iterator[str]:
    """Yields the lines about compiler options."""
    tried = [trial for trial in optimum.options if trial.after is not None]
    if not optimum.options:
        return
    yield ""
    gains = gaining(optimum.options, optimum.after, optimum.memory_limit)
    if not gains:
        said = f"none of {len(tried)} trials gains 0.1 %" if tried else "none was tried"
        why = "" if len(tried) == len(optimum.options) else "; --budget gives them more time"
        yield f"  other compiler options: {said}{why}"
        return
    yield "  other compiler options, alone and joined (jax.jit takes them in compiler_options):"
    for ratio, trial in gains:
        assert trial.after is not None
        yield f"  {duration(trial.after.total_ns):>10} {ratio:.3f}  {trial.proposal.options}"
        of_export = ""
        if optimum.changed and trial.before is not None:
            ratio_before = trial.before.ratio_to(optimum.before)
            told = "" if ratio_before is None else f", {ratio_before:.3f}"
            of_export = f"; the export with it {duration(trial.before.total_ns)}{told}"
        yield f"{'':19} {trial.proposal.does}{of_export}"
    flags = " ".join(f"--{text}" for text in gains[0][1].proposal.options.texts())
    yield f"  the best, in the environment: XLA_FLAGS='{flags}'"


def _figures(when: str, figures: Figures, optimum: Optimum) -> str:
    """Returns the line of one side, `before` or `after`."""
    memory = f"peak {size(figures.peak_bytes)} of {size(optimum.memory_limit)}"
    if not figures.runs:
        return f"  {when:7} does not fit: the compiler refuses it, {memory}"
    fits = "" if optimum.fits(figures) else ", which does not fit"
    told = f"; {optimum.ratio:.3f} of the time" if when == "after" and optimum.ratio else ""
    return (
        f"  {when:7} {duration(figures.total_ns):>10}  exposed {duration(figures.exposed_ns)}, "
        f"contended {duration(figures.contended_ns)}, {memory}{fits}{told}"
    )


def _columns(trial: CandidateTrial, optimum: Optimum) -> tuple[str, str, str, str]:
    """Returns time, ratio to the export's, peak and expected time, as text."""
    expected = "" if trial.expected_ns is None else f"({duration(trial.expected_ns)})"
    figures = trial.figures
    if figures is None:
        return "failed", "", "", expected
    if not figures.runs:
        return "too large", "", size(figures.peak_bytes), expected
    ratio = figures.ratio_to(optimum.before)
    shown = "" if ratio is None else f"{ratio:.3f}"
    return duration(figures.total_ns), shown, size(figures.peak_bytes), expected


def _why_not(trial: CandidateTrial, optimum: Optimum) -> str:
    """Returns why a candidate that is faster than the answer was rejected; "" if it is not."""
    figures, taken = trial.figures, optimum.after
    if figures is None or figures.total_ns >= taken.total_ns or not optimum.fits(figures):
        return ""
    if figures.contended_ns < taken.contended_ns:
        return ""  # it was not proven, and a note says so
    told, other = duration(figures.contended_ns), duration(taken.contended_ns)
    return f": contended {told}, but the answer {other}"


_TO_FIT = {
    "accumulate-gradients": "fewer samples at a time",
    "split-batch": "parts of the batch one after another",
    "shard-optimizer": "a divided optimizer",
    "rematerialize": "recomputation",
    "offload": "the host's memory",
}


def _ways_to_fit(optimum: Optimum) -> list[tuple[str, CandidateTrial]]:
    """Returns the fastest trial of each way to fit the memory; [] if the export fits."""
    if optimum.fits(optimum.before):
        return []
    fastest: dict[str, CandidateTrial] = {}
    for trial in _trials_by_time(optimum):
        if trial.figures is not None and trial.figures.runs and optimum.fits(trial.figures):
            # The reasons why a candidate needs less memory, in words.
            taken = [text.partition("{") for text in trial.candidate.passes]
            said = [_TO_FIT[name] for name, *_ in taken if name in _TO_FIT]
            if any(name == "rematerialize" and "offload" in options for name, _, options in taken):
                said.append(_TO_FIT["offload"])
            fastest.setdefault(" and ".join(said) or "partitioning alone", trial)
    return list(fastest.items())


def _trials_by_time(optimum: Optimum) -> list[CandidateTrial]:
    """Returns the trials, the fastest first and those that failed last."""
    return sorted(
        optimum.trials, key=lambda trial: trial.figures.total_ns if trial.figures else NEVER
    )


def _exposed_collectives(optimum: Optimum) -> list[CollectiveRow]:
    """Returns the collectives with the most exposed time."""
    if not optimum.after.runs:
        return []
    report = _report(optimum, "after", with_timeline=False)
    worth = [r for r in report.collectives if r.exposed_ns > _WORTH_SHOWING * report.total_ns]
    return sorted(worth, key=lambda row: -row.exposed_ns)[:_MOST_EXPOSED]


def _report(optimum: Optimum, when: str, *, with_timeline: bool) -> ProgramReport:
    is_after = when == "after"
    figures = optimum.after if is_after else optimum.before
    graph = hlo_task_graph(
        optimum.schedules[is_after],
        optimum.hardware,
        figures.devices,
        one_stream=optimum.given.one_stream,
    )
    return program_report(
        with_axes_of(graph, ModuleFacts.from_module(optimum.artifact.module, []).meshes),
        optimum.hardware,
        figures.devices,
        name=f"{Path(optimum.artifact.name).name} {when}",
        target=Target(optimum.target).title,
        notes=(f"scheduled by {figures.compiled_by}", ACCURACY),
        with_timeline=with_timeline,
    )


def page(optimum: Optimum, version: str) -> str:
    """Renders an HTML page: the answer, its proof, all trials, both programs on one time axis."""
    sides = {"before": optimum.before, "after": optimum.after}
    whens = [when for when, side in sides.items() if side.runs]
    if not optimum.changed:
        whens = whens[:1]
    programs = tuple(_report(optimum, when, with_timeline=True) for when in whens)
    title = f"{Path(optimum.artifact.name).name}, optimized"
    # The export first, the answer second.
    first = {EXPORT: 0, optimum.pipeline or EXPORT: 1}
    timed = [(str(trial.candidate) or EXPORT, trial.figures) for trial in optimum.trials]
    points = tuple(
        CandidatePoint(figures.total_ns, figures.peak_bytes, label)
        for label, figures in sorted(timed, key=lambda each: first.get(each[0], 2))
        if figures is not None and figures.runs
    )
    return render_page(Document(title, version, programs, tuple(_sections(optimum)), points))


def _sections(optimum: Optimum) -> Iterator[Section]:
    taken = optimum.pipeline or f"{_why_unchanged(optimum)} as exported"
    name = Path(optimum.artifact.name).name
    rows = [
        ("pipeline", taken),
        ("time", _change(optimum, "total_ns", duration)),
        ("exposed", _change(optimum, "exposed_ns", duration)),
        ("contended", _change(optimum, "contended_ns", duration)),
        ("peak", _change(optimum, "peak_bytes", size)),
        *(tuple(line.split(": ", 1)) for line in optimum.proof.lines()),
        *(("note", remark) for remark in optimum.remarks),
    ]
    if optimum.changed:
        rows.append(("again", f"stablehlo-tools opt {name} -p '{optimum.pipeline}' -o OUTPUT"))
    yield Section("Answer", "", ("", ""), tuple(rows))
    yield Section(
        "Candidates",
        f"{candidates(len(optimum.trials) - 1)} in {optimum.seconds:.0f} s; {optimum.ended}. In "
        "brackets: the time that the model predicted.",
        ("time", "of the export's", "peak", "expected", "pipeline"),
        tuple(
            (
                *_columns(trial, optimum),
                (str(trial.candidate) or EXPORT) + (f": {trial.refused}" if trial.refused else ""),
            )
            for trial in _trials_by_time(optimum)
        ),
    )

    def ratio(trial: OptionTrial) -> float:
        found = None if trial.after is None else trial.after.ratio_to(optimum.after)
        return math.inf if found is None else found

    if optimum.options:
        yield Section(
            "Other compiler options",
            "Alone on the answer and on the export, then joined; no time above includes them.",
            ("after", "of it", "export", "of it", "options"),
            tuple(_option_row(trial, optimum) for trial in sorted(optimum.options, key=ratio)),
        )
    if optimum.refused:
        yield Section("Refused passes", "", ("pass", "why"), tuple(optimum.refused.items()))


def _option_row(trial: OptionTrial, optimum: Optimum) -> tuple[str, ...]:
    sides = ((trial.after, optimum.after), (trial.before, optimum.before))
    told: list[str] = []
    for figures, without in sides:
        ratio = None if figures is None else figures.ratio_to(without)
        told += ["", ""] if figures is None else [duration(figures.total_ns), ""]
        if ratio is not None:
            told[-1] = f"{ratio:.3f}"
    said = f"{trial.proposal.options}: {trial.proposal.does}"
    return (*told, f"{said}: {trial.refused}" if trial.refused else said)


def _change(optimum: Optimum, field: str, shown: Any) -> str:
    before, after = getattr(optimum.before, field), getattr(optimum.after, field)
    told = [shown(each) if each < NEVER else "none: too large" for each in (before, after)]
    return f"{told[0]} before, {told[1]} after"
