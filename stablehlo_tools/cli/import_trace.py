"""Turn a trace of jax.profiler.trace into a profile of measured times, for --measured.

TRACE is the traced directory, or one *.trace.json.gz file of it. Each op gets its median over all
runs on a device, and the least over the devices. Ops have the names of the HLO
instructions of one compiled module, as in `inspect --target gpu` or `tpu` of the same program.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `import-trace` to its parser."""
    parser.add_argument("trace", metavar="TRACE", help="a directory, or a *.trace.json.gz file")
    parser.add_argument("-o", "--output", metavar="OUTPUT", help="where to write (default: stdout)")
    parser.add_argument(
        "--module",
        metavar="NAME",
        help="the HLO module to read (default: the one with the most time)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the profile. Raises ToolError before anything is written."""
    from stablehlo_tools.cost.traces import profile_from_trace
    from stablehlo_tools.files import atomic

    to_file = arguments.output not in (None, atomic.STDIN)
    if to_file:
        atomic.check_writable(arguments.output)
    profile = profile_from_trace(Path(arguments.trace), arguments.module)
    text = json.dumps(profile, indent=1) + "\n"
    if to_file:
        atomic.write_atomically(arguments.output, text.encode())
    else:
        print(text, end="")
    return 0
