"""The pages of the commands: what `COMMAND --help` says, and the fields of their JSON."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from docs import json_page
from stablehlo_tools.cli.commands import COMMANDS
from stablehlo_tools.cli.parsers import parser_of

SKETCHES = "<!-- snippet: sketches: usage lines of the parsers -->"
FOLDER = "reference/commands"
_WIDTH = 96
_DRAWN = re.compile(r"\S {2,}\S")  # text in columns, which keeps its lines


def pages() -> Iterator[tuple[str, str]]:
    """The page of each command."""
    for command in COMMANDS:
        yield f"{FOLDER}/{command}.md", _page(command)


def _page(command: str) -> str:
    parser = parser_of([command])[1][command]
    lines = [f"# {command}", "", SKETCHES, "", *_prose(parser.description or ""), ""]
    lines += ["```text", *_usage(parser), "```", ""]
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if _is_shown(action)]
        if shown:
            lines += [f"{_title(group.title)}:", "", *map(_item, shown), ""]
    lines += ["```text", f"stablehlo-tools {COMMANDS[command].example}", "```", ""]
    return "\n".join([*lines, *json_page.sections(command), ""])


def _prose(text: str) -> Iterator[str]:
    """A docstring's paragraphs; those in columns, or indented, are code."""
    for number, paragraph in enumerate(text.strip().split("\n\n")):
        lines = paragraph.splitlines()
        if number:
            yield ""
        if any(line.startswith(" ") or _DRAWN.search(line) for line in lines):
            yield from ["```text", *lines, "```"]
        else:
            yield from map(_escaped, lines)


def _usage(parser: argparse.ArgumentParser) -> list[str]:
    formatter = argparse.HelpFormatter(prog=parser.prog, width=_WIDTH)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups, "")
    return formatter.format_help().strip().splitlines()


def _title(title: str | None) -> str:
    return (title or "options").capitalize()


def _is_shown(action: argparse.Action) -> bool:
    return action.help is not argparse.SUPPRESS and "--help" not in action.option_strings


def _item(action: argparse.Action) -> str:
    return f"- {_names(action)}: {_escaped(_help(action))}"


def _names(action: argparse.Action) -> str:
    taken = _taken(action)
    if not action.option_strings:
        return f"`{taken}`"
    return ", ".join(f"`{option} {taken}`".replace(" `", "`") for option in action.option_strings)


def _taken(action: argparse.Action) -> str:
    """What an option takes, as --help writes it."""
    if action.nargs == 0:
        return ""
    formatter = argparse.HelpFormatter("")
    fallback = action.dest.upper() if action.option_strings else action.dest
    return formatter._format_args(action, fallback)


def _help(action: argparse.Action) -> str:
    text = action.help or ""
    values = dict(vars(action), prog="stablehlo-tools")
    if isinstance(action.choices, (list, tuple, set, frozenset)):
        values["choices"] = ", ".join(map(str, action.choices))
    return " ".join((text % values).split()) or "see above"


def _escaped(text: str) -> str:
    """Prose in which Markdown finds no tags and no emphasis."""
    return re.sub(r"([<*_])(?![^`]*`)", r"\\\1", text)
