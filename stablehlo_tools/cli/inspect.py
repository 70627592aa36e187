"""List the communicating ops of an artifact, and their cost on a device.

Without a device: kind, participants, bytes, reduction and place of each op. With --hardware or
--target: the total against a lower bound, the memory peak, the exposed part of each collective,
and advice with the gain of each change. A program that leaves its collectives to the compiler is
partitioned first. For pipelines over a mesh axis: the bubble, and the work of each rank in each
tick.

INPUT is MLIR text, MLIR bytecode, a portable artifact, a jax.export file or HLO text; `-` is
standard input. Scheduled HLO text is listed and timed in its own order. Participants are flattened
ids: replica * number of partitions + partition.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from typing import TYPE_CHECKING, Any

from stablehlo_tools.cli.shared_arguments import (
    add_rules,
    add_timing_arguments,
    amount,
    question,
    state_given_rules,
    tool_version,
)
from stablehlo_tools.cli.streams import put_in_colour
from stablehlo_tools.cli.terminal import in_colour, terminal_width, with_emphasis

if TYPE_CHECKING:
    from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
    from stablehlo_tools.analysis.partitioner_work import LeftToCompiler
    from stablehlo_tools.artifacts.artifact import Artifact


_BOUNDED = ("exposed_ns", "bytes", "peak_bytes")
_PERCENT = 1.0  # of the total: the least gain that is worth a change


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `inspect` to its parser."""
    parser.add_argument(
        "input", metavar="INPUT", nargs="?", help="the artifact, or - for standard input"
    )
    parser.add_argument(
        "--check",
        metavar="PERCENT",
        nargs="?",
        const=str(_PERCENT),
        help="exit with 1 if some advice gains more than this share of the total, or of the "
        f"device's memory, in percent (default: {_PERCENT:g})",
    )
    parser.add_argument(
        "--at-most",
        metavar="FIGURE=NUMBER",
        type=_bound,
        action="append",
        default=[],
        help="exit with 1 if exposed_ns, bytes (of all collectives) or peak_bytes exceeds NUMBER; "
        "prints no advice then",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="with times, print all collectives, loops, kernels and memory at the peak (default: "
        "totals, advice and the five collectives with most exposed time)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_rules(parser)
    add_timing_arguments(parser, "no times")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table. Raises ToolError on bad input."""
    from stablehlo_tools.analysis.collectives import (
        ModuleFacts,
        find_collectives,
        stated_grid,
        unnumbered_replicas,
    )
    from stablehlo_tools.analysis.partitioner_work import left_to_the_partitioner
    from stablehlo_tools.analysis.pipelines.pipeline_loops import find_pipelines
    from stablehlo_tools.analysis.replica_groups import ProcessGrid
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.report.pipeline_report import pipeline_lines
    from stablehlo_tools.report.pipeline_rows import pipeline_report

    percent = _percent(arguments)
    loaded = artifact.load(arguments.input)
    state_given_rules(arguments, loaded)
    options = arguments.compiler_option or None  # refused later without a compiler
    asked = (arguments.hardware, arguments.target, arguments.measured, arguments.check, options)
    if arguments.at_most or arguments.trips or any(argument is not None for argument in asked):
        return _report_exposure(arguments, loaded, percent)
    try:
        collectives = find_collectives(loaded.module)
        facts = ModuleFacts.from_module(loaded.module, collectives)
        is_open = facts.grid.size == 1 and stated_grid(loaded.module) is None
        fewest = unnumbered_replicas(collectives) if is_open else 1
        if fewest > 1:
            facts = ModuleFacts(ProcessGrid(fewest), facts.meshes)
        rows = [_row(c, facts, loaded.name) for c in collectives]
        pipelines = [pipeline_report(each, loaded.name) for each in find_pipelines(loaded.module)]
        left = left_to_the_partitioner(loaded.module)
    except ToolError as error:
        error.input_name = loaded.name
        raise
    if arguments.json:
        grid = {"replicas": facts.grid.num_replicas, "partitions": facts.grid.num_partitions}
        more: dict[str, Any] = {}
        if loaded.hlo is not None:
            more["scheduled"] = loaded.is_scheduled
        if pipelines:
            more["pipelines"] = [each.to_json() for each in pipelines]
        if left is not None:
            more["left_to_compiler"] = _describe_unlisted(left, loaded.name)
        print(json.dumps({**grid, "collectives": rows, **more}, indent=1))
    else:
        print(_table(rows, facts, loaded.name, is_scheduled=loaded.is_scheduled))
        if fewest > 1:
            print(
                "note: the program does not state its number of replicas: collectives are "
                "assumed to be among the fewest replicas possible, as `verify` assumes"
            )
        if left is not None:
            print(f"note: {_describe_unlisted(left, loaded.name)}")
        for each in pipelines:
            print("\n" + "\n".join(pipeline_lines(each)))
    return 0


def _describe_unlisted(left: LeftToCompiler, name: str) -> str:
    """Names the collectives that the table cannot show, and the way to see them."""
    from stablehlo_tools.diagnostics import to_place

    place = to_place(left.place).render(name)
    return (
        f"not listed: the collectives that a compiler adds for {left.partitions} devices, by "
        f"{left.annotation.value}{', first at ' + place if place != name else ''}. `partition` "
        "makes them explicit; --hardware and --target partition first"
    )


def _bound(text: str) -> tuple[str, float]:
    """Parses a figure and its bound, such as `exposed_ns=12000`."""
    name, equals, value = text.partition("=")
    if not equals or name not in _BOUNDED:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not FIGURE=NUMBER, with FIGURE one of {', '.join(_BOUNDED)}"
        )
    return name, amount(value)


def _percent(arguments: argparse.Namespace) -> float:
    """Returns the threshold of --check in percent. Raises ToolError.

    `--check` may come before INPUT. So its value is the input if it is not a number and there is no
    other input."""
    from stablehlo_tools.diagnostics import ToolError

    text: str = arguments.check or ""
    try:
        percent = _PERCENT if arguments.check is None else float(text)
    except ValueError:
        percent = None
    if percent is None and arguments.input is None and not text.startswith("-"):
        arguments.input, percent = text, _PERCENT
    if arguments.input is None:
        raise ToolError("inspect needs an INPUT: the artifact, or - for standard input")
    if percent is None or not 0 <= percent < math.inf:
        raise ToolError(f"--check {text}: PERCENT must be a number, 0 or more", instead=(text, "1"))
    return percent


def _report_exposure(arguments: argparse.Namespace, loaded: Artifact, percent: float) -> int:
    from stablehlo_tools.advice.advise import advise
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.report.cost_text import to_text
    from stablehlo_tools.report.document import Document
    from stablehlo_tools.report.exposure import exposure

    asked = question(arguments, loaded, timeline=False)
    unwanted = arguments.at_most and arguments.check is None
    advisor = None if unwanted else functools.partial(advise, least=percent / 100)
    programs = exposure([loaded], asked, advisor)
    advised = [program.advised for program in programs if program.advised is not None]
    if arguments.check is not None and len(advised) < len(programs):
        raise ToolError(
            "--check cannot read scheduled HLO text: give the program before compilation"
        )
    document = Document(loaded.name, tool_version(), tuple(programs))
    if arguments.json:
        print(json.dumps(document.to_json(timeline=False), indent=1))
    else:
        text = to_text(document, width=terminal_width(sys.stdout), whole=arguments.all)
        put_in_colour((with_emphasis(text) if in_colour(sys.stdout) else text) + "\n")
    above = [
        f"{program.name}, {program.target}: {name} is {figure:,.0f}, above the limit {most:,.0f}"
        for program in programs
        for name, most in arguments.at_most
        if (figure := program.bounded_figures[name]) > most
    ]
    for line in above:
        print(line, file=sys.stderr)
    checked = arguments.check is not None and any(each.items for each in advised)
    return 1 if above or checked else 0


def _row(collective: Collective, facts: ModuleFacts, name: str) -> dict[str, Any]:
    from stablehlo_tools.diagnostics import to_place

    mode = collective.group_mode
    return {
        "kind": collective.kind,
        "async": collective.is_async,
        "group_mode": mode.value if mode else None,
        "groups": facts.groups(collective),
        "channel": collective.channel_id,
        "element_types": list(collective.element_types),
        "bytes_in": collective.bytes_in,
        "bytes_out": collective.bytes_out,
        "reduction": collective.reduction,
        "place": to_place(collective.op.location).render(name),
    }


def _table(rows: list[dict[str, Any]], facts: ModuleFacts, name: str, *, is_scheduled: bool) -> str:
    from stablehlo_tools.overlap.collective_times import groups_text

    grid = facts.grid
    lines = [
        f"{name}: {len(rows)} communicating ops on {grid.num_replicas} x {grid.num_partitions} "
        "(replicas x partitions)" + (", in the order of the schedule" if is_scheduled else "")
    ]
    if rows:
        lines.append(
            f"{'#':>5}  {'kind':20} {'groups':24} {'type':6} {'bytes in':>12} {'bytes out':>12}  "
            f"{'reduction':9}  place"
        )
    for number, row in enumerate(rows):
        kind, groups = ("async " if row["async"] else "") + row["kind"], row["groups"]
        shown = "{}" if groups == () else groups_text(groups or (), pairs=False, width=14)
        lines.append(
            f"{number:>5}  {kind:20} {shown:24} "
            f"{','.join(row['element_types']):6} {_bytes(row['bytes_in']):>12} "
            f"{_bytes(row['bytes_out']):>12}  {row['reduction'] or '-':9}  {row['place']}"
        )
    return "\n".join(line.rstrip() for line in lines)


def _bytes(count: int | None) -> str:
    return "symbolic" if count is None else f"{count:,}"
