"""The parsers of the commands, each by itself or all in one, for help, completion and manual.

A parser is what its command's module adds arguments to. It says what was meant where a word is no
option or no choice, and ends an error with words to try.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import NoReturn

from stablehlo_tools.cli.commands import COMMANDS, listed
from stablehlo_tools.diagnostics import did_you_mean

PROGRAM = "stablehlo-tools"
_SHAPE = re.compile(r"the following arguments are required|unrecognized arguments")
_NO_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors say what was meant, or end with what to try."""

    example = ""  # words for the command line

    def error(self, message: str) -> NoReturn:
        """The usage, one line, and what to try; exit code 2."""
        self.print_usage(sys.stderr)
        said = _NO_CHOICE.search(message)
        choices = [each.strip("'") for each in said[2].split(", ")] if said else []
        meant = _meant(said[1], choices) if said else ""
        helps = self.example and _SHAPE.match(message)  # not where a value is wrong
        tried = f"try: {self.example}\n" if helps else ""
        self.exit(2, f"{self.prog}: error: {message}{meant}\n{tried}")

    def refuse_rest(self, rest: list[str]) -> NoReturn:
        """The error for words that nothing takes: perhaps another option was meant."""
        unknown = next((word.partition("=")[0] for word in rest if word.startswith("-")), "")
        meant = _meant(unknown, self._option_string_actions) if unknown else ""
        self.error(f"unrecognized arguments: {' '.join(rest)}{meant}")


def _meant(word: str, known: Iterable[str]) -> str:
    meant = did_you_mean(word, known)
    return f"; {meant}" if meant else ""


def parser_of(chosen: Iterable[str]) -> tuple[CommandParser, dict[str, CommandParser]]:
    """The parser of the command line, and those of the chosen commands in it.

    Others are left out, so that --help stays instant.
    """
    parser = CommandParser(
        prog=PROGRAM,
        description="Rewrites distributed StableHLO programs after export.",
        epilog=listed(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", help="one of those below")
    return parser, {name: _added(commands, name) for name in chosen}


def _added(commands: argparse._SubParsersAction[CommandParser], name: str) -> CommandParser:  # pyright: ignore[reportPrivateUsage]
    module = module_of(name)
    command = commands.add_parser(
        name,
        help=COMMANDS[name].summary,
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # A command may have another --help: that of opt takes the name of a pass.
        conflict_handler="resolve",
    )
    module.add_arguments(command)
    command.set_defaults(run=module.run)
    command.example = f"{PROGRAM} {COMMANDS[name].example}"
    example = f"example:\n  {command.example}"
    command.epilog = f"{command.epilog}\n\n{example}" if command.epilog else example
    return command


def module_of(command: str) -> ModuleType:
    """The module of a command: it has a docstring, `add_arguments` and `run`."""
    return importlib.import_module(f"stablehlo_tools.cli.{command.replace('-', '_')}")


class _Version(argparse.Action):
    """Looks the version up only when it is asked for: that takes longer than all else here."""

    def __call__(self, *_: object) -> None:
        from importlib.metadata import version

        print(f"{PROGRAM} {version(PROGRAM)}")
        sys.exit(0)
