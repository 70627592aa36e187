"""The command line: dispatch, exit codes and the one-message rule.

Exit codes: 0 done or holds; 1 the answer is no; 2 bad input or usage, with one located message;
130 interrupted. Nothing heavy is imported before a subcommand runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

from stablehlo_tools.cli import streams
from stablehlo_tools.cli.supervisor import BAD_INPUT, INTERRUPTED, supervised

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

COMMANDS = {
    "optimize": "find the pipeline that makes a program fastest on a machine, and prove it",
    "opt": "run a pipeline of passes on an artifact",
    "inspect": "list the communicating ops of an artifact, and what they cost on a device",
    "report": "draw what communication costs: one HTML page, or a Perfetto trace",
    "check-order": "prove that programs compiled apart cannot deadlock, or show how they can",
    "check-mpmd": "prove that a set of rank programs runs its schedule, values going the right way",
    "align-order": "put the collectives of programs compiled apart into one order",
    "verify": "prove on random inputs that two artifacts compute the same values",
    "compile": "compile for cpu, gpu or tpu and read back the order of the collectives",
    "run-mpmd": "run a set of rank programs and compare it with the program it was made of",
    "lower-mpmd": "rewrite the transfers of a set of rank programs for a runtime",
    "import-trace": "turn a jax.profiler trace into a profile of measured times",
    "schedule": "write, check and time a pipeline schedule, or compare all of them",
    "expand-mpmd": "turn a training step into one program for each rank of a pipeline",
    "layer-order": "write where a pipeline with layout=pipeline keeps each layer, for checkpoints",
    "overlap-graph": "schedule a task graph so that its communication hides behind its compute",
    "make-test": "turn an artifact and a pipeline into a lit test",
}
WITHOUT_MLIR = {"schedule", "overlap-graph"}  # the commands that read and write no program
_UNTIL_INTERRUPTED_AGAIN = 2.0  # seconds, for what is on its way out to clean up
_DEEPEST_NESTING = 20_000  # regions and calls nest by recursion, in Python alone
TRACEBACK = "STABLEHLO_TOOLS_TRACEBACK"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code.

    The arguments of the command line are run in a process that may die; others in this one.
    """
    if arguments is None:
        streams.prepare()
        return supervised(lambda: _command(sys.argv[1:]))
    return _command(list(arguments))


def _command(words: list[str]) -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGALRM, _interrupt)
    sys.setrecursionlimit(_DEEPEST_NESTING)
    sys.unraisablehook = _dropped
    try:
        return _run(words)
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("stablehlo-tools: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(words: list[str]) -> int:
    parser = _parser(words[0] if words and words[0] in COMMANDS else None)
    parsed = parser.parse_args(words)
    parsed.words = words
    if "run" not in parsed:
        parser.print_usage(sys.stderr)
        print("stablehlo-tools: error: a command is needed; see --help", file=sys.stderr)
        return BAD_INPUT
    from stablehlo_tools.diagnostics import ToolError

    if words[0] not in WITHOUT_MLIR:
        _load_bindings()
    try:
        code = parsed.run(parsed)
        sys.stdout.flush()
        return code
    except ToolError as error:
        print(error.diagnostic.render(error.input_name or "stablehlo-tools"), file=sys.stderr)
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


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """Only the chosen command's arguments are built, so that --help stays instant."""
    parser = argparse.ArgumentParser(
        prog="stablehlo-tools",
        description="Rewrites distributed StableHLO programs after export.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        module = _module(name) if name == chosen else None
        command = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__ if module else summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if module is not None:
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"stablehlo_tools.cli.{command.replace('-', '_')}")


def _load_bindings() -> None:
    """Imports the native libraries with signals held back: interrupted, they print a traceback."""
    held = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        importlib.import_module("stablehlo_tools.bindings")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)


class _Version(argparse.Action):
    """Looks the version up only when it is asked for: that takes longer than all else here."""

    def __call__(self, *_: object) -> None:
        from importlib.metadata import version

        print(f"stablehlo-tools {version('stablehlo-tools')}")
        sys.exit(0)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Interrupts the command, again and again until that is heard: native code that calls back
    may drop what is raised in a callback."""
    signal.setitimer(signal.ITIMER_REAL, _UNTIL_INTERRUPTED_AGAIN)
    raise KeyboardInterrupt


def _dropped(raised: UnraisableHookArgs) -> None:
    """Says nothing of an interrupt that a callback dropped: it is repeated, and told once."""
    if raised.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(raised)


if __name__ == "__main__":
    sys.exit(main())
