"""Plan how a step that was exported for one device runs on many: mesh, and division of arguments.

For each mesh, the search of `partition` divides arguments and results together with all ops: data
parallelism, FSDP, tensor, sequence and expert parallelism and their mixtures follow from the cost
of kernels, links and memory. If memory is short, residuals are recomputed, or the step becomes a
loop over microbatches. The target's compiler times the best plans ahead of time, and decides.
OUTPUT is the step for all devices, after --passes; `optimize` makes it faster. A mesh and shardings
that the export has for these devices stay. Exit code 1: no plan fits.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from stablehlo_tools.cli.shared_arguments import (
    add_cluster,
    add_program_output,
    amount,
    cluster_executor,
    positive,
    tool_version,
)

if TYPE_CHECKING:
    from stablehlo_tools.mpmd.expansion import Expansion
    from stablehlo_tools.optimization.optimizer import Optimum
    from stablehlo_tools.optimization.plan_request import MeshShape, PlanRequest
    from stablehlo_tools.optimization.planning import DevicePlan


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
        "--target",
        choices=("gpu", "tpu"),
        help="the compiler that decides (default: that of --hardware)",
    )
    parser.add_argument(
        "--budget",
        metavar="SECONDS",
        type=amount,
        help="time limit of compiling in seconds (default: 300); 0: the model decides",
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
        "--pipeline",
        choices=("never", "auto", "always"),
        default="never",
        help="whether layers may be divided into the stages of a pipeline (default: never)",
    )
    parser.add_argument(
        "--passes",
        metavar="PIPELINE",
        help="passes to run on the divided step (default: partition,create-reduce-scatter); '' "
        "keeps the global view",
    )
    parser.add_argument(
        "--ranks",
        metavar="DIR",
        help="also write a program for each rank of a pipeline, as expand-mpmd does; for "
        "--pipeline always",
    )
    parser.add_argument(
        "--schedule", metavar="NAME", default="1f1b", help="the schedule of --ranks (default: 1f1b)"
    )
    parser.add_argument(
        "--optimize",
        action="store_true",
        help="search passes that make the plan faster, in a second --budget, as optimize does",
    )
    add_cluster(parser)
    parser.add_argument(
        "--replan", action="store_true", help="drop the mesh and the shardings that the export has"
    )


def run(arguments: argparse.Namespace) -> int:
    """Plans, writes, prints. Raises ToolError before anything is written."""
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.diagnostics import ToolError, naming
    from stablehlo_tools.files import atomic
    from stablehlo_tools.mpmd import rank_set
    from stablehlo_tools.optimization import optimum_report, plan_report
    from stablehlo_tools.optimization.planning import NoPlanError, drop_plan, plan
    from stablehlo_tools.processes import activity

    request = _request(arguments)
    if arguments.optimize and not request.compiler:
        raise ToolError("--optimize needs a compiler, and a budget for it")
    if arguments.ranks is not None and arguments.pipeline != "always":
        raise ToolError("--ranks needs a pipeline", added=("--pipeline", "always"))
    loaded = artifact.load(arguments.input)
    if arguments.output is not None:
        atomic.check_writable(arguments.output)
        artifact.output_form(arguments.output)
    if arguments.report is not None:
        atomic.check_writable(arguments.report)
    if arguments.ranks is not None:
        rank_set.check_writable(arguments.ranks)
    if arguments.replan:
        with naming(loaded.name):
            loaded = drop_plan(loaded)
    try:
        with naming(loaded.name), cluster_executor(arguments) as executor:
            found = plan(loaded, replace(request, executor=executor), activity.show)
    except NoPlanError as error:
        print(error.diagnostic.message)
        return 1
    answer, optimum = found.artifact, None
    if arguments.optimize:
        optimum = _optimum(arguments, found)
        answer = optimum.artifact
    ranks = _programs_of_ranks(arguments, found) if arguments.ranks else None
    files: list[tuple[str, bytes]] = []
    if arguments.output is not None:
        form = artifact.output_form(arguments.output)
        files.append((arguments.output, artifact.encode(answer, form)))
    if arguments.report is not None:
        files.append((arguments.report, plan_report.page(found, tool_version()).encode()))
    atomic.write_all_atomically(files)
    if ranks is not None and arguments.ranks:
        rank_set.write(arguments.ranks, ranks.manifest, ranks.modules)
    if arguments.json:
        data = plan_report.to_json(found)
        data["optimum"] = None if optimum is None else optimum_report.to_json(optimum)
        print(json.dumps(data, indent=1))
        return 0
    print(plan_report.to_text(found))
    if optimum is not None:
        print("\n" + optimum_report.to_text(optimum))
    if ranks is not None:
        print(f"  {arguments.ranks}: a program for each of {found.best.form.stages} ranks")
    return 0


def _request(arguments: argparse.Namespace) -> PlanRequest:
    from stablehlo_tools.cost.hardware import load_hardware
    from stablehlo_tools.optimization.plan_request import BUDGET, PASSES, PlanRequest, parse_specs

    return PlanRequest(
        load_hardware(arguments.hardware),
        arguments.devices,
        arguments.hardware,
        memory=None if arguments.memory_limit is None else arguments.memory_limit * 2**30,
        axes=arguments.axes,
        keep=parse_specs(arguments.keep, arguments.axes),
        target=arguments.target or "",
        budget=BUDGET if arguments.budget is None else arguments.budget,
        pipeline=arguments.pipeline,
        passes=PASSES if arguments.passes is None else arguments.passes,
    )


def _optimum(arguments: argparse.Namespace, found: DevicePlan) -> Optimum:
    from stablehlo_tools.optimization.optimizer import OptimizationRequest, optimize
    from stablehlo_tools.processes import activity

    request = OptimizationRequest(
        found.request.compiler,
        arguments.hardware,
        memory_limit=arguments.memory_limit,
        budget=found.request.budget,
    )
    return optimize(found.artifact, request, lambda each: activity.show(each.doing))


def _programs_of_ranks(arguments: argparse.Namespace, found: DevicePlan) -> Expansion:
    from stablehlo_tools.mpmd.expansion import ExpansionRequest, expand_mpmd
    from stablehlo_tools.optimization.plan_forms import STAGE

    form = found.best.form
    request = ExpansionRequest(
        arguments.schedule,
        form.stages,
        found.request.hardware,
        microbatches=form.microbatches,
        axis=STAGE,
    )
    return expand_mpmd(found.divided, request)


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
