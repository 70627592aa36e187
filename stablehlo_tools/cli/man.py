"""Print the manual page, or that of one command, made of what --help says.

stablehlo-tools man > ~/.local/share/man/man1/stablehlo-tools.1     and then: man stablehlo-tools
stablehlo-tools man opt | man -l -                                  to read it at once
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from stablehlo_tools.cli.commands import COMMANDS, GROUPS, unknown
from stablehlo_tools.cli.parsers import PROGRAM, CommandParser, parser_of
from stablehlo_tools.diagnostics import ToolError, nearest

_STATUS = {
    "0": "It is done, or holds.",
    "1": "The answer is no: values differ, an order may deadlock, a test would change.",
    "2": "Bad input or usage, with one message; no file was written.",
    "130": "Interrupted.",
}
_VARIABLES = {
    "NO_COLOR": "Where it is set to anything, nothing is in colour.",
    "STABLEHLO_TOOLS_TRACEBACK": "Where it is set, a bug in this tool ends with a traceback.",
}
_INDENTED = re.compile(r"^ {2,}\S")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `man`."""
    parser.add_argument("command", metavar="COMMAND", nargs="?", help="the page of this one alone")


def run(arguments: argparse.Namespace) -> int:
    """Prints the page. Raises ToolError for a command that there is not."""
    chosen = arguments.command
    if chosen is not None and chosen not in COMMANDS:
        near = nearest(chosen.lower(), COMMANDS)
        raise ToolError(
            unknown(chosen),
            hint="stablehlo-tools --help",
            instead=(chosen, near) if near else None,
        )
    print(page(chosen), end="")
    return 0


def page(chosen: str | None = None) -> str:
    """The page of all commands, or of one, as roff with the macros of man(7)."""
    from importlib.metadata import version

    parser, commands = parser_of(COMMANDS if chosen is None else [chosen])
    title = PROGRAM if chosen is None else f"{PROGRAM}-{chosen}"
    lines = [f'.TH "{title.upper()}" 1 "" "{PROGRAM} {version(PROGRAM)}" "User Commands"']
    if chosen is None:
        lines += list(_whole(parser, title, commands))
    else:
        lines += [".SH NAME", _text(f"{title} - {COMMANDS[chosen].summary}")]
        lines += list(_command(commands[chosen], "SH"))
    lines += [".SH EXIT STATUS", *_terms(_STATUS), ".SH ENVIRONMENT", *_terms(_VARIABLES)]
    return "\n".join(lines) + "\n"


def _whole(parser: CommandParser, title: str, commands: dict[str, CommandParser]) -> Iterator[str]:
    yield from (".SH NAME", _text(f"{title} - rewrites distributed StableHLO programs"))
    yield from (".SH SYNOPSIS", f".B {_text(PROGRAM)}", ".I COMMAND", "\\&.\\|.\\|.")
    yield from (".SH DESCRIPTION", _text(parser.description or ""))
    for group, listed in GROUPS.items():
        yield f".SS {_text(group)}"
        yield from _terms({name: each.summary for name, each in listed.items()})
    for name, command in commands.items():
        yield f".SH COMMAND: {_text(name)}"
        yield from _command(command, "SS")


def _command(command: CommandParser, heading: str) -> Iterator[str]:
    """Synopsis, description, arguments, and what stands below them in its help."""
    yield f".{heading} SYNOPSIS" if heading == "SH" else ".PP"
    yield from _verbatim(command.format_usage().removeprefix("usage: "))
    if heading == "SH":
        yield ".SH DESCRIPTION"
    yield from _prose(command.description or "")
    yield f".{heading} {'OPTIONS' if heading == 'SH' else 'arguments'}"
    for action in command._actions:  # pyright: ignore[reportPrivateUsage]
        yield from (".TP", _head(action), _text(_help(command, action)))
    yield f".{heading} {'NOTES' if heading == 'SH' else 'notes'}"
    yield from _verbatim(command.epilog or "")


def _help(command: CommandParser, action: argparse.Action) -> str:
    formatter = command._get_formatter()  # pyright: ignore[reportPrivateUsage]
    return formatter._expand_help(action) if action.help else ""  # pyright: ignore[reportPrivateUsage]


def _head(action: argparse.Action) -> str:
    """`-o, --output OUTPUT`: options bold, what they take in italics."""
    options = ", ".join(f"\\fB{_text(option)}\\fR" for option in action.option_strings)
    if action.nargs == 0:
        return options
    choices = "|".join(map(str, action.choices or ()))
    taken = _text(str(action.metavar or choices or action.dest.upper()))
    many = {"?": f"[\\fI{taken}\\fR]", "*": f"[\\fI{taken}\\fR \\&...]"}
    shown = many.get(str(action.nargs), f"\\fI{taken}\\fR")
    return f"{options} {shown}".strip()


def _terms(terms: dict[str, str]) -> Iterator[str]:
    for term, meaning in terms.items():
        yield from (".TP", f"\\fB{_text(term)}\\fR", _text(meaning))


def _prose(text: str) -> Iterator[str]:
    """Paragraphs; those with indented lines as they are."""
    for paragraph in text.strip().split("\n\n"):
        if any(_INDENTED.match(line) for line in paragraph.splitlines()):
            yield from _verbatim(paragraph)
        else:
            yield from (".PP", _text(" ".join(paragraph.split())))


def _verbatim(text: str) -> Iterator[str]:
    yield from (".PP", ".nf", ".RS 2")
    yield from (_text(line) for line in text.rstrip().splitlines())
    yield from (".RE", ".fi")


def _text(text: str) -> str:
    """A line of text that roff shows as it is."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return f"\\&{escaped}" if escaped.startswith((".", "\\(aq")) else escaped
