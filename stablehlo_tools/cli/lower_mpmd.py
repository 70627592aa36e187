"""Rewrite the transfers between the ranks of a set in the form that a runtime needs.

  --transfers both-ends  for XLA:GPU: each program has the send and the recv of its transfers
  --transfers permutes   for processes on XLA:CPU: each transfer is a collective permute in which
                         all ranks take part

DIR is a set that expand-mpmd wrote. With `permutes`, permutes within a rank become
all-gathers. Exit code 0: written; 2: not.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `lower-mpmd` to its parser."""
    parser.add_argument("directory", metavar="DIR", help="a set of rank programs")
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="output directory")
    parser.add_argument("--transfers", required=True, choices=("both-ends", "permutes"))


def run(arguments: argparse.Namespace) -> int:
    """Writes the set; always 0. Raises ToolError."""
    from stablehlo_tools.mpmd.rank_set import check_writable, load, write
    from stablehlo_tools.mpmd.transfers import with_both_ends, with_permutes

    check_writable(arguments.output)
    ranks = load(arguments.directory)
    lower = with_both_ends if arguments.transfers == "both-ends" else with_permutes
    written = lower(ranks)
    modules = [program.module for program in written.programs]
    write(arguments.output, written.manifest, modules)
    return 0
