"""Print what makes a shell complete commands, options, passes, hardware and files.

Put it where the shell looks for it:

  bash   eval "$(stablehlo-tools completion bash)"                     in ~/.bashrc
  zsh    stablehlo-tools completion zsh > ~/.zfunc/_stablehlo-tools    with ~/.zfunc in fpath
  tcsh   eval "`stablehlo-tools completion tcsh`"                      in ~/.tcshrc

Behind -p the passes and the named pipelines are completed, in bash and zsh each behind the comma.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stablehlo_tools.cli.parsers import CommandParser

SHELLS = ("bash", "zsh", "tcsh")
_DIRECTORIES = {"DIR"}
_WORDS = "_stablehlo_tools_words_"  # and of what: a function of the shell
_BASH = """
{name}() {{
  compgen -W "{words}" -- "$1"
}}
"""
_BASH_LIST = """
{name}() {{
  local before="${{1%"${{1##*,}}"}}"
  compgen -W "{words}" -P "$before" -- "${{1##*,}}"
}}
"""
_ZSH = """
{name}() {{
  compadd -- {words}
}}
"""
_ZSH_LIST = """
{name}() {{
  compset -P '*,'
  compadd -S '' -- {words}
}}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `completion`."""
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or tcsh")


def run(arguments: argparse.Namespace) -> int:
    """Prints the script."""
    print(script(arguments.shell))
    return 0


def script(shell: str) -> str:
    """What the shell is to source."""
    import shtab

    from stablehlo_tools.cli.commands import COMMANDS
    from stablehlo_tools.cli.parsers import PROGRAM, parser_of

    parser, commands = parser_of(COMMANDS)
    parser.prog = PROGRAM
    lists = _lists()
    for command in commands.values():
        for action in _actions(command):
            _complete(action, lists)
    return shtab.complete(parser, shell, preamble=_preamble(shell, lists))


def _lists() -> dict[str, list[str]]:
    """The words that are not choices of a parser, by what they are."""
    from stablehlo_tools.cost.hardware import known_hardware
    from stablehlo_tools.passes.registry import NAMED, PASSES
    from stablehlo_tools.schedules.catalogue import entries

    passes = [*PASSES, *NAMED]
    schedules = [entry.name for entry in entries()]
    return {
        "pipeline": passes,
        "passes": passes,
        "hardware": list(known_hardware()),
        "schedules": schedules,
    }


def _actions(command: CommandParser) -> Iterator[argparse.Action]:
    yield from command._actions  # pyright: ignore[reportPrivateUsage]


def _complete(action: argparse.Action, lists: dict[str, list[str]]) -> None:
    """Says how an argument is completed, by what its help calls it; choices say it themselves."""
    import shtab

    if action.choices or action.nargs == 0:
        return
    kind = _kind(action)
    how: Any = shtab.DIRECTORY if action.metavar in _DIRECTORIES else shtab.FILE
    if kind:
        name = f"{_WORDS}{kind}"
        how = {"bash": name, "zsh": name, "tcsh": f"({' '.join(lists[kind])})"}
    elif action.type is not None:  # numbers and the like
        return
    action.complete = how  # pyright: ignore[reportAttributeAccessIssue]


def _kind(action: argparse.Action) -> str:
    """Which of the lists an argument takes a word of; "" for none."""
    if action.dest in ("pipeline", "hardware"):
        return action.dest
    if action.metavar == "HARDWARE":
        return "hardware"
    if action.metavar == "PASS":
        return "passes"
    return "schedules" if action.dest in ("schedule", "name") else ""


def _preamble(shell: str, lists: dict[str, list[str]]) -> str:
    """The functions that give the words; tcsh has none."""
    forms = {"bash": (_BASH, _BASH_LIST), "zsh": (_ZSH, _ZSH_LIST)}
    if shell not in forms:
        return ""
    return "".join(
        forms[shell][kind == "pipeline"].format(name=f"{_WORDS}{kind}", words=" ".join(words))
        for kind, words in lists.items()
    )
