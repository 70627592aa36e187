"""The command line: dispatch, exit codes and the one-message rule.

Exit codes: 0 done or holds; 1 the answer is no; 2 bad input or usage, with one located message;
130 interrupted. Nothing heavy is imported before a subcommand runs.
"""

from __future__ import annotations

import gc
import importlib
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from stablehlo_tools.cli import streams
from stablehlo_tools.cli.parsers import parse
from stablehlo_tools.cli.supervisor import BAD_INPUT, INTERRUPTED, run_supervised
from stablehlo_tools.cli.usage_errors import PROGRAM, command_line, replace_word

# The commands without programs, and `doctor`, which reports why programs cannot be read.
WITHOUT_MLIR = {"schedule", "overlap-graph", "completion", "doctor"}
_LISTS_FILES = {"align-order"}  # itself, on standard output
_UNTIL_INTERRUPTED_AGAIN = 2.0  # seconds for the clean-up after an interrupt
_DEEPEST_NESTING = 20_000  # regions and calls nest by recursion, in Python alone
_OBJECTS = 100_000  # new ones before a garbage collection: most objects are kept to the end
TRACEBACK = "STABLEHLO_TOOLS_TRACEBACK"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code.

    Without `arguments`, runs those of the command line in a child that may die; else in this
    process.
    """
    if arguments is None:
        streams.prepare()
        return run_supervised(lambda: _command(sys.argv[1:]), " ".join(sys.argv[1:]))
    return _command(list(arguments))


def _command(words: list[str]) -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGALRM, _interrupt)
    sys.setrecursionlimit(_DEEPEST_NESTING)
    gc.set_threshold(_OBJECTS)
    # An interrupt that a callback dropped is ignored, because it is repeated and reported once.
    sys.unraisablehook = lambda raised: (
        None if raised.exc_type is KeyboardInterrupt else sys.__unraisablehook__(raised)
    )
    try:
        return _run(words)
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("stablehlo-tools: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(words: list[str]) -> int:
    parsed = parse(words)
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.files.atomic import written

    try:
        if words[0] not in WITHOUT_MLIR:
            _load_bindings()
        code = parsed.run(parsed)
        sys.stdout.flush()
        for path in filter(None, (getattr(parsed, name, None) for name in ("output", "report"))):
            inside = sum(Path(each).parent == Path(path) for each in written)
            if (path in written or inside) and words[0] not in _LISTS_FILES:
                print(f"wrote {path}" + (f": {inside} files" if inside else ""), file=sys.stderr)
        return code
    except ToolError as error:
        told = error.diagnostic
        again = replace_word(words, *told.instead) if told.instead else []
        again = [*words, *told.added] if told.added else again
        hint, given = told.hint, getattr(parsed, "input", None)
        if again:
            hint = command_line(again)
        elif given:
            hint = hint.replace("INPUT", shlex.quote(given))
        said = replace(told, hint=hint).render(error.input_name or PROGRAM)
        if not hint and said.startswith(f"{PROGRAM}: "):  # of the words, not of a file
            said += f"\ntry: {PROGRAM} {words[0]} --help"
        print(said, file=sys.stderr)
        return BAD_INPUT
    except ImportError as error:
        if os.environ.get(TRACEBACK):
            raise
        print(f"stablehlo-tools: error: {error}", file=sys.stderr)
        print("try: stablehlo-tools doctor", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:  # of standard output: files have messages of their own
        print(f"stablehlo-tools: error: cannot write the output: {error.strerror}", file=sys.stderr)
        return BAD_INPUT
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        print(
            f"stablehlo-tools: error: a bug in this tool: {type(error).__name__}: {error} "
            f"(set {TRACEBACK}=1 to see where)",
            file=sys.stderr,
        )
        return BAD_INPUT


def _load_bindings() -> None:
    """Imports the native libraries with signals blocked: if interrupted, they print a traceback."""
    held = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        importlib.import_module("stablehlo_tools.bindings")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Interrupts the command repeatedly until it ends, because native code may drop an exception
    that is raised in a callback."""
    signal.setitimer(signal.ITIMER_REAL, _UNTIL_INTERRUPTED_AGAIN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
