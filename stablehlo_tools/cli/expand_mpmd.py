"""Turn an exported training step into a program for each rank of a pipeline, under any schedule.

INPUT accumulates gradients in a loop over microbatches; --microbatches M makes such a loop in a
step that reads its batch at once. The step is cut into stages of equal work, or at its named stages
(jax.named_scope("stage_0"), ...). DIR gets rank_0.mlir, rank_1.mlir, ... and manifest.json, which
lists the arguments and results of each rank: all of them or none. With --compare nothing is
written: every schedule is timed for this program. Exit code 0: done; 2: bad input.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from stablehlo_tools.cli.shared_arguments import add_rules, gib, positive, state_given_rules
from stablehlo_tools.cli.usage_errors import command_line
from stablehlo_tools.processes import activity

if TYPE_CHECKING:
    from stablehlo_tools.artifacts.artifact import Artifact
    from stablehlo_tools.mpmd.expansion import ExpansionRequest

_TERMS = """
makespan: time of a step on {}, by the cost model; messages: between ranks, in a step
by END, by SPAN: idle share of the ranks, to the end of the step or to the last step of each rank
alive: most activations on a rank, in units of its share of the model for one microbatch
memory: most bytes on a rank, with weights"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `expand-mpmd` to its parser."""
    parser.add_argument("input", metavar="INPUT", help="the artifact, or - for standard input")
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="output directory, created if missing"
    )
    parser.add_argument(
        "--schedule",
        metavar="NAME",
        help="a name from `stablehlo-tools schedule`, or a file: text, JSON, PyTorch's CSV",
    )
    parser.add_argument(
        "--ranks",
        metavar="P",
        type=positive,
        help="number of pipeline ranks (default: from the schedule file)",
    )
    parser.add_argument("--chunks", metavar="V", type=positive, help="stages on each rank")
    parser.add_argument(
        "--microbatches",
        metavar="M",
        type=positive,
        help="number of microbatches, for a step without a loop over them",
    )
    parser.add_argument(
        "--per-microbatch",
        action="store_true",
        help="compute auxiliary losses and other statistics of the batch for each microbatch, and "
        "average them, as frameworks do",
    )
    parser.add_argument(
        "--pipeline-axis",
        metavar="AXIS",
        help="mesh axis that the ranks are placed along; each rank has the devices of the other "
        "axes (default: each rank has the whole mesh)",
    )
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help="device that the stages are timed and balanced for (default: tpu-v5e for an export "
        "to TPU and no GPU, else h100)",
    )
    parser.add_argument(
        "--memory-limit",
        metavar="GIB",
        type=gib,
        help="with --compare: memory limit per rank in GiB",
    )
    parser.add_argument(
        "--compare", action="store_true", help="time every schedule, and write nothing"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_rules(parser)


def run(arguments: argparse.Namespace) -> int:
    """Writes the set, or compares. Raises ToolError on bad input."""
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.diagnostics import ToolError, naming
    from stablehlo_tools.mpmd.expansion import ExpansionRequest
    from stablehlo_tools.mpmd.staging.pipeline_axis import ranks_along
    from stablehlo_tools.report.exposure import hardware_for
    from stablehlo_tools.schedules.catalogue import entry_named
    from stablehlo_tools.schedules.forms import SUFFIXES, read_table

    words = arguments.words
    if arguments.compare == (arguments.output is not None):
        without = [word for word in words if word != "--compare"]
        raise ToolError(
            "give -o DIR to write the programs, or --compare to time every schedule",
            hint=command_line(without if arguments.compare else [*words, "--compare"]),
        )
    if not arguments.compare and arguments.schedule is None:
        raise ToolError(
            "give --schedule NAME, or --compare to list the schedules",
            hint=command_line([*words, "--schedule", "1f1b"]),
        )
    if arguments.memory_limit is not None and not arguments.compare:
        raise ToolError("--memory-limit needs --compare", hint=command_line([*words, "--compare"]))
    given = None
    if arguments.schedule and arguments.schedule.lower().endswith(SUFFIXES):
        given = read_table(arguments.schedule)
    elif arguments.schedule:
        entry_named(arguments.schedule)  # reports an unknown schedule first
    ranks = arguments.ranks
    if ranks is None and given is not None:
        ranks = given.ranks
    axis = arguments.pipeline_axis
    if ranks is None and axis is None:
        raise ToolError(
            "give --ranks P, the number of pipeline ranks",
            hint=command_line([*words, "--ranks", "4"]),
        )
    loaded = artifact.load(arguments.input)
    state_given_rules(arguments, loaded)
    if ranks is None:
        with naming(loaded.name):
            ranks = ranks_along(loaded.module, axis)
    request = ExpansionRequest(
        arguments.schedule or "",
        ranks,
        hardware_for(loaded, arguments.hardware),
        arguments.chunks,
        arguments.microbatches,
        given,
        axis,
        arguments.per_microbatch,
    )
    command = _compare if arguments.compare else _write
    return command(arguments, loaded, request)


def _write(arguments: argparse.Namespace, loaded: Artifact, request: ExpansionRequest) -> int:
    import json

    from stablehlo_tools.diagnostics import render_diagnostics
    from stablehlo_tools.mpmd.expansion import expand_mpmd
    from stablehlo_tools.mpmd.rank_set import check_writable, write
    from stablehlo_tools.report.mpmd_report import summary, summary_text

    check_writable(arguments.output)
    activity.show(f"a program for each rank of {loaded.name}")
    expansion = expand_mpmd(loaded, request)
    write(arguments.output, expansion.manifest, expansion.modules)
    facts = summary(expansion.manifest, expansion.alone)
    for text in render_diagnostics(expansion.warnings, loaded.name):
        print(text, file=sys.stderr)
    print(json.dumps(facts, indent=1) if arguments.json else summary_text(facts))
    return 0


def _compare(arguments: argparse.Namespace, loaded: Artifact, request: ExpansionRequest) -> int:
    from stablehlo_tools.mpmd.expansion import compare_schedules
    from stablehlo_tools.report.schedule_table import comparison_json, comparison_text
    from stablehlo_tools.report.units import OF_SECONDS

    limit = None if arguments.memory_limit is None else arguments.memory_limit * 2**30
    activity.show(f"comparing schedules of {loaded.name}")
    compared = compare_schedules(loaded, request, limit)
    if arguments.json:
        print(comparison_json(compared), end="")
        return 0
    print(comparison_text(compared, OF_SECONDS) + _TERMS.format(request.hardware.name))
    return 0
