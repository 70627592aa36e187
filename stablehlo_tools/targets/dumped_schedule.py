"""Reads the schedule and the memory that XLA dumps before it generates code.

XLA:GPU needs a third or more of a compilation for code, XLA:TPU up to four fifths. Code changes
neither the schedule nor the memory. XLA writes these files of a module in this order, and perhaps
some of other modules, which it makes from parts of the program:

    *before_optimizations.txt                        the program
    *after_optimizations-buffer-assignment.txt       the size and use of each allocation
    *after_optimizations.txt                         the schedule
    *debug_options, *after_buffer_assignment.txt     of XLA:GPU; of XLA:TPU if the program fits
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from stablehlo_tools.bindings import normalize_hlo_text
from stablehlo_tools.targets.chips import Target

_PROGRAM = ".before_optimizations.txt"
_SCHEDULE = "after_optimizations.txt"
_ALLOCATIONS = "after_optimizations-buffer-assignment.txt"
_LATER = {
    Target.GPU: "debug_options",
    Target.TPU: "after_optimizations_after_buffer_assignment.txt",
}
# allocation 3: size 4096, page 0, parameter 7, shape |f32[32,32]| at ShapeIndex {}:
# Allocations outside of the device's main memory have a color.
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), page \d+, (.*):$", re.MULTILINE)


def is_dumped(directory: Path, target: Target) -> bool:
    """Returns True if the schedule in a directory of dumps is complete.

    False if XLA:TPU refuses the program for lack of memory."""
    schedule = next(_files(directory, _SCHEDULE), None)
    later = _files(directory, _LATER[target])
    # XLA:GPU writes its options anew with each dump.
    return schedule is not None and any(
        path.stat().st_mtime_ns >= schedule.stat().st_mtime_ns for path in later
    )


def read_dump(directory: Path) -> tuple[str, dict[str, int]]:
    """Returns the scheduled HLO of a complete dump, and the bytes on each device by kind
    (`Memory`)."""
    size = Counter[str]()
    for allocation in _ALLOCATION.finditer(next(_files(directory, _ALLOCATIONS)).read_text()):
        count, use = int(allocation[1]), allocation[2]
        is_argument, is_output = "parameter " in use, "maybe-live-out" in use
        size["argument_bytes"] += count * is_argument
        size["output_bytes"] += count * is_output
        size["alias_bytes"] += count * (is_argument and is_output)
        size["temp_bytes"] += count * ("preallocated-temp" in use)
    kinds = ("argument_bytes", "output_bytes", "temp_bytes", "alias_bytes")
    memory = {kind: size[kind] for kind in kinds} | {"code_bytes": 0, "peak_bytes": 0}
    return normalize_hlo_text(next(_files(directory, _SCHEDULE)).read_text()), memory


def _files(directory: Path, ending: str) -> Iterator[Path]:
    """Yields the program's files with this ending; there is at most one."""
    for program in sorted(directory.glob(f"*{_PROGRAM}"))[:1]:
        yield from directory.glob(f"{program.name.removesuffix(_PROGRAM)}.*{ending}")
