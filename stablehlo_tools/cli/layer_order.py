"""Write where expand-pipeline with layout=pipeline puts the layers of a program, as JSON.

INPUT is the program before the pass; PIPELINE has the options that it is to be expanded with. MAP
has, for each number of layers, `order`: place i of a stack holds layer order[i]; and the arguments
and results that are such stacks. Without -o it goes to standard output.
"""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `layer-order` to its parser."""
    parser.add_argument("input", metavar="INPUT", help="the artifact, or - for standard input")
    parser.add_argument(
        "-p",
        "--pipeline",
        metavar="PIPELINE",
        required=True,
        help="a pipeline with one expand-pipeline; the passes before it run first",
    )
    parser.add_argument("-o", "--output", metavar="MAP", help="output file, .json")


def run(arguments: argparse.Namespace) -> int:
    """Writes the map. Raises ToolError on bad input, or if the pass refuses the program."""
    from stablehlo_tools.api.layer_order import find_layer_order
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.files import atomic
    from stablehlo_tools.passes.pipeline import Pipeline

    to_file = arguments.output not in (None, atomic.STDIN)
    if to_file:
        atomic.check_writable(arguments.output)
    pipeline = Pipeline.parse(arguments.pipeline)
    text = find_layer_order(artifact.load(arguments.input), pipeline).to_json()
    if to_file:
        atomic.write_atomically(arguments.output, text.encode())
    else:
        sys.stdout.write(text)
    return 0
