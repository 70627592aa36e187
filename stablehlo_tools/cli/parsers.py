"""The parsers of the commands, each by itself or all in one, for help and completion.

A parser is what its command's module adds arguments to; what it says of words that it cannot take
is in `usage_errors`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NoReturn

from stablehlo_tools.cli.commands import COMMANDS, listed
from stablehlo_tools.cli.usage_errors import (
    PROGRAM,
    CommandLine,
    explained,
    taken_apart,
    unknown_words,
    with_one_dash,
)


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line, and one with what to try."""

    example = ""  # words for the command line
    words: Sequence[str] = ()  # those that are parsed

    def error(self, message: str) -> NoReturn:
        """Exit code 2, and in words of this tool what argparse says."""
        self._refuse(*explained(message, self._line))

    def refuse_rest(self, rest: Sequence[str]) -> NoReturn:
        """The error for words that nothing takes: perhaps another option was meant."""
        self._refuse(*unknown_words(rest, self._line))

    def check_words(self) -> None:
        """The errors for words that argparse would take for others: those of a pipeline that a
        shell took apart, and `-hardware`, which is no `-h`."""
        apart = taken_apart(self._line)
        if apart:
            self._refuse(*apart)
        word = with_one_dash(self._line)
        if word:
            self.refuse_rest([word])

    @property
    def _line(self) -> CommandLine:
        return CommandLine(self.words, self._actions, self.prog, self.example)

    def _refuse(self, said: str, tried: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {said}\ntry: {tried}\n")


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
