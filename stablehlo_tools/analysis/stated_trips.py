"""The user's numbers of iterations, for loops that end by a test: solvers, generation, sampling.

A loop keeps its number as its mean number of runs, which compilers pass on to their schedules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath

from stablehlo_tools.analysis.loops import constant_trips
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, to_place
from stablehlo_tools.dialect.frontend_attributes import set_mean_runs
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.ir.walk import ops_named

_LINE = r".*?:\d+"  # of a rendered place: the file and the line


def state_trips(module: ir.Module, name: str, trips: Mapping[str, int]) -> None:
    """Gives the loops at these locations their number of iterations, in place.

    A location is as `inspect` prints it: `solver.py:30`, with or without directories and the part
    after it. `name` is that of the program. All loops of unknown length at a location get its
    number. Raises ToolError if there are none.
    """
    loops = ops_named(module.operation, {WHILE})
    for location, count in trips.items():
        found = [loop for loop in loops if location in _names(loop, name)]
        if not found:
            listed = [_names(loop, name)[0] for loop in loops if _is_open(loop)]
            where = ": at " + ", ".join(dict.fromkeys(listed)) if listed else ""
            raise ToolError(
                f"trips of {location}: no loop is there, and {len(listed)} in all have no known "
                f"number of iterations{where}",
                instead=(f"{location}={count}", f"{listed[0]}={count}") if listed else None,
            )
        unknown = [loop for loop in found if _is_open(loop)]
        if not unknown:
            known = constant_trips(found[0])
            raise ToolError(
                f"trips of {location}: the program states that this loop runs {known} times",
                found[0].location,
            )
        for loop in unknown:
            set_mean_runs(loop, count)


def _is_open(loop: ir.Operation) -> bool:
    return constant_trips(loop) is None


def _names(loop: ir.Operation, name: str) -> tuple[str, ...]:
    """Returns the ways to write the place of a loop, the shortest first."""
    rendered = to_place(loop.location).render(name)
    line = re.match(_LINE, rendered)
    return short_location(rendered), line[0] if line else rendered, rendered


def short_location(rendered: str) -> str:
    """Returns `solver.py:30` for a place in a file, also in a directory; else the given text."""
    line = re.match(_LINE, rendered)
    return PurePath(line[0]).name if line else rendered
