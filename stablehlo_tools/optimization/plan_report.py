"""Renders a plan as text and JSON: the mesh, the division of each argument, and the candidates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stablehlo_tools.diagnostics import duration, size, table_lines
from stablehlo_tools.optimization.planning import (
    PIPELINE,
    DevicePlan,
    PlanCandidate,
    mesh_text,
    spec_text,
    time_candidate,
)
from stablehlo_tools.report.document import CandidatePoint, Document, Section
from stablehlo_tools.report.exposure import AS_WRITTEN
from stablehlo_tools.report.html import render_page

SCHEMA = "stablehlo-tools/plan/1"
_MOST_ARGUMENTS = 60  # in the text; the JSON has all
_BY_MODEL = "the model"
_TO_DRAW = 600.0  # seconds


def to_text(plan: DevicePlan) -> str:
    """Returns the plan as text for a terminal."""
    return "\n".join(_lines(plan))


def _lines(plan: DevicePlan) -> Iterator[str]:
    request, best = plan.request, plan.best
    name = Path(plan.artifact.name).name
    yield f"{name} for {request.devices} x {request.hardware.title}"
    yield f"  mesh  {mesh_text(best.mesh)}"
    yield f"  time  {duration(best.ns)}, by {_judge(best)}"
    yield f"  peak  {size(best.bytes)} of {size(plan.request.limit)} a device"
    if best.report is None:
        yield "  note: no compiler was asked: --target and --budget let one decide"
    yield ""
    rows = [
        (each.name, each.type, size(each.bytes), spec_text(each.dims)) for each in plan.arguments
    ]
    headings = ("argument", "type", "a device", "division")
    lines = table_lines([headings, *rows[:_MOST_ARGUMENTS]], ("argument", "type", "division"))
    yield from (f"  {line}" for line in lines)
    if len(rows) > _MOST_ARGUMENTS:
        yield f"  and {len(rows) - _MOST_ARGUMENTS} more: --json lists them"
    yield ""
    yield f"  {len(plan.candidates)} meshes in {plan.seconds:.0f} s:"
    for each in plan.candidates:
        refused = f": {each.refused}" if each.refused else ""
        told = f"{duration(each.ns):>9} {size(each.bytes):>9}"
        yield f"  {told}  {mesh_text(each.mesh)}, by {_judge(each)}{refused}"


def _judge(candidate: PlanCandidate) -> str:
    """Returns who timed a candidate."""
    if candidate.report is None:
        return _BY_MODEL
    target = candidate.report.target
    timed = "the model, in the order of the text" if target == "as written" else target
    return f"{timed} after {PIPELINE}"


def page(plan: DevicePlan, version: str) -> str:
    """Renders an HTML page: the arguments, the meshes as points, and the timeline of the choice."""
    best, request = plan.best, plan.request
    target = AS_WRITTEN if best.report is None else request.target
    drawn = time_candidate(plan.given, request, best, target, _TO_DRAW, with_timeline=True)
    answer = (
        ("mesh", mesh_text(best.mesh)),
        ("time", f"{duration(best.ns)}, by {_judge(best)}"),
        ("peak", f"{size(best.bytes)} of {size(plan.request.limit)} a device"),
    )
    arguments = tuple(
        (each.name, each.type, size(each.bytes), spec_text(each.dims)) for each in plan.arguments
    )
    sections = (
        Section("Answer", "", ("", ""), answer),
        Section("Arguments", "", ("argument", "type", "a device", "division"), arguments),
        Section(
            "Meshes",
            "",
            ("time", "peak", "mesh", "timed by"),
            tuple(
                (duration(each.ns), size(each.bytes), mesh_text(each.mesh), _judge(each))
                for each in plan.candidates
            ),
        ),
    )
    points = (CandidatePoint(each.ns, each.bytes, mesh_text(each.mesh)) for each in plan.candidates)
    title = f"{Path(plan.artifact.name).name}, planned for {request.devices} devices"
    return render_page(Document(title, version, (drawn,), sections, (None, *points)))


def to_json(plan: DevicePlan) -> dict[str, Any]:
    """Returns plain data. Times are nanoseconds of a run, sizes bytes of a device."""
    return {
        "schema": SCHEMA,
        "program": Path(plan.artifact.name).name,
        "hardware": plan.request.hardware.name,
        "devices": plan.request.devices,
        "memory_limit_bytes": plan.request.limit,
        "mesh": dict(plan.best.mesh),
        "total_ns": plan.best.ns,
        "peak_bytes": plan.best.bytes,
        "timed_by": _judge(plan.best),
        "arguments": [
            {
                "name": each.name,
                "type": each.type,
                "bytes": each.bytes,
                "spec": [[axis.name for axis in axes] for axes in each.dims],
            }
            for each in plan.arguments
        ],
        "candidates": [
            {
                "mesh": dict(each.mesh),
                "modelled_ns": each.choices.ns,
                "modelled_bytes": each.choices.held,
                "total_ns": None if each.report is None else each.report.contended_ns,
                "peak_bytes": None if each.report is None else each.report.peak_bytes,
                "refused": each.refused or None,
            }
            for each in plan.candidates
        ],
        "seconds": plan.seconds,
    }
