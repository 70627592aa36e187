"""Prove that separately compiled programs cannot deadlock in their collectives, or show how.

PROGRAM... are one program for all devices of a job, or one for each equal part of them, in the
order of the devices. Each distinct program is compiled ahead of time, and its schedule is checked.
The answer holds for the compilers, versions and options that it names. With `--target none` no
compiler runs: only an order that tokens or barriers keep counts. Exit code 0: ordered; 1: not;
2: bad input.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stablehlo_tools.cli.shared_arguments import add_compiler_options, add_timeout, compiler_options
from stablehlo_tools.cli.streams import print_answer
from stablehlo_tools.cli.usage_errors import command_line
from stablehlo_tools.order.order_findings import Verdict

if TYPE_CHECKING:
    from stablehlo_tools.artifacts.program_set import JobOptions
    from stablehlo_tools.targets.chips import Target
    from stablehlo_tools.targets.job_schedules import JobOrder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `check-order` to its parser."""
    parser.add_argument("programs", metavar="PROGRAM", nargs="+", help="an artifact")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="each device compiles its program separately, even if several devices run one file",
    )
    add_device_arguments(parser)
    add_target_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that assign programs to devices, for check-order and align-order."""
    parser.add_argument(
        "--devices",
        metavar="IDS",
        action="append",
        default=[],
        type=device_list,
        help="devices of a program, as 0-3,8; once for each program, in order",
    )
    parser.add_argument(
        "--separate",
        action="store_true",
        help="each program has devices of its own; they meet by the channels of sends and recvs",
    )
    parser.add_argument(
        "--platform", help="platform to check, if an artifact was exported for several"
    )
    parser.add_argument(
        "--trust-partitioner",
        action="store_true",
        help="assume that XLA adds no collectives outside manual computations",
    )
    parser.add_argument(
        "--local",
        metavar="TARGET",
        action="append",
        default=[],
        help="custom calls of this target do not communicate",
    )
    parser.add_argument(
        "--equal",
        metavar="[PROGRAM:]ARGUMENT",
        action="append",
        default=[],
        help="an argument (index or path) with one value on all devices; PROGRAM counts from 0",
    )


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that choose compilers, for check-order and align-order."""
    parser.add_argument(
        "--target",
        action="append",
        choices=("cpu", "gpu", "tpu", "none"),
        help="a compiler whose schedules are checked, or none; repeatable "
        "(default: the installed compilers for the programs' platforms)",
    )
    add_compiler_options(parser)
    add_timeout(parser, "limit of one compilation in seconds (default: 600)")


def chosen_targets(arguments: argparse.Namespace) -> list[Target] | None:
    """Returns the targets of `--target`: [] for `--target none`, None without the option.

    Raises ToolError for `none` with others, and for compiler options without a compiler.
    """
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.targets.chips import Target

    words: list[str] = list(dict.fromkeys(arguments.target or ()))
    if "none" not in words:
        return [Target(word) for word in words] or None
    if len(words) > 1 or arguments.compiler_option:
        raise ToolError("--target none runs no compiler: omit other targets and compiler options")
    return []


def device_options(arguments: argparse.Namespace) -> JobOptions:
    """Returns the options of the arguments that `add_device_arguments` adds."""
    from stablehlo_tools.artifacts.program_set import JobOptions

    return JobOptions(
        tuple(arguments.devices),
        arguments.separate,
        arguments.platform,
        arguments.trust_partitioner,
        tuple(arguments.local),
        getattr(arguments, "strict", False),
        equal=tuple(arguments.equal),
    )


def device_list(text: str) -> tuple[int, ...]:
    """Parses device ids such as `0-3,8`."""
    devices: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of devices such as 0-3,8")
        devices += range(int(first), int(last if dash else first) + 1)
    if not devices or len(set(devices)) < len(devices):
        raise argparse.ArgumentTypeError(f"{text!r} names no device, or names one twice")
    return tuple(devices)


def run(arguments: argparse.Namespace) -> int:
    """Prints the verdict. Raises ToolError on bad input."""
    import gc

    from stablehlo_tools.analysis.partitioner_work import left_to_the_partitioner
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.order.simulation import LoopMismatchError
    from stablehlo_tools.targets.job_schedules import order_json, order_text

    gc.disable()  # many small objects, and all of them are kept
    try:
        order = _decide(arguments)
    except LoopMismatchError:
        raise ToolError("not decided: loops of different form would need too many steps") from None
    if arguments.json:
        print(json.dumps(order_json(order), indent=1))
    else:
        text = order_text(order)
        if order.worst.decided.verdict is Verdict.ORDERED_UNLESS_REWRITTEN:
            words = [word for word in arguments.words if word not in ("--target", "none")]
            text += f"\n  try: {command_line([*words, '--target', 'cpu'])}"
        if order.worst.decided.verdict is Verdict.MAY_DEADLOCK and len(arguments.programs) > 1:
            words = ["align-order", *arguments.programs, "-o", "aligned"]
            text += f"\n  try: {command_line(words)}"
        first = arguments.programs[0]
        if order.holds and " 0 collectives" in text.splitlines()[0] and first != "-":
            loaded = artifact.load(first)
            if left_to_the_partitioner(loaded.module) is not None:
                explicit = f"explicit{loaded.form.value}"
                words = ["opt", first, "-p", "partition,create-reduce-scatter", "-o", explicit]
                text += "\n  the compiler's partitioner adds collectives, which are not judged here"
                text += f"\n  try: {command_line(words)}"
        print_answer(text, holds=order.holds)
    return 0 if order.holds else 1


def _decide(arguments: argparse.Namespace) -> JobOrder:
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.artifacts.program_set import read_programs
    from stablehlo_tools.order.verdict import decide, judge_rewriting
    from stablehlo_tools.targets.job_schedules import JobOrder, OrderAnswer, decide_order

    options, targets = device_options(arguments), chosen_targets(arguments)
    if targets != []:
        loaded = [artifact.load(path) for path in arguments.programs]
        return decide_order(
            loaded, options, targets, compiler_options(arguments), arguments.timeout
        )
    options = replace(options, judges_rewriting=True)
    programs = read_programs(arguments.programs, options, workers=os.cpu_count() or 1)
    decided = decide(programs, strict=options.strict)
    is_one = len({Path(path).read_bytes() for path in arguments.programs if path != "-"}) < 2
    return JobOrder((OrderAnswer(decided if is_one else judge_rewriting(decided)),))
