"""How `schedule` shows a timed schedule: the options, the forms, colours and widths."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING

from stablehlo_tools.cli.schedule_options import count

if TYPE_CHECKING:
    from stablehlo_tools.schedules.forms.json_form import Search
    from stablehlo_tools.schedules.simulator import Timeline

_FORMS = ("table", "json", "csv", "html", "text")
_OF_SUFFIX = {".json": "json", ".csv": "csv", ".html": "html", ".txt": "text"}
_COLUMNS = 120  # where the output is no terminal
_STDOUT = "-"


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Form, file, colours and width."""
    output = parser.add_argument_group("output")
    output.add_argument(
        "--format", choices=_FORMS, help="what to print; by the suffix of FILE, or table"
    )
    output.add_argument("-o", "--output", metavar="FILE", help="write there instead of printing")
    output.add_argument(
        "--transfers", action="store_true", help="write the sends and receives into the schedule"
    )
    output.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="of the table"
    )
    output.add_argument(
        "--width", metavar="COLUMNS", type=count, help="of the table; the terminal's by default"
    )


def to_file(arguments: argparse.Namespace) -> bool:
    """Whether the output is a file, not standard output."""
    return arguments.output not in (None, _STDOUT)


def encoded(arguments: argparse.Namespace, timeline: Timeline, search: Search | None = None) -> str:
    """A timed schedule in the form that is asked for."""
    from stablehlo_tools.schedules.forms.aligned import aligned

    form = form_of(arguments)
    if form == "json":
        from stablehlo_tools.schedules.forms.json_form import encode_timed

        return encode_timed(timeline, search)
    if form == "csv":
        from stablehlo_tools.schedules.forms import csv_form

        return csv_form.encode(aligned(timeline.table))
    if form == "text":
        from stablehlo_tools.schedules.forms import text

        return text.encode(aligned(timeline.table))
    if form == "html":
        from stablehlo_tools.report.schedule_html import render_page

        return render_page(timeline, search)
    from stablehlo_tools.report.schedule_table import to_text

    width = arguments.width or shutil.get_terminal_size((_COLUMNS, 24)).columns
    return to_text(timeline, width, _in_colour(arguments), search)


def form_of(arguments: argparse.Namespace) -> str:
    """The form that is asked for, else the one that the output's suffix says, else a table."""
    suffix = PurePath(arguments.output or "").suffix.lower()
    return arguments.format or _OF_SUFFIX.get(suffix, "table")


def _in_colour(arguments: argparse.Namespace) -> bool:
    if arguments.color != "auto":
        return arguments.color == "always"
    if to_file(arguments) or os.environ.get("NO_COLOR"):
        return False
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def put(arguments: argparse.Namespace, text: str) -> int:
    """Prints the text, or writes it whole into the output; returns the exit code."""
    if not to_file(arguments):
        sys.stdout.write(text)
        return 0
    from stablehlo_tools.files.atomic import write_atomically

    write_atomically(arguments.output, text.encode())
    return 0
