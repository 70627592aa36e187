"""Draw what communication costs: one HTML page to show to others, or a trace for Perfetto.

INPUT is timed on a named device as `inspect --hardware` times it. AFTER, if given, stands beside it
on the same time axis: the program after a pass, say; and with --target so do the schedules of the
compilers. The suffix of OUTPUT says what is written: `.html`, one file that needs no network, or
`.json`, a trace for ui.perfetto.dev. A program that leaves its collectives to the compiler is
partitioned first. Inputs are MLIR text, MLIR bytecode, portable artifacts or jax.export files.
"""

from __future__ import annotations

import argparse
import json
from pathlib import PurePath
from typing import TYPE_CHECKING

from stablehlo_tools.cli.timing import add_timing_arguments, question, tool_version

if TYPE_CHECKING:
    from stablehlo_tools.report.document import Document

_SUFFIXES = (".html", ".json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `report`."""
    parser.add_argument("input", metavar="INPUT", help="the artifact, or - for standard input")
    parser.add_argument("after", metavar="AFTER", nargs="?", help="another to compare it with")
    parser.add_argument("-o", "--output", metavar="OUTPUT", required=True, help=".html or .json")
    parser.add_argument("--title", metavar="TEXT", help="the title of the page")
    add_timing_arguments(parser, "what the program was exported for, tpu-v5e or h100")


def run(arguments: argparse.Namespace) -> int:
    """Writes the page or the trace. Raises ToolError, and then nothing is written."""
    from stablehlo_tools import artifact, files
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.exposure import exposure
    from stablehlo_tools.report.document import Document

    if PurePath(arguments.output).suffix not in _SUFFIXES:
        raise ToolError(
            f"{arguments.output}: the output is a page, NAME.html, or a trace for Perfetto, "
            "NAME.json"
        )
    files.check_writable(arguments.output)
    loaded = [artifact.load(name) for name in (arguments.input, arguments.after) if name]
    asked = question(arguments, loaded[0], timeline=True)
    programs = exposure(loaded, asked)
    title = arguments.title or " and ".join(dict.fromkeys(p.name for p in programs))
    document = Document(title, tool_version(), tuple(programs))
    files.write_atomically(arguments.output, _encoded(document, arguments.output))
    return 0


def _encoded(document: Document, output: str) -> bytes:
    from stablehlo_tools.report.html import render_page
    from stablehlo_tools.report.perfetto import perfetto_trace

    if PurePath(output).suffix == ".html":
        return render_page(document).encode()
    return json.dumps(perfetto_trace(document)).encode()
