"""How many functions and files a reader of a pass meets: those that its own lit tests enter.

    python python/benchmarks/call_depth.py [PASS ...]

Each RUN line with `opt` in `lit_tests/transforms/<pass>.mlir`, or with `expand-mpmd` in that
command's test, runs in this process under `sys.monitoring`. Columns: functions of stablehlo_tools
that are entered, files that they stand in, and the longest chain of calls among them.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType

from stablehlo_tools.cli.main import main as run_command

ROOT = Path(__file__).parents[2]
PRODUCT = str(ROOT / "stablehlo_tools")
TESTS = ROOT / "lit_tests"
PASSES = (
    "thread-tokens",
    "partition",
    "expand-pipeline",
    "fold-pipeline",
    "pipeline-collectives",
    "expand-mpmd",
)
RUN = re.compile(
    r"RUN: (?:rm [^&]*&& )?(?:not )?stablehlo-tools ((?:opt|expand-mpmd) .*?)(?: [|&]| \d?>|$)",
    re.M,
)


class Walk:
    """The functions of the product that run while it is open."""

    def __init__(self) -> None:
        self.entered: set[CodeType] = set()
        self.chain = self._depth = 0

    def __enter__(self) -> Walk:
        events, tool = sys.monitoring.events, sys.monitoring.PROFILER_ID
        sys.monitoring.use_tool_id(tool, "call_depth")
        for event, change in (
            (events.PY_START, 1),
            (events.PY_RESUME, 1),
            (events.PY_RETURN, -1),
            (events.PY_YIELD, -1),
            (events.PY_UNWIND, -1),
        ):
            sys.monitoring.register_callback(
                tool, event, lambda code, *_, by=change: self._step(code, by)
            )
        sys.monitoring.set_events(
            tool,
            events.PY_START
            | events.PY_RESUME
            | events.PY_RETURN
            | events.PY_YIELD
            | events.PY_UNWIND,
        )
        return self

    def __exit__(self, *_: object) -> None:
        sys.monitoring.free_tool_id(sys.monitoring.PROFILER_ID)

    def _step(self, code: CodeType, by: int) -> None:
        if not code.co_filename.startswith(PRODUCT):
            return
        self._depth = max(0, self._depth + by)
        if by > 0:
            if code.co_flags & inspect.CO_OPTIMIZED:  # else the body of a class or a module
                self.entered.add(code)
            self.chain = max(self.chain, self._depth)


def commands(name: str) -> Iterator[list[str]]:
    """The commands of a pass's own lit file, or of a command's."""
    stem = name.replace("-", "_")
    for path in (TESTS / "transforms" / f"{stem}.mlir", TESTS / "cli" / f"{stem}.test"):
        text = path.read_text() if path.is_file() else ""
        with tempfile.TemporaryDirectory() as directory:
            for found in RUN.finditer(text):
                line = found[1].replace("%s", str(path)).replace("%S", str(path.parent))
                yield shlex.split(line.replace("%t", f"{directory}/t"))


def main(names: Sequence[str]) -> None:
    """Prints a row for each pass."""
    print(f"{'pass':24}{'functions':>10}{'files':>8}{'chain':>8}")
    for name in names or PASSES:
        output = io.TextIOWrapper(io.BytesIO())
        with Walk() as walk, contextlib.redirect_stdout(output):
            for words in commands(name):
                if status := run_command(words):
                    raise SystemExit(f"{shlex.join(words)} ends with {status}")
        functions = {code for code in walk.entered if not code.co_name.startswith("<")}
        files = {code.co_filename for code in functions}
        print(f"{name:24}{len(functions):10}{len(files):8}{walk.chain:8}")


if __name__ == "__main__":
    main(sys.argv[1:])
