"""Prove that a set of rank programs runs its schedule, and compare its values with its origin's.

DIR holds the programs and their manifest, as `expand-mpmd` writes them. check-mpmd reads the
actions of each rank from its program and compares them with the schedule: every action and message
in its place, every value of the right microbatch, no deadlock, memory within the schedule's bound.
This proves order, structure and memory. --of STEP also compares values: STEP and the set run in
exact arithmetic, as under `run-mpmd`.

Exit code 0: proven, and the same as STEP; 1: not; 2: bad input.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stablehlo_tools.cli.streams import print_answer
from stablehlo_tools.processes import activity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `check-mpmd` to its parser."""
    parser.add_argument("directory", metavar="DIR", help="directory of the set")
    parser.add_argument(
        "--of",
        metavar="STEP",
        help="the program that the set was made from, to compare values with",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints the verdict. Raises ToolError on bad input."""
    import gc

    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.cli.shared_arguments import tool_version
    from stablehlo_tools.cli.usage_errors import command_line
    from stablehlo_tools.cli.verify import compare_with_origin, print_comparison
    from stablehlo_tools.mpmd.proof.proving import prove, set_report
    from stablehlo_tools.mpmd.rank_set import load
    from stablehlo_tools.report.mpmd_report import to_json, verdict

    gc.disable()  # many small objects, and all of them are kept
    directory = Path(arguments.directory)
    activity.show(f"reading and proving the programs in {directory}")
    ranks = load(directory)
    original = artifact.load(arguments.of) if arguments.of else None
    proof = prove(ranks)
    report = set_report(proof, arguments.directory, tool_version(), levels=False)
    values = None
    if original is not None and proof.is_proven:
        from stablehlo_tools.mpmd.running.set_outcome import SetOptions

        activity.show(f"comparing {directory} and {original.name} on random inputs")
        values = compare_with_origin(ranks, original, SetOptions()).values
    holds = proof.is_proven and (values is None or values.same)
    if arguments.json:
        compared = None if values is None else values.to_json()
        print(json.dumps({**to_json(report), "values": compared}, indent=1))
        return 0 if holds else 1
    print_answer(verdict(report), holds=proof.is_proven)
    if values is not None:
        print_comparison(values, ["run-mpmd", arguments.directory, arguments.of])
    elif original is not None:
        print("values were not compared, since the set is not proven")
    elif proof.is_proven:
        again = command_line(["check-mpmd", arguments.directory, "--of", "STEP"])
        print(f"order, structure and memory are proven, but values were not compared; try: {again}")
    return 0 if holds else 1
