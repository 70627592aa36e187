"""Draw the cost of communication: one HTML page to show to others, or a trace for Perfetto.

INPUT is timed as its device's compiler schedules it. Without the extra `aot`, or with
`--target as-written`, the order of the text counts. AFTER, such as the program after a pass, is
drawn on the same time axis. The suffix of OUTPUT chooses the form: `.html` is one file that needs
no network, `.json` a trace for ui.perfetto.dev. A program that leaves its collectives to the
compiler is partitioned first. Inputs are MLIR text, MLIR bytecode, portable artifacts or
jax.export files.

INPUT may be a directory with a set of rank programs, too: its schedule, messages, memory and proof
are drawn, or printed without OUTPUT.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path, PurePath

from stablehlo_tools.cli.shared_arguments import (
    add_timing_arguments,
    question,
    state_given_trips,
    tool_version,
)
from stablehlo_tools.cli.usage_errors import command_line

_SUFFIXES = (".html", ".json")
_COLUMNS = 120  # if the output is not a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `report` to its parser."""
    parser.add_argument("input", metavar="INPUT", help="the artifact, or - for standard input")
    parser.add_argument(
        "after", metavar="AFTER", nargs="?", help="another artifact, to compare with it"
    )
    parser.add_argument("-o", "--output", metavar="OUTPUT", help=".html or .json")
    parser.add_argument("--title", metavar="TEXT", help="title of the page")
    add_timing_arguments(parser, "the hardware that the program was exported for, tpu-v5e or h100")


def run(arguments: argparse.Namespace) -> int:
    """Writes the page or the trace. Raises ToolError before anything is written."""
    from stablehlo_tools.advice.advise import advise
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.files import atomic
    from stablehlo_tools.report.document import Document
    from stablehlo_tools.report.exposure import exposure, hardware_for
    from stablehlo_tools.report.html import render_page
    from stablehlo_tools.report.perfetto import perfetto_trace
    from stablehlo_tools.targets.chips import target_of
    from stablehlo_tools.targets.topologies import missing_package

    _check_output(arguments)
    if Path(arguments.input).is_dir():
        return _report_set(arguments)
    if arguments.output is None:
        raise ToolError(
            "a report of programs needs an output file: -o NAME.html or -o NAME.json",
            hint=command_line([*arguments.words, "-o", "report.html"]),
        )
    loaded = [artifact.load(name) for name in (arguments.input, arguments.after) if name]
    if not (arguments.target or arguments.measured or loaded[0].hlo is not None):
        # In the order of the text, the gain of a pass looks larger than XLA leaves it.
        target = target_of(hardware_for(loaded[0], arguments.hardware))
        if target is not None and missing_package(target) is None:
            arguments.target = [target.value]
    asked = question(arguments, loaded[0], timeline=True)
    for each in loaded[1:]:
        state_given_trips(arguments, each)
    programs = exposure(loaded, asked, advise)
    title = arguments.title or " and ".join(dict.fromkeys(p.name for p in programs))
    document = Document(title, tool_version(), tuple(programs))
    is_page = PurePath(arguments.output).suffix == ".html"
    text = render_page(document) if is_page else json.dumps(perfetto_trace(document))
    atomic.write_atomically(arguments.output, text.encode())
    return 0


def _check_output(arguments: argparse.Namespace) -> None:
    """Raises ToolError if the output has an unknown form or cannot be written."""
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.files import atomic

    if arguments.output is None:
        return
    path = PurePath(arguments.output)
    if path.suffix not in _SUFFIXES:
        raise ToolError(
            f"{arguments.output}: the suffix must be .html for a page, or .json for a Perfetto "
            "trace",
            instead=(arguments.output, str(path.with_suffix(".html"))) if path.name else None,
        )
    atomic.check_writable(arguments.output)


def _report_set(arguments: argparse.Namespace) -> int:
    """Draws a set of rank programs, or prints it."""
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.files import atomic
    from stablehlo_tools.mpmd.proof.proving import prove, set_report
    from stablehlo_tools.mpmd.rank_set import load
    from stablehlo_tools.report.mpmd_report import render_set, set_trace, to_page

    if arguments.after is not None or arguments.target or arguments.hardware or arguments.measured:
        raise ToolError(
            f"{arguments.input} is a set of rank programs, which is drawn alone and with the "
            "times that it was made with: omit AFTER, --target, --hardware and --measured"
        )
    name = arguments.title or arguments.input
    report = set_report(prove(load(arguments.input)), name, tool_version())
    if arguments.output is None:
        print(to_page(report, shutil.get_terminal_size((_COLUMNS, 24)).columns), end="")
    elif PurePath(arguments.output).suffix == ".html":
        atomic.write_atomically(arguments.output, render_set(report).encode())
    else:
        atomic.write_atomically(arguments.output, json.dumps(set_trace(report)).encode())
    return 0
