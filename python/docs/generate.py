"""Write what of the reference follows from the code: pages of passes, of commands, of hardware.

    python python/docs/generate.py [--check]

A page of a pass or of a command begins with what the code says, up to `END`. What follows is
written by hand, and stays. With --check nothing is written: exit code 1, with the difference, if
a page is out of date.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `docs`

from docs import benchmarks_page, commands_page, hardware_page, passes_page

DOCS = Path(__file__).parents[2] / "docs"
END = "<!-- end-of-generated-text -->\n"


def main(words: Sequence[str] | None = None) -> int:
    """Write the pages, or check them; return the exit status."""
    parser = argparse.ArgumentParser(description="Write the generated pages of docs/.")
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    arguments = parser.parse_args(words)
    stale = 0
    for name, head in _heads():
        path = DOCS / name
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        new = head + END + old.partition(END)[2]
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(new, encoding="utf-8")
        elif not _is_up_to_date(name, old, new):
            stale = 1
    return stale


def _heads() -> Iterator[tuple[str, str]]:
    """The path of each page, and what the code says there."""
    yield from passes_page.pages()
    yield from commands_page.pages()
    yield "reference/hardware.md", hardware_page.page()
    yield "project/benchmarks.md", benchmarks_page.page()


def _is_up_to_date(name: str, old: str, new: str) -> bool:
    if old == new:
        return True
    difference = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), name, "generated"
    )
    sys.stderr.writelines(difference)
    print(f"{name} is out of date: run `make docs`", file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main())
