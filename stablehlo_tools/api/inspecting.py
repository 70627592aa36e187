"""`stablehlo-tools inspect` for a program in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from html import escape
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from stablehlo_tools.analysis.stated_trips import state_trips
from stablehlo_tools.artifacts.artifact import Artifact, from_exported
from stablehlo_tools.report.cost_text import to_text
from stablehlo_tools.report.document import Document
from stablehlo_tools.report.exposure import AS_WRITTEN, Question, exposure, hardware_for
from stablehlo_tools.report.html import render_page

if TYPE_CHECKING:
    from jax.export import Exported


@dataclass(frozen=True)
class Inspection:
    """A report that prints as text; times in nanoseconds, sizes in bytes."""

    document: Document

    def __str__(self) -> str:
        return to_text(self.document)

    def _repr_html_(self) -> str:
        """The page of `report`, tables and timeline, in a notebook."""
        drawn = tuple(program.with_timeline() for program in self.document.programs)
        page = escape(render_page(replace(self.document, programs=drawn)))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 80vh; border: 0"></iframe>'

    def to_json(self) -> dict[str, Any]:
        """The object that `inspect --json` prints."""
        return self.document.to_json(timeline=False)


def inspect(
    program: Exported | Artifact,
    *,
    hardware: str | None = None,
    target: str | None = None,
    trips: Mapping[str, int] | None = None,
) -> Inspection:
    """Times the program's collectives on the hardware, and their exposed part.

    As the program is written, or as the compiler of the target, "gpu" or "tpu", schedules it.
    `trips`: the number of iterations of loops that the program does not state, by location, as in
    {"solver.py:30": 40}.
    Raises ToolError for hardware without a profile, and if the compiler refuses.
    """
    artifact = program if isinstance(program, Artifact) else from_exported(program)
    if trips:
        artifact = artifact.copy()
        state_trips(artifact.module, artifact.name, trips)
    targets = (target or AS_WRITTEN,)
    asked = Question(hardware_for(artifact, hardware, targets), targets, with_timeline=False)
    return Inspection(
        Document(artifact.name, version("stablehlo-tools"), tuple(exposure([artifact], asked)))
    )
