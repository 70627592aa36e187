"""Plan how a step that was exported for one device runs on many: mesh, and division of arguments.

For each mesh of up to two axes, the search of `partition` divides arguments and results together
with all ops: data parallelism, FSDP, tensor and sequence parallelism and their mixtures follow from
the cost of kernels, links and memory. With --target, its compiler times the best plans ahead of
time, after partition and create-reduce-scatter, and decides. OUTPUT is the same step with the mesh
and the shardings of arguments and results; `optimize` makes it faster. Exit code 1: no plan fits.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from stablehlo_tools.cli.shared_arguments import add_program_output, positive, seconds, tool_version

if TYPE_CHECKING:
    from stablehlo_tools.optimization.planning import MeshShape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `plan` to its parser."""
    parser.add_argument("input", metavar="INPUT", help="the artifact, or - for standard input")
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        required=True,
        help="the device: a profile's name or file (h100, tpu-v5e)",
    )
    parser.add_argument(
        "--devices", metavar="N", type=positive, required=True, help="number of devices"
    )
    add_program_output(parser, "the arguments and the timeline")
    parser.add_argument(
        "--target", choices=("gpu", "tpu"), help="the compiler that decides (default: the model)"
    )
    parser.add_argument(
        "--budget",
        metavar="SECONDS",
        type=seconds,
        help="time limit of planning and compiling in seconds (default: 300)",
    )
    parser.add_argument(
        "--axes",
        metavar="NAME=SIZE,…",
        type=_axes,
        default=(),
        help="the only mesh to consider, slowest axis first: data=8,model=8",
    )
    parser.add_argument(
        "--keep",
        metavar="PATH=SPEC",
        action="append",
        default=[],
        help="division of an argument over --axes: \"batch=P('data')\"; may be repeated",
    )
    parser.add_argument(
        "--replan", action="store_true", help="drop the mesh and the shardings that the export has"
    )


def run(arguments: argparse.Namespace) -> int:
    """Plans, writes, prints. Raises ToolError before anything is written."""
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.cost.hardware import load_hardware
    from stablehlo_tools.diagnostics import naming
    from stablehlo_tools.files import atomic
    from stablehlo_tools.optimization import plan_report
    from stablehlo_tools.optimization.planning import (
        NoPlanError,
        PlanRequest,
        drop_plan,
        parse_specs,
        plan,
    )
    from stablehlo_tools.processes import activity

    loaded = artifact.load(arguments.input)
    if arguments.output is not None:
        atomic.check_writable(arguments.output)
        artifact.output_form(arguments.output)
    if arguments.report is not None:
        atomic.check_writable(arguments.report)
    if arguments.replan:
        with naming(loaded.name):
            loaded = drop_plan(loaded)
    request = PlanRequest(
        load_hardware(arguments.hardware),
        arguments.devices,
        memory=None if arguments.memory_limit is None else arguments.memory_limit * 2**30,
        axes=arguments.axes,
        keep=parse_specs(arguments.keep, arguments.axes),
        target=arguments.target or "",
        budget=arguments.budget or 300.0,
    )
    try:
        with naming(loaded.name):
            found = plan(loaded, request, activity.show)
    except NoPlanError as error:
        print(error.diagnostic.message)
        return 1
    files: list[tuple[str, bytes]] = []
    if arguments.output is not None:
        form = artifact.output_form(arguments.output)
        files.append((arguments.output, artifact.encode(found.artifact, form)))
    if arguments.report is not None:
        files.append((arguments.report, plan_report.page(found, tool_version()).encode()))
    atomic.write_all_atomically(files)
    print(
        json.dumps(plan_report.to_json(found), indent=1)
        if arguments.json
        else plan_report.to_text(found)
    )
    return 0


def _axes(text: str) -> MeshShape:
    """Parses `data=8,model=8`."""
    axes: list[tuple[str, int]] = []
    for part in text.split(","):
        name, _, number = part.partition("=")
        if not name.isidentifier() or not number.isdecimal() or int(number) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=SIZE,NAME=SIZE")
        axes.append((name, int(number)))
    if len({name for name, _ in axes}) < len(axes):
        raise argparse.ArgumentTypeError(f"{text!r} names an axis twice")
    return tuple(axes)
