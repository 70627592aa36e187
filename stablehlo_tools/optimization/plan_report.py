"""Renders a plan as text and JSON: the mesh, the division of each argument, and the candidates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stablehlo_tools.analysis.shardings import Dims
from stablehlo_tools.diagnostics import duration, size, table_lines
from stablehlo_tools.optimization.plan_request import mesh_text, spec_text
from stablehlo_tools.optimization.plan_trials import PlanCandidate, time_program
from stablehlo_tools.optimization.planning import ArgumentPlan, DevicePlan
from stablehlo_tools.report.document import CandidatePoint, Document, Section
from stablehlo_tools.report.html import render_page
from stablehlo_tools.report.mesh_drawing import mesh_drawing, mesh_rows

SCHEMA = "stablehlo-tools/plan/1"
_MOST_ARGUMENTS = 60  # in the text; the JSON has all
_HEADINGS = ("argument", "type", "a device", "division", "another")
_BY_SEARCH = "the model of the search"
_MOST_GAP = 10.0  # a larger one is of latencies, which the bound leaves out
_TO_DRAW = 600.0  # seconds


def to_text(plan: DevicePlan) -> str:
    """Returns the plan as text for a terminal."""
    return "\n".join(_lines(plan))


def _lines(plan: DevicePlan) -> Iterator[str]:
    request = plan.request
    yield f"{Path(plan.artifact.name).name} for {request.devices} x {request.hardware.title}"
    yield from (f"  {name:<7} {told}" for name, told in _answer(plan))
    if not request.compiler:
        yield "  note: the model decided: a --budget lets a compiler decide"
    elif not plan.best.is_compiled:
        why = next((each.refused for each in plan.candidates if each.refused), "")
        yield f"  note: the model decided: {why}"
    yield ""
    rows = list(map(_argument_row, plan.arguments))
    left = ("argument", "type", "division", "another")
    lines = table_lines([_HEADINGS, *rows[:_MOST_ARGUMENTS]], left)
    yield from (f"  {line}" for line in lines)
    if len(rows) > _MOST_ARGUMENTS:
        yield f"  and {len(rows) - _MOST_ARGUMENTS} more: --json lists them"
    yield ""
    count = len(plan.candidates)
    yield f"  {count} plan{'s' * (count > 1)} in {plan.seconds:.0f} s:"
    for each in plan.candidates:
        refused = f": {each.refused}" if each.refused else ""
        told = f"{duration(each.ns):>9} {size(each.bytes):>9}"
        yield f"  {told}  {_description(each)}, by {_judge(each)}{refused}"


def _argument_row(argument: ArgumentPlan) -> tuple[str, ...]:
    other, told = argument.other, ""
    if other is not None:
        sign = "-" if other.ns < 0 else "+"
        more = f"{'-' if other.bytes < 0 else '+'}{size(abs(other.bytes))}"
        told = f"{spec_text(other.dims)}: {sign}{duration(abs(other.ns))}, {more}"
    division = spec_text(argument.dims)
    return argument.name, argument.type, size(argument.bytes), division, told


def _answer(plan: DevicePlan) -> Iterator[tuple[str, str]]:
    """Yields the names and the texts of the answer."""
    best = plan.best
    yield "mesh", mesh_text(best.whole_mesh)
    yield "time", f"{duration(best.ns)}, by {_judge(best)}"
    yield "peak", f"{size(best.bytes)} of {size(plan.request.limit)} a device"
    told = f"at most {100 * plan.gap:.1f} % to the best division, by the model of the search"
    yield "gap", told if plan.gap < _MOST_GAP else "unknown: latencies decide"
    if plan.passes:
        yield "passes", plan.passes


def _description(candidate: PlanCandidate) -> str:
    """Returns the mesh of a candidate, its microbatches, and how it differs."""
    more = ", recomputed" if candidate.recomputes and not candidate.form.recomputes else ""
    more += f", {candidate.changed}" if candidate.changed else ""
    return mesh_text(candidate.whole_mesh) + candidate.form.said + more


def _judge(candidate: PlanCandidate) -> str:
    """Returns who timed a candidate."""
    if candidate.time is None:
        return _BY_SEARCH
    return candidate.time.target if candidate.is_compiled else "the model, as written"


def page(plan: DevicePlan, version: str) -> str:
    """Renders an HTML page: the arguments, the meshes as points, and the timeline of the choice."""
    request, mesh = plan.request, plan.best.whole_mesh
    limit = _TO_DRAW if plan.best.is_compiled else None
    drawn = time_program(plan.artifact, request, limit, with_timeline=True)
    sections = (
        Section("Answer", "", ("", ""), tuple(_answer(plan))),
        Section(
            "Mesh",
            "A cell is a device, with its place on each axis.",
            ("axis", "size", "crosses", "bandwidth"),
            tuple(mesh_rows(mesh, request.hardware)),
            mesh_drawing(mesh, request.hardware),
        ),
        Section(
            "Arguments",
            "Another: the best other division of the argument alone, with the time and the bytes "
            "of a device that it takes more, by the model, before hiding.",
            _HEADINGS,
            tuple(map(_argument_row, plan.arguments)),
        ),
        Section(
            "Compared plans",
            "",
            ("time", "peak", "mesh", "timed by"),
            tuple(
                (duration(each.ns), size(each.bytes), _description(each), _judge(each))
                for each in plan.candidates
            ),
        ),
    )
    points = (CandidatePoint(each.ns, each.bytes, _description(each)) for each in plan.candidates)
    title = f"{Path(plan.artifact.name).name}, planned for {request.devices} devices"
    return render_page(Document(title, version, (drawn,), sections, (None, *points)))


def _names(dims: Dims) -> list[list[str]]:
    return [[axis.name for axis in axes] for axes in dims]


def to_json(plan: DevicePlan) -> dict[str, Any]:
    """Returns plain data. Times are nanoseconds of a run, sizes bytes of a device."""
    return {
        "schema": SCHEMA,
        "program": Path(plan.artifact.name).name,
        "hardware": plan.request.hardware.name,
        "devices": plan.request.devices,
        "memory_limit_bytes": plan.request.limit,
        "mesh": dict(plan.best.whole_mesh),
        "passes": plan.passes,
        "total_ns": plan.best.ns,
        "peak_bytes": plan.best.bytes,
        "timed_by": _judge(plan.best),
        "gap": plan.gap,
        "arguments": [
            {
                "name": each.name,
                "type": each.type,
                "bytes": each.bytes,
                "spec": _names(each.dims),
                "another": None
                if each.other is None
                else {
                    "spec": _names(each.other.dims),
                    "more_ns": each.other.ns,
                    "more_bytes": each.other.bytes,
                },
            }
            for each in plan.arguments
        ],
        "candidates": [
            {
                "mesh": dict(each.whole_mesh),
                "form": each.form.passes,
                "recomputes": each.recomputes,
                "modelled_ns": each.modelled_ns,
                "modelled_bytes": each.modelled_bytes,
                "total_ns": None if each.time is None else each.time.contended_ns,
                "peak_bytes": None if each.time is None else each.time.peak_bytes,
                "refused": each.refused or None,
            }
            for each in plan.candidates
        ],
        "seconds": plan.seconds,
    }
