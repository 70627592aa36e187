"""Prove that a set of rank programs runs its schedule, and that its values go the right way.

DIR holds the programs and their manifest, as `expand-mpmd` writes them. What each rank does is read
back from its program and held against the schedule: every action and message in its place, every
value of the right microbatch, no deadlock, memory within what the schedule holds. What functions
compute is not judged: `run-mpmd` compares values. Exit code 0: proven; 1: what is wrong; 2: bad
input.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stablehlo_tools.cli.streams import print_answer
from stablehlo_tools.processes import activity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `check-mpmd`."""
    parser.add_argument("directory", metavar="DIR", help="the directory of the set")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints the verdict. Raises ToolError on bad input."""
    import gc

    from stablehlo_tools.cli.shared_arguments import tool_version
    from stablehlo_tools.mpmd.proof.proving import prove, set_report
    from stablehlo_tools.mpmd.rank_set import load
    from stablehlo_tools.report.mpmd_report import to_json, verdict

    gc.disable()  # many small objects, all of which stay
    directory = Path(arguments.directory)
    activity.show(f"reading and proving the programs in {directory}")
    proof = prove(load(directory))
    report = set_report(proof, arguments.directory, tool_version(), levels=False)
    if arguments.json:
        print(json.dumps(to_json(report), indent=1))
    else:
        print_answer(verdict(report), holds=proof.is_proven)
    return 0 if proof.is_proven else 1
