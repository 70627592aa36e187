"""Print a script that makes a shell complete commands, options, passes, hardware and files.

Put it where the shell looks for it:

  bash   eval "$(stablehlo-tools completion bash)"                     in ~/.bashrc
  zsh    stablehlo-tools completion zsh > ~/.zfunc/_stablehlo-tools    with ~/.zfunc in fpath
  tcsh   eval "`stablehlo-tools completion tcsh`"                      in ~/.tcshrc

Passes and named pipelines are completed after -p, in bash and zsh also after each comma.
"""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "tcsh")
_BASH_PASSES = """
_stablehlo_tools_passes() {
  compgen -W "PASSES" -P "${1%"${1##*,}"}" -- "${1##*,}"
}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `completion` to its parser."""
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or tcsh")


def run(arguments: argparse.Namespace) -> int:
    """Prints the completion script."""
    print(script(arguments.shell))
    return 0


def script(shell: str) -> str:
    """Returns the completion script that the shell sources."""
    import shtab

    from stablehlo_tools.cli.commands import COMMANDS
    from stablehlo_tools.cli.parsers import parser_of
    from stablehlo_tools.cost.hardware import known_hardware
    from stablehlo_tools.passes.registry import NAMED, PASSES
    from stablehlo_tools.schedules.catalogue import entries

    hardware, schedules = known_hardware(), [entry.name for entry in entries()]
    passes = " ".join([*PASSES, *NAMED])
    pipeline = {
        "bash": "_stablehlo_tools_passes",
        "zsh": f"{{compset -P '*,'; compadd -S '' -- {passes}}}",
        "tcsh": f"({passes})",
        "preamble": {"bash": _BASH_PASSES.replace("PASSES", passes)},
    }
    words = {
        **dict.fromkeys(("hardware", "HARDWARE"), hardware),
        **dict.fromkeys(("schedule", "name"), schedules),
        "PASS": passes.split(),
    }
    parser, commands = parser_of(COMMANDS)
    for action in (each for command in commands.values() for each in command._actions):  # pyright: ignore[reportPrivateUsage]
        known = words.get(action.dest) or words.get(str(action.metavar))
        complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
        if known:
            action.choices = known
        elif action.choices is None and action.type is None and action.nargs != 0:
            complete = pipeline if action.dest == "pipeline" else complete
            setattr(action, "complete", complete)  # noqa: B010 - for shtab
    return shtab.complete(parser, shell)
