"""Runs many commands quickly, each in a fork of a process that has loaded everything.

    python forked_commands_process.py < commands.json > outcomes.json

A command is a list of arguments; an outcome is its exit code (a signal, negated), and what it
printed on standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import warnings

from forked_process import load

from stablehlo_tools.processes import activity

LIMIT = 120  # seconds that one command may take before it counts as hanging
READING = 1  # of a processor, for a few kilobytes, of which some are read for ever


def main() -> None:
    commands: list[list[str]] = json.load(sys.stdin)
    load("stablehlo-tools")
    activity._LEAST_SECONDS = READING
    importlib.import_module("jax.export")
    warnings.filterwarnings("ignore", message=".*fork")
    json.dump([_outcome(command) for command in commands], sys.stdout)


def _outcome(words: list[str]) -> tuple[int, str]:
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(errors.fileno(), 2)
            _run(words)
        _, status = os.waitpid(child, 0)
        errors.seek(0)
        return os.waitstatus_to_exitcode(status), errors.read().decode(errors="replace")


def _run(words: list[str]) -> None:
    import signal

    from stablehlo_tools.cli.main import main as command

    signal.alarm(LIMIT)
    sys.argv = ["stablehlo-tools", *words]
    os._exit(command())


if __name__ == "__main__":
    main()
