"""Prove that programs compiled apart cannot deadlock in their collectives, or show how they can.

PROGRAM... are one program for all devices of a job, or one for each equal part of them, in the
order of the devices. The answer is `ordered`, `may-deadlock` or `mismatch`, with the devices, the
collectives and the interleaving that hangs. Exit code 0: ordered; 1: not; 2: bad input.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING

from stablehlo_tools.cli.streams import print_answer

if TYPE_CHECKING:
    from stablehlo_tools.artifacts.program_set import Options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `check-order`."""
    parser.add_argument("programs", metavar="PROGRAM", nargs="+", help="an artifact")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="take each device's program to be compiled apart, where one is given for several",
    )
    add_device_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which program runs where, which align-order has too."""
    parser.add_argument(
        "--devices",
        metavar="IDS",
        action="append",
        default=[],
        type=device_list,
        help="the devices of a program, as 0-3,8; once for each program, in order",
    )
    parser.add_argument(
        "--separate",
        action="store_true",
        help="each program has devices of its own, after those of the programs before it, and "
        "meets the others by the channels of its sends and recvs",
    )
    parser.add_argument("--platform", help="which platform of artifacts exported for several")
    parser.add_argument(
        "--trust-partitioner",
        action="store_true",
        help="take it that XLA adds no collectives outside of manual computations",
    )
    parser.add_argument(
        "--local",
        metavar="TARGET",
        action="append",
        default=[],
        help="custom calls of this target reach no other device",
    )


def device_options(arguments: argparse.Namespace) -> Options:
    """What those arguments say."""
    from stablehlo_tools.artifacts.program_set import Options

    return Options(
        tuple(arguments.devices),
        arguments.separate,
        arguments.platform,
        arguments.trust_partitioner,
        tuple(arguments.local),
    )


def device_list(text: str) -> tuple[int, ...]:
    """The ids of `0-3,8`."""
    devices: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of devices such as 0-3,8")
        devices += range(int(first), int(last if dash else first) + 1)
    if not devices or len(set(devices)) < len(devices):
        raise argparse.ArgumentTypeError(f"{text!r} names no device, or one twice")
    return tuple(devices)


def run(arguments: argparse.Namespace) -> int:
    """Prints the verdict. Raises ToolError on bad input."""
    import gc

    from stablehlo_tools.artifacts.program_set import read_programs
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.order.report import as_json, as_text
    from stablehlo_tools.order.simulation import UndecidedError
    from stablehlo_tools.order.verdict import decide

    options = device_options(arguments)
    gc.disable()  # many small objects, all of which stay
    programs = read_programs(arguments.programs, options, workers=os.cpu_count() or 1)
    try:
        decided = decide(programs, strict=arguments.strict)
    except UndecidedError:
        raise ToolError(
            "not decided: loops of unlike form would have to be stepped through for too long"
        ) from None
    holds = decided.finding is None
    if arguments.json:
        print(json.dumps(as_json(decided), indent=1))
    else:
        print_answer(as_text(decided), holds=holds)
    return 0 if holds else 1
