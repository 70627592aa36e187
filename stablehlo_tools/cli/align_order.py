"""Put the collectives of separately compiled programs into one order, and add tokens that keep it.

PROGRAM... and their options are as for check-order. Exit code 0: written; 1: no order suits all
programs, and why; 2: bad input.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stablehlo_tools.cli.check_order import (
    add_device_arguments,
    add_target_arguments,
    chosen_targets,
    device_options,
)
from stablehlo_tools.cli.shared_arguments import compiler_options
from stablehlo_tools.cli.streams import print_answer

if TYPE_CHECKING:
    from stablehlo_tools.artifacts.artifact import Artifact
    from stablehlo_tools.targets.chips import Target
    from stablehlo_tools.targets.job_schedules import JobOrder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `align-order` to its parser."""
    parser.add_argument("programs", metavar="PROGRAM", nargs="+", help="an artifact")
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        required=True,
        help="output directory; each program keeps its name",
    )
    parser.add_argument(
        "--form", choices=("barrier", "composite"), default="barrier", help="as for thread-tokens"
    )
    add_device_arguments(parser)
    add_target_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Writes the programs. Raises ToolError on bad input."""
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.artifacts.program_set import ProgramJob
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.files import atomic
    from stablehlo_tools.order.verdict_report import finding_text
    from stablehlo_tools.targets.job_schedules import order_text
    from stablehlo_tools.transforms.align_order import align_order
    from stablehlo_tools.transforms.thread_tokens import ThreadTokensPass

    directory = Path(arguments.output)
    names = _names(arguments.programs)
    _check_directory(directory)
    threading, options = ThreadTokensPass(form=arguments.form), device_options(arguments)
    targets = chosen_targets(arguments)
    for keeps_all in (False, True):
        loaded = tuple(artifact.load(path) for path in arguments.programs)
        aligned = align_order(ProgramJob(loaded, options), threading, keeps_all=keeps_all)
        if aligned.finding is not None:
            print_answer(finding_text(aligned.programs, aligned.finding), holds=False)
            return 1
        order = _compiler_order(arguments, targets, loaded)
        if order is None or order.holds:
            break
    else:
        print_answer(order_text(order), holds=False)
        print("error: tokens cannot keep this order; nothing was written", file=sys.stderr)
        return 1
    for text in dict.fromkeys(told.render(name) for name, told in aligned.warnings):
        print(text, file=sys.stderr)
    programs = [
        (directory / n, artifact.encode(a, a.form)) for n, a in zip(names, loaded, strict=True)
    ]
    try:
        directory.mkdir(exist_ok=True)
    except OSError as error:
        raise ToolError(f"cannot make {str(directory)!r}: {error.strerror}") from None
    atomic.write_all_atomically(programs)
    print("\n".join(str(path) for path, _ in programs))
    return 0


def _compiler_order(
    arguments: argparse.Namespace, targets: list[Target] | None, aligned: Sequence[Artifact]
) -> JobOrder | None:
    """Returns the order of aligned programs by their compilers; None if no compiler is chosen or
    accepts them."""
    from stablehlo_tools.targets.job_schedules import decide_order

    if targets == [] or len(aligned) == 1:
        return None
    options, timeout = compiler_options(arguments), arguments.timeout
    order = decide_order(aligned, device_options(arguments), targets, options, timeout)
    return None if order.worst.target is None else order


def _names(paths: list[str]) -> list[str]:
    """Returns the names of the output files. Raises ToolError if two are equal."""
    from stablehlo_tools.diagnostics import ToolError

    names = [Path(path).name for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise ToolError(
                f"two programs are called {name!r}, and each output keeps its program's name: "
                "copy one to another name"
            )
        if name == "-":
            raise ToolError("standard input has no file name for its output: give a file")
    return names


def _check_directory(directory: Path) -> None:
    """Raises ToolError, before the work, if the directory cannot be made or written to."""
    from stablehlo_tools.diagnostics import ToolError

    if directory.exists() and not directory.is_dir():
        raise ToolError(
            f"cannot write to {str(directory)!r}: not a directory",
            hint="the output directory, after -o",
        )
    if not directory.exists() and not directory.absolute().parent.is_dir():
        parent = str(directory.absolute().parent)
        raise ToolError(
            f"cannot make {str(directory)!r}: no directory {parent!r}",
            hint=f"mkdir -p {shlex.quote(str(directory))}",
        )
    if not os.access(directory if directory.exists() else directory.absolute().parent, os.W_OK):
        raise ToolError(f"cannot write to {str(directory)!r}: permission denied")
