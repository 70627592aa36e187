"""Write the pages of the reference that follow from the code: passes, commands, hardware.

    python python/docs/generate.py [--check]

With --check nothing is written: exit code 1, with the difference, where a file is out of date.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `docs`

from docs import commands_page, hardware_page, json_page, passes_page

DOCS = Path(__file__).parents[2] / "docs"
PAGES: dict[str, Callable[[], str]] = {
    "passes.md": passes_page.page,
    "reference/commands.md": commands_page.page,
    "reference/hardware.md": hardware_page.page,
    "reference/json.md": json_page.page,
}


def main(words: Sequence[str] | None = None) -> int:
    """Write the pages, or check them; return the exit status."""
    parser = argparse.ArgumentParser(description="Write the generated pages of docs/.")
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    arguments = parser.parse_args(words)
    stale = 0
    for name, page in PAGES.items():
        path, new = DOCS / name, page()
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(new, encoding="utf-8")
        elif not _is_up_to_date(path, new):
            stale = 1
    return stale


def _is_up_to_date(path: Path, new: str) -> bool:
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    if old == new:
        return True
    difference = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), path.name, "generated"
    )
    sys.stderr.writelines(difference)
    print(f"{path.name} is out of date: run `make docs`", file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main())
