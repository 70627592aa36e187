"""Write, check and time a pipeline schedule; `schedule compare` finds the best of all.

NAME is a schedule known by name, `compare`, or a file: CSV as PyTorch's pipelines dump it, JSON, or
text (`-`: standard input). A file is validated first: if it cannot run, exit code 1 and the
reason. docs/reference/commands/schedule.md describes names, forms and figures.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stablehlo_tools.cli.schedule_options import (
    add_output_arguments,
    add_setting_arguments,
    encode_schedule,
    form_of,
    put,
    setting,
    slice_costs,
    to_file,
)
from stablehlo_tools.cli.shared_arguments import positive, positive_amount, whole_number
from stablehlo_tools.diagnostics import ToolError, naming

if TYPE_CHECKING:
    from stablehlo_tools.schedules.forms import SearchSummary
    from stablehlo_tools.schedules.setting import Costs
    from stablehlo_tools.schedules.table import Table
    from stablehlo_tools.schedules.table_simulator import Timeline

_COMPARE = "compare"
_FILES = (".csv", ".json", ".txt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `schedule` to its parser."""
    parser.add_argument("name", metavar="NAME", help="a schedule's name, compare, or a file")
    add_setting_arguments(parser)
    checks = parser.add_argument_group("schedules from files")
    checks.add_argument(
        "--buffers",
        metavar="K",
        type=whole_number,
        help="messages that may be pending between two ranks, if the file names its transfers "
        "(default 0: a send waits for its receive)",
    )
    comparing = parser.add_argument_group("compare")
    comparing.add_argument(
        "--max-chunks", metavar="V", type=positive, help="most stages per rank to try (4)"
    )
    comparing.add_argument("--no-search", action="store_true", help="skip auto, the slowest")
    searching = parser.add_argument_group("auto")
    searching.add_argument(
        "--effort", metavar="X", type=positive_amount, help="search X times as long"
    )
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints or writes the schedule. Raises ToolError before anything is written."""
    from stablehlo_tools.schedules.catalogue import entries

    if to_file(arguments):
        from stablehlo_tools.files.atomic import check_writable

        check_writable(arguments.output)
    known = [entry.name for entry in entries()]
    _check_options(arguments, known, [entry.name for entry in entries() if entry.sliced])
    if arguments.name == _COMPARE:
        return put(arguments, _comparison(arguments))
    if arguments.name in known:
        try:
            timeline = _catalogue_timeline(arguments)
        except ToolError as error:
            if error.diagnostic.instead:  # the option for the ranks is --stages
                wrong, meant = (
                    text.replace("ranks=", "stages=") for text in error.diagnostic.instead
                )
                error.diagnostic = replace(error.diagnostic, instead=(wrong, meant))
            raise
        return put(arguments, encode_schedule(arguments, *timeline))
    from stablehlo_tools.schedules.validator import violations

    _check_is_file(arguments.name, known)
    table, costs = _read(arguments)
    faults = violations(table, costs, arguments.memory_limit, arguments.buffers or 0)
    if faults:
        if arguments.format == "json":
            listed = [
                {**fault._asdict(), "rule": fault.rule.number, "meaning": fault.rule.meaning}
                for fault in faults
            ]
            print(json.dumps({"valid": False, "violations": listed}, indent=1))
        else:
            print("\n".join(f"{arguments.name}: {fault}" for fault in faults))
        return 1
    with naming(arguments.name):
        timeline = _time_table(arguments, table, costs)
    return put(arguments, encode_schedule(arguments, timeline))


def _catalogue_timeline(arguments: argparse.Namespace) -> tuple[Timeline, SearchSummary | None]:
    """Returns a timed schedule of the catalogue, and the gap to the bound if it was searched.

    Raises ToolError if there is none for the setting.
    """
    from stablehlo_tools.schedules.catalogue import build
    from stablehlo_tools.schedules.forms import SearchSummary
    from stablehlo_tools.schedules.generators.named import AUTO
    from stablehlo_tools.schedules.search.auto import EFFORT, find_best

    asked = setting(arguments)
    search: SearchSummary | None = None
    if arguments.name == AUTO:
        best = find_best(asked, int(EFFORT * (arguments.effort or 1)))
        table, search = best.table, SearchSummary(best.origin, best.bound, best.gap)
    else:
        table = build(arguments.name, asked)
    timeline = _time_table(arguments, table, asked.costs_of(table))
    held = max(timeline.peak_bytes)
    if not asked.fits(held):
        raise ToolError(
            f"{timeline.table.name}: rank {timeline.peak_bytes.index(held)} needs {held:.15g}, and "
            f"the limit is {asked.limit:.15g}; schedule compare lists the schedules that fit"
        )
    return timeline, search


def _read(arguments: argparse.Namespace) -> tuple[Table, Costs]:
    """Reads the table of a file and its costs. Raises ToolError if counts of the options differ."""
    from stablehlo_tools.schedules.forms import read_table
    from stablehlo_tools.schedules.setting import ScheduleSetting

    table = read_table(arguments.name)
    with naming(arguments.name):
        table = _cut(table, arguments.slices)
        chunks, ranks = table.placement.chunks, table.ranks
        own = {"stages": ranks, "microbatches": table.sequences, "chunks": chunks}
        for option, count in own.items():
            asked = getattr(arguments, option)
            if asked not in (None, count):
                raise ToolError(
                    f"--{option} {asked}: the schedule in the file has {count}",
                    instead=(f"{option}={asked}", f"{option}={count}"),
                )
    slices = slice_costs(arguments, ranks, table.stages)
    return table, ScheduleSetting(ranks, table.sequences, slices).costs_of(table)


def _cut(table: Table, slices: int | None) -> Table:
    """Returns the table with `slices` slices per microbatch, which a CSV does not state.

    Raises ToolError if the table states another number, or has no multiple of it.
    """
    if slices in (None, table.sequence_slices):
        return table
    if table.sequence_slices > 1:
        raise ToolError(f"--slices {slices}: the schedule in the file has {table.sequence_slices}")
    if table.microbatches % slices:
        raise ToolError(
            f"--slices {slices}: the file has {table.microbatches} microbatches in all, not a "
            "multiple of it"
        )
    return replace(table, sequence_slices=slices)


def _time_table(arguments: argparse.Namespace, table: Table, costs: Costs) -> Timeline:
    from stablehlo_tools.schedules.catalogue import time_schedule

    blocking = arguments.communication == "blocking"
    if arguments.offload is not None:
        from stablehlo_tools.schedules.activation_offload import offload_activations

        table, costs = offload_activations(table, costs, *arguments.offload)
    return time_schedule(table, costs, blocking, arguments.transfers, arguments.buffers or 0)


def _comparison(arguments: argparse.Namespace) -> str:
    from stablehlo_tools.report.schedule_table import (
        comparison_csv,
        comparison_json,
        comparison_text,
    )
    from stablehlo_tools.schedules.catalogue import compare
    from stablehlo_tools.schedules.generators.named import MOST_CHUNKS

    form = form_of(arguments)
    writers = {"table": comparison_text, "json": comparison_json, "csv": comparison_csv}
    if form not in writers:
        raise ToolError(f"schedule compare prints {', '.join(writers)}, not {form}")
    blocking = arguments.communication == "blocking"
    most = arguments.max_chunks or MOST_CHUNKS
    return writers[form](compare(setting(arguments), most, blocking, not arguments.no_search))


def _check_options(arguments: argparse.Namespace, known: list[str], sliced: list[str]) -> None:
    """Raises ToolError for an option that would have no effect."""
    compares, searches = (arguments.name == name for name in (_COMPARE, "auto"))
    is_file = not compares and arguments.name not in known
    cuts = compares or is_file or arguments.name in sliced
    for option, given, takes_it, where in (
        ("--slices", arguments.slices is not None, cuts, f"{', '.join(sliced)}, compare or a file"),
        ("--buffers", arguments.buffers is not None, is_file, "a schedule from a file"),
        ("--max-chunks", arguments.max_chunks is not None, compares, _COMPARE),
        ("--no-search", arguments.no_search, compares, _COMPARE),
        ("--offload", arguments.offload is not None, not compares, "a single schedule"),
        ("--transfers", arguments.transfers, not compares, "a single schedule"),
        ("--effort", arguments.effort is not None, searches, "auto"),
    ):
        if given and not takes_it:
            raise ToolError(f"{option} is only for {where}")


def _check_is_file(name: str, known: list[str]) -> None:
    if name == "-" or name.lower().endswith(_FILES) or Path(name).exists():
        return
    from stablehlo_tools.schedules.catalogue import meant_by

    near = meant_by(name, _COMPARE)
    meant = f"did you mean {near!r}? " if near else ""
    raise ToolError(
        f"no schedule or file is called {name!r}; {meant}known schedules: {', '.join(known)}, "
        f"{_COMPARE}",
        instead=(name, near) if near else None,
    )
