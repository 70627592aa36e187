"""The commands in the groups that --help lists them in. Reading this table costs nothing."""

from __future__ import annotations

from typing import NamedTuple

from stablehlo_tools.diagnostics import did_you_mean


class Command(NamedTuple):
    """A command: its summary in one line, and example arguments."""

    summary: str
    example: str


GROUPS = {
    "look": {
        "inspect": Command(
            "list the communicating ops of an artifact, and their cost on a device",
            "inspect step.jax_export --hardware h100",
        ),
        "report": Command(
            "draw the cost of communication: one HTML page, or a Perfetto trace",
            "report step.jax_export fast.jax_export --hardware h100 -o report.html",
        ),
        "compile": Command(
            "compile for cpu, gpu or tpu and read back the order of the collectives",
            "compile step.jax_export --target gpu",
        ),
        "import-trace": Command(
            "turn a jax.profiler trace into a profile of measured times",
            "import-trace trace.json.gz -o measured.json",
        ),
    },
    "transform": {
        "plan": Command(
            "choose the mesh and the shardings for a step that was exported for one device",
            "plan step.jax_export --hardware h100 --devices 64 -o planned.jax_export",
        ),
        "optimize": Command(
            "find the pipeline that makes a program fastest on a machine, and prove it",
            "optimize step.jax_export --target gpu -o fast.jax_export --report why.html",
        ),
        "opt": Command(
            "run a pipeline of passes on an artifact",
            "opt step.jax_export -p partition,thread-tokens -o out.jax_export",
        ),
        "align-order": Command(
            "put the collectives of separately compiled programs into one order",
            "align-order worker0.jax_export worker1.jax_export -o aligned",
        ),
    },
    "prove": {
        "verify": Command(
            "prove on random inputs that two artifacts compute the same values",
            "verify step.jax_export out.jax_export --rtol 1e-4 --atol 1e-6",
        ),
        "check-order": Command(
            "prove that separately compiled programs cannot deadlock, or show how they can",
            "check-order worker0.jax_export worker1.jax_export",
        ),
    },
    "schedule": {
        "schedule": Command(
            "write, check and time a pipeline schedule, or compare all of them",
            "schedule compare --stages 4 --microbatches 16",
        ),
        "layer-order": Command(
            "write where a pipeline with layout=pipeline keeps each layer, for checkpoints",
            "layer-order step.jax_export -p 'expand-pipeline{microbatches=4 layout=pipeline}'",
        ),
        "overlap-graph": Command(
            "schedule a task graph so that compute hides its communication",
            "overlap-graph graph.json -o schedule.json",
        ),
    },
    "programs of ranks": {
        "expand-mpmd": Command(
            "turn a training step into one program for each rank of a pipeline",
            "expand-mpmd step.jax_export -o ranks --schedule zb-v --ranks 2",
        ),
        "check-mpmd": Command(
            "prove that rank programs run their schedule, and compare their values with the step's",
            "check-mpmd ranks --of step.jax_export",
        ),
        "run-mpmd": Command(
            "run a set of rank programs and compare it with the program it was made from",
            "run-mpmd ranks step.jax_export",
        ),
        "lower-mpmd": Command(
            "rewrite the transfers of a set of rank programs for a runtime",
            "lower-mpmd ranks -o gpu --transfers both-ends",
        ),
    },
    "tests": {
        "make-test": Command(
            "turn an artifact and a pipeline into a lit test",
            "make-test step.jax_export -p thread-tokens -o step.mlir",
        )
    },
    "this tool": {
        "doctor": Command(
            "list the installed packages, and the compilers that work here", "doctor"
        ),
        "completion": Command(
            "print a script that completes commands, options, passes and hardware in bash, zsh "
            "or tcsh",
            "completion zsh > ~/.zfunc/_stablehlo-tools",
        ),
    },
}
COMMANDS = {name: each for group in GROUPS.values() for name, each in group.items()}


def command_list() -> str:
    """Returns the list of commands in their groups, with a first command to try."""
    width = max(map(len, COMMANDS))
    lines: list[str] = []
    for group, commands in GROUPS.items():
        lines += [f"{group}:", *(f"  {n:{width}}  {each.summary}" for n, each in commands.items())]
        lines.append("")
    begin = COMMANDS["optimize"].example
    return "\n".join(
        [*lines, "begin with:", f"  stablehlo-tools {begin}", "COMMAND --help says more"]
    )


def unknown(word: str) -> str:
    """Returns the error message for an unknown command."""
    hint = did_you_mean(word.lower(), COMMANDS) or "--help lists the commands"
    return f"no command is called {word!r}; {hint}"
