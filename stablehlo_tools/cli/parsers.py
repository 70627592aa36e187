"""The parsers of the commands, each by itself or all in one, for help and completion.

The module of each command adds its arguments.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from stablehlo_tools.cli.commands import COMMANDS, command_list
from stablehlo_tools.cli.usage_errors import (
    PROGRAM,
    UsageError,
    check_options,
    command_line,
    extra_words,
    replace_word,
    unknown_command,
)
from stablehlo_tools.diagnostics import nearest


class CommandParser(argparse.ArgumentParser):
    """A parser that raises UsageError, with a command to try instead."""

    words: Sequence[str] = ()  # the command line, from the command on

    def error(self, message: str) -> NoReturn:
        """Raises UsageError with the message of argparse."""
        _, is_missing, names = message.partition("arguments are required: ")
        if not is_missing:
            raise UsageError(message)
        raise UsageError(f"needs {names}", shlex.split(COMMANDS[self.words[0]].example))

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        try:
            return super()._get_values(action, arg_strings)  # pyright: ignore
        except argparse.ArgumentError as error:
            near = nearest(arg_strings[-1].lower(), map(str, action.choices or ()), 0.7)
            instead = replace_word(self.words, arg_strings[-1], near) if near else ()
            raise UsageError(str(error), instead) from None


def parse(words: list[str]) -> argparse.Namespace:
    """Parses a command line; `run` of the result is the function of the command.

    If the words cannot be parsed, exits with code 2, one message and a command to try.
    """
    try:
        name = words[0] if words else ""
        if name not in {"-h", "--help", "--version", *COMMANDS}:
            raise unknown_command(words)
        parser, commands = parser_of([name] if name in COMMANDS else ())
        for command in commands.values():
            command.words = words
            check_options(words, command._option_string_actions)  # pyright: ignore[reportPrivateUsage]
        parsed, rest = parser.parse_known_args(words)
        if rest:
            raise extra_words(rest, words)
        parsed.words = words
        return parsed
    except UsageError as error:
        program = " ".join([PROGRAM, *(word for word in words[:1] if word in COMMANDS)])
        shown = command_line(error.instead) if error.instead else f"{program} --help"
        print(f"{program}: error: {error}\ntry: {shown}", file=sys.stderr)
        sys.exit(2)


def parser_of(chosen: Iterable[str]) -> tuple[CommandParser, dict[str, CommandParser]]:
    """Returns the parser of the command line, and those of the chosen commands in it.

    Other commands are left out, so that --help stays instant.
    """
    parser = CommandParser(
        prog=PROGRAM,
        description="Rewrites distributed StableHLO programs after export.",
        epilog=command_list(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", help="one of those below")
    return parser, {name: _add_command(commands, name) for name in chosen}


def _add_command(commands: argparse._SubParsersAction[CommandParser], name: str) -> CommandParser:  # pyright: ignore[reportPrivateUsage]
    module = module_of(name)
    command = commands.add_parser(
        name,
        help=COMMANDS[name].summary,
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # A command may have its own --help: that of opt accepts the name of a pass.
        conflict_handler="resolve",
    )
    module.add_arguments(command)
    command.set_defaults(run=module.run)
    example = f"example:\n  {PROGRAM} {COMMANDS[name].example}"
    command.epilog = f"{command.epilog}\n\n{example}" if command.epilog else example
    return command


def module_of(command: str) -> ModuleType:
    """Imports the module of a command, which has a docstring, `add_arguments` and `run`."""
    return importlib.import_module(f"stablehlo_tools.cli.{command.replace('-', '_')}")


class _Version(argparse.Action):
    """Prints the version, which is looked up only here, because that is slow."""

    def __call__(self, *_: object) -> None:
        from importlib.metadata import version

        print(f"{PROGRAM} {version(PROGRAM)}")
        sys.exit(0)
