"""Search for the pipeline that makes a program fastest on a machine, and prove it.

Candidates are built from the passes of this toolkit, the most promising are compiled by XLA's
compiler for the target (no accelerator is needed), and the fastest compiled candidate is written,
after its values were compared with the export's. If none is faster, OUTPUT is a copy of INPUT.
Ctrl-C takes the best so far. Results are cached, so a second run is instant.
docs/concepts/search.md describes the search and the proof.
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from stablehlo_tools.cli.progress import SECONDS
from stablehlo_tools.cli.shared_arguments import (
    add_cluster,
    add_compiler_options,
    add_program_output,
    add_rules,
    add_trips,
    cluster_executor,
    compiler_options,
    positive,
    seconds,
    state_given_rules,
    state_given_trips,
    tool_version,
)
from stablehlo_tools.diagnostics import duration
from stablehlo_tools.processes import activity

if TYPE_CHECKING:
    from stablehlo_tools.artifacts.artifact import ArtifactForm
    from stablehlo_tools.optimization.candidate_search import Progress
    from stablehlo_tools.optimization.optimizer import OptimizationRequest

_TO_PROVE = 600.0  # seconds in which an interrupted search may prove the best candidate so far


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `optimize` to its parser."""
    parser.add_argument("input", metavar="INPUT", help="the artifact, or - for standard input")
    parser.add_argument(
        "--target", required=True, choices=("gpu", "tpu"), help="the compiler that decides"
    )
    parser.add_argument(
        "--hardware", metavar="NAME", help="the device: a profile's name or file (h100, tpu-v5e)"
    )
    add_program_output(parser, "all candidates and the reasons")
    parser.add_argument(
        "--budget",
        metavar="SECONDS",
        type=seconds,
        help="time limit of the search in seconds (default: 600)",
    )
    parser.add_argument(
        "--candidates",
        metavar="N",
        type=positive,
        help="compile N candidates without a time limit: the same answer on any machine",
    )
    parser.add_argument(
        "--pipeline-axis", metavar="AXIS", help="a mesh axis that a pipeline over layers may use"
    )
    parser.add_argument(
        "--jobs", metavar="N", type=positive, help="number of compilations to run in parallel"
    )
    add_cluster(parser)
    add_trips(parser)
    add_rules(parser)
    add_compiler_options(parser)
    parser.add_argument(
        "--no-option-trials",
        action="store_true",
        help="do not try other compiler options for the answer; the trials may need a quarter of "
        "the budget in addition",
    )
    parser.add_argument("--no-cache", action="store_true", help="ignore results of earlier runs")


def run(arguments: argparse.Namespace) -> int:
    """Searches, writes, prints; returns 0. Raises ToolError before anything is written."""
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.files import atomic
    from stablehlo_tools.optimization.optimizer import OptimizationRequest, optimize
    from stablehlo_tools.optimization.optimum_report import page, to_json, to_text

    form = _checked_outputs(arguments)
    given, name = atomic.read_input(arguments.input)
    loaded = artifact.parse(given, name)
    state_given_trips(arguments, loaded)
    state_given_rules(arguments, loaded)
    if form is not None:
        artifact.encode(loaded, form)  # refuses the output form before the search
    request = OptimizationRequest(
        target=arguments.target,
        hardware=arguments.hardware,
        memory_limit=arguments.memory_limit,
        budget=arguments.budget,
        candidates=arguments.candidates,
        pipeline_axis=arguments.pipeline_axis,
        workers=arguments.jobs,
        cache=not arguments.no_cache,
        options=compiler_options(arguments),
        try_options=not arguments.no_option_trials,
    )
    stop = threading.Event()  # Ctrl-C sets it; a second Ctrl-C ends the command
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    activity.ends_slowly(_TO_PROVE)
    with cluster_executor(arguments) as executor:
        asked = replace(request, executor=executor)
        optimum = optimize(loaded, asked, lambda each: activity.show(_told(each, request)), stop)
    stays = not optimum.changed and form is loaded.form
    files: list[tuple[str, bytes]] = []
    if form is not None:
        data = given if stays else artifact.encode(optimum.artifact, form)
        files.append((arguments.output, data))
    if arguments.report is not None:
        files.append((arguments.report, page(optimum, tool_version()).encode()))
    atomic.write_all_atomically(files)
    print(json.dumps(to_json(optimum), indent=1) if arguments.json else to_text(optimum))
    if stays and not arguments.json:
        print(f"\n  {arguments.output} is a copy of {name}")
    return 0


def _checked_outputs(arguments: argparse.Namespace) -> ArtifactForm | None:
    """Returns the form of the output, if there is one. Raises ToolError for invalid files."""
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.files import atomic

    if arguments.report is not None:
        if PurePath(arguments.report).suffix != ".html":
            page_name = str(PurePath(arguments.report).with_suffix(".html"))
            raise ToolError(
                f"{arguments.report}: the report is a page: name it PAGE.html",
                instead=(arguments.report, page_name),
            )
        atomic.check_writable(arguments.report)
    if arguments.output is None:
        return None
    if arguments.output == atomic.STDIN:
        raise ToolError(
            "the answer goes to standard output: give a file for the program, -o OUTPUT",
            instead=(atomic.STDIN, "fast.mlirbc"),
        )
    atomic.check_writable(arguments.output)
    return artifact.output_form(arguments.output)


def _told(progress: Progress, request: OptimizationRequest) -> str:
    """Returns `2/6 candidates, 85/600 s, best 302 ms: compiling …`; the line puts the 85."""
    if progress.best is None or progress.best.figures is None:
        return progress.doing
    limit = f"/{request.seconds:.0f}" if request.candidates is None else ""
    counts = f"{progress.tried}/{progress.known} candidates, {SECONDS}{limit} s"
    best = f"best {duration(progress.best.figures.total_ns)}"
    return ": ".join(filter(None, (f"{counts}, {best}", progress.doing)))
