"""How `schedule` is asked: the model, the machine, and how a timed schedule is shown."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING

from stablehlo_tools.cli.shared_arguments import amount, positive
from stablehlo_tools.cli.streams import put_in_colour
from stablehlo_tools.cli.terminal import in_colour
from stablehlo_tools.cli.usage_errors import command_line

if TYPE_CHECKING:
    from stablehlo_tools.schedules.forms import SearchSummary
    from stablehlo_tools.schedules.setting import Costs, ScheduleSetting
    from stablehlo_tools.schedules.table_simulator import Timeline


_UNIT_COST = (1.0, 1.0, 1.0, 0.0)


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a setting: counts, times, memory."""
    counts = parser.add_argument_group("counts")
    counts.add_argument("--stages", metavar="P", type=positive, help="pipeline ranks")
    counts.add_argument("--microbatches", metavar="M", type=positive, help="microbatches per step")
    counts.add_argument(
        "--chunks", metavar="V", type=positive, help="stages per rank (default: from the schedule)"
    )
    counts.add_argument(
        "--slices",
        metavar="K",
        type=positive,
        help="slices of a microbatch's sequence, for schedules that cut it",
    )
    times = parser.add_argument_group("times, of one rank's share and one microbatch")
    times.add_argument(
        "--cost",
        metavar="F,B,W,C",
        type=_cost,
        help="forward, input gradient, weight gradient, and the latency of one hop between ranks "
        "(1,1,1,0); chunks divide the first three evenly",
    )
    times.add_argument(
        "--costs", metavar="FILE", help="times and bytes of every slice of the model, .json"
    )
    times.add_argument(
        "--overlapped",
        metavar="X",
        type=amount,
        help="time of a forward and a backward that run at once, as a share of one after the "
        "other (1)",
    )
    times.add_argument(
        "--communication",
        choices=("overlapped", "blocking"),
        default="overlapped",
        help="whether transfers run in parallel with compute, or block both ranks",
    )
    memory = parser.add_argument_group("memory of one rank's share, in bytes or any other unit")
    memory.add_argument(
        "--activation",
        metavar="A[,K]",
        type=_activation,
        help="memory for one microbatch, and the part of it between input and weight gradient (1, "
        "and half of it)",
    )
    memory.add_argument(
        "--offload",
        metavar="X,T",
        type=_offload,
        help="offload up to a share X of the activations to the host until the backward; T: time "
        "to copy all activations of one microbatch in one direction, in parallel with compute",
    )
    memory.add_argument("--weights", metavar="B", type=amount, help="memory for parameters (0)")
    memory.add_argument("--message", metavar="B", type=amount, help="size of one transfer (0)")
    memory.add_argument("--memory-limit", metavar="X", type=amount, help="memory limit per rank")


def setting(arguments: argparse.Namespace) -> ScheduleSetting:
    """Returns the setting of a named schedule. Raises ToolError if counts are missing."""
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.schedules.setting import ScheduleSetting, check_counts

    ranks, microbatches = arguments.stages, arguments.microbatches
    if ranks is None or microbatches is None:
        missing = [] if ranks is not None else ["--stages", "4"]
        missing += [] if microbatches is not None else ["--microbatches", "16"]
        raise ToolError(
            f"schedule {arguments.name} needs --stages P, the number of ranks, and --microbatches "
            "M",
            hint=command_line([*arguments.words, *missing]),
        )
    check_counts(ranks, microbatches, arguments.chunks, arguments.slices)
    slices = slice_costs(arguments, ranks, ranks)
    limit, cut = arguments.memory_limit, arguments.slices
    asked = ScheduleSetting(ranks, microbatches, slices, arguments.chunks, limit, cut)
    if arguments.costs is not None:
        _check_slices(asked, arguments.costs)
    return asked


def _check_slices(asked: ScheduleSetting, path: str) -> None:
    """Raises ToolError, naming the file, if its lists do not fit the number of stages."""
    from stablehlo_tools.diagnostics import ToolError, naming

    refused: ToolError | None = None
    for chunks in (1, 2, 4) if asked.chunks is None else (asked.chunks,):
        try:
            asked.costs(asked.ranks * chunks)
            return
        except ToolError as error:
            refused = refused or error
    with naming(path):
        raise ToolError(f"its lists: {refused.diagnostic.message}" if refused else "")


def slice_costs(arguments: argparse.Namespace, ranks: int, slices: int) -> Costs:
    """Returns the costs of `slices` equal slices of the model, from the file or the options."""
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.schedules.setting import costs, read_costs

    single = ("cost", "overlapped", "activation", "weights", "message")
    given = [f"--{name}" for name in single if getattr(arguments, name) is not None]
    if arguments.costs is not None:
        if given:
            raise ToolError(f"--costs FILE already states {given[0]}: give only one of them")
        return read_costs(arguments.costs, ranks, slices)
    forward, input_gradient, weight_gradient, communication = arguments.cost or _UNIT_COST
    activation, kept = arguments.activation or (1.0, None)
    return costs(
        slices,
        forward=forward * ranks / slices,
        input_gradient=input_gradient * ranks / slices,
        weight_gradient=weight_gradient * ranks / slices,
        communication=communication,
        overlapped=1.0 if arguments.overlapped is None else arguments.overlapped,
        activation=activation * ranks / slices,
        kept=None if kept is None else kept * ranks / slices,
        weights=(arguments.weights or 0.0) * ranks / slices,
        message=arguments.message or 0.0,
    )


def _cost(text: str) -> tuple[float, float, float, float]:
    figures = [amount(part) for part in text.split(",")]
    if len(figures) not in (3, 4):
        raise argparse.ArgumentTypeError(f"{text!r} is not F,B,W,C or F,B,W: three times or four")
    forward, input_gradient, weight_gradient, *latency = figures
    return forward, input_gradient, weight_gradient, latency[0] if latency else 0.0


def _activation(text: str) -> tuple[float, float | None]:
    figures = [amount(part) for part in text.split(",")]
    if len(figures) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not A or A,K: one amount or two")
    return figures[0], figures[1] if len(figures) > 1 else None


def _offload(text: str) -> tuple[float, float]:
    figures = [amount(part) for part in text.split(",")]
    if len(figures) != 2 or figures[0] > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not X,T: a share up to 1, and a time")
    return figures[0], figures[1]


_FORMS = ("table", "json", "csv", "html", "text")
_OF_SUFFIX = {".json": "json", ".csv": "csv", ".html": "html", ".txt": "text"}
_COLUMNS = 120  # if the output is not a terminal
_STDOUT = "-"


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the output: form, file, colours and width."""
    output = parser.add_argument_group("output")
    output.add_argument(
        "--format", choices=_FORMS, help="output form (default: by the suffix of FILE, or table)"
    )
    output.add_argument("-o", "--output", metavar="FILE", help="output file (default: print)")
    output.add_argument(
        "--transfers", action="store_true", help="write the sends and receives into the schedule"
    )
    output.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="of the table"
    )
    output.add_argument(
        "--width",
        metavar="COLUMNS",
        type=positive,
        help="columns of the table (default: the terminal's)",
    )


def to_file(arguments: argparse.Namespace) -> bool:
    """Returns True if the output is a file, not standard output."""
    return arguments.output not in (None, _STDOUT)


def encode_schedule(
    arguments: argparse.Namespace, timeline: Timeline, search: SearchSummary | None = None
) -> str:
    """Encodes a timed schedule in the chosen form."""
    from stablehlo_tools.schedules.explicit_tables import align_columns
    from stablehlo_tools.schedules.forms import encode_timed, to_csv, to_text

    form = form_of(arguments)
    if form == "json":
        return encode_timed(timeline, search)
    if form == "csv":
        return to_csv(align_columns(timeline.table))
    if form == "text":
        return to_text(align_columns(timeline.table))
    if form == "html":
        from stablehlo_tools.report.schedule_html import render_page

        return render_page(timeline, search)
    from stablehlo_tools.report.schedule_table import to_text as to_table_text

    width = arguments.width or shutil.get_terminal_size((_COLUMNS, 24)).columns
    is_coloured = arguments.color == "always"
    if arguments.color == "auto":
        is_coloured = not to_file(arguments) and in_colour(sys.stdout)
    return to_table_text(timeline, width, is_coloured, search)


def form_of(arguments: argparse.Namespace) -> str:
    """Returns the form of `--format`, else that of the output's suffix, else `table`."""
    suffix = PurePath(arguments.output or "").suffix.lower()
    return arguments.format or _OF_SUFFIX.get(suffix, "table")


def put(arguments: argparse.Namespace, text: str) -> int:
    """Prints the text, or writes it atomically to the output; returns the exit code 0."""
    if not to_file(arguments):
        put_in_colour(text)
        return 0
    from stablehlo_tools.files.atomic import write_atomically

    write_atomically(arguments.output, text.encode())
    return 0
