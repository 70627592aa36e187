"""The page of benchmarks: every measured number of the docs, from python/benchmarks/results.

`index.json` has the sections, and the files of each; their rows are one table. A file has what was
measured, the command that measures it again, the unit, and rows of named columns.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
HEAD = """# Benchmarks

All measured numbers of the documentation, except the outputs of snippets: in ms, s, GiB or MiB.
Only the section on one H100 ran on a device. All other times of programs are those of the target
compiler's schedule with the [model of time](../concepts/cost.md). The tools ran on two cores. A
ratio is the time after over that before. Programs are models of `python/models` at full size on 64
devices; names that end in `real` are steps of other libraries on 8. Each command is in
`python/benchmarks/`. `make docs` writes this page from its `results/`.
"""


def page() -> str:
    """The whole page, ending in a newline."""
    sections = read("index").items()
    return "\n".join([HEAD, *(line for each in sections for line in _section(*each)), ""])


def read(name: str) -> dict[str, Any]:
    """The data of a file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _section(title: str, names: Sequence[str]) -> Iterator[str]:
    files = list(map(read, names))
    yield from [f"## {title}", ""]
    for each in files:
        item = f"- {each['what']}: `{each['command'].rpartition('benchmarks/')[2]}`"
        yield textwrap.fill(item, 110, subsequent_indent="  ", break_on_hyphens=False)
    yield from ["", *_table([row for each in files for row in each["rows"]]), ""]
    for note in (each["note"] for each in files if "note" in each):
        yield from [textwrap.fill(note, 110, break_on_hyphens=False), ""]


def _table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"| {' | '.join(rows[0])} |"
    yield f"|{'|'.join('---' if isinstance(cell, str) else '---:' for cell in rows[0].values())}|"
    for row in rows:
        yield f"| {' | '.join(_shown(*cell) for cell in row.items())} |"


def _shown(column: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.3f}" if column == "ratio" else f"{value:,}"
