"""Arguments that several commands take: numbers, values of inputs, and how to time a program."""

from __future__ import annotations

import argparse
import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stablehlo_tools.cli.usage_errors import command_line

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from stablehlo_tools.artifacts.artifact import Artifact
    from stablehlo_tools.report.exposure import Question
    from stablehlo_tools.targets.compiler_options import CompilerOptions
_TO_CONNECT = 5.0  # seconds
_TARGETS = ("as-written", "gpu", "tpu")


def add_timing_arguments(parser: argparse.ArgumentParser, otherwise: str) -> None:
    """Adds `--hardware`, `--target`, `--measured`, `--timeout`; `otherwise`: default hardware."""
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help="a known device, or a profile in a TOML file; with --target also the device to "
        f"compile for (default: {otherwise})",
    )
    parser.add_argument(
        "--target",
        metavar="TARGET",
        action="append",
        choices=_TARGETS,
        help="schedule to time: as-written (the default), or the program as XLA:GPU (gpu) or "
        "XLA:TPU (tpu) schedules it; may be given more than once",
    )
    parser.add_argument(
        "--measured",
        metavar="FILE",
        help="measured times by op (JSON), used instead of the cost model",
    )
    add_trips(parser)
    add_timeout(parser, "time limit of a compilation in seconds (default: 600)")
    add_compiler_options(parser)


def add_trips(parser: argparse.ArgumentParser) -> None:
    """Adds `--trips LOCATION=N`, which may be repeated."""
    parser.add_argument(
        "--trips",
        metavar="LOCATION=N",
        type=_trips,
        action="append",
        default=[],
        help="number of iterations of the loops at LOCATION, as in solver.py:30, which the "
        "program does not state; may be given more than once",
    )


def state_given_trips(arguments: argparse.Namespace, artifact: Artifact) -> None:
    """Gives the loops of an artifact the numbers of `--trips`, in place. Raises ToolError."""
    from stablehlo_tools.analysis.stated_trips import state_trips
    from stablehlo_tools.diagnostics import ToolError

    if arguments.trips and artifact.hlo is not None:
        raise ToolError(f"--trips: {artifact.name} is HLO text: give the program that it came from")
    state_trips(artifact.module, artifact.name, dict(arguments.trips))


def add_rules(parser: argparse.ArgumentParser) -> None:
    """Adds `--rules FILE`."""
    parser.add_argument(
        "--rules",
        metavar="FILE",
        help="the dimensions that custom calls treat independently, a line for each target: "
        "`my_kernel: b h s k, b h t k -> b h s k; b h free`",
    )


def state_given_rules(arguments: argparse.Namespace, *artifacts: Artifact) -> None:
    """Writes the rules of `--rules` on the calls of artifacts, in place. Raises ToolError."""
    if arguments.rules is None:
        return
    from pathlib import Path

    from stablehlo_tools.analysis.sharding_import import state_rules
    from stablehlo_tools.diagnostics import ToolError, naming
    from stablehlo_tools.dialect.kernels.rules import parse_rules

    try:
        rules = parse_rules(Path(arguments.rules).read_text(encoding="utf-8"))
    except OSError as error:
        raise ToolError(f"--rules {arguments.rules}: {error.strerror}") from None
    except ValueError as error:
        raise ToolError(f"--rules {arguments.rules}: {error}") from None
    unused = set(rules)
    for artifact in artifacts:
        with naming(artifact.name):
            unused -= state_rules(artifact.module, rules)
    if unused:
        raise ToolError(f"--rules {arguments.rules}: no custom call has the target {min(unused)}")


def add_timeout(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Adds `--timeout SECONDS`, 600 by default."""
    parser.add_argument("--timeout", metavar="SECONDS", type=seconds, default=600.0, help=meaning)


def add_program_output(parser: argparse.ArgumentParser, page: str) -> None:
    """Adds -o for a program, --report for a page of `page`, --json and --memory-limit."""
    parser.add_argument(
        "-o", "--output", metavar="OUTPUT", help="output program; its suffix chooses the form"
    )
    parser.add_argument("--report", metavar="PAGE.html", help=f"write a page with {page}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--memory-limit",
        metavar="GIB",
        type=gib,
        help="memory limit per device in GiB (default: the device's memory)",
    )


def add_compiler_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--compiler-option NAME=VALUE`, which may be repeated."""
    parser.add_argument(
        "--compiler-option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an option of the compiler, as in compiler_options of jax.jit; may be given more "
        "than once",
    )


def compiler_options(arguments: argparse.Namespace) -> CompilerOptions:
    """Parses the values of `--compiler-option`. Raises ToolError for an invalid option."""
    from stablehlo_tools.targets.compiler_options import CompilerOptions

    return CompilerOptions.parse(arguments.compiler_option)


def question(arguments: argparse.Namespace, artifact: Artifact, *, timeline: bool) -> Question:
    """Returns the question of the arguments about an artifact, which gets the trips of `--trips`.

    Raises ToolError.
    """
    from stablehlo_tools.cost.clock import MeasuredProfile
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.report.exposure import AS_WRITTEN, Question, hardware_for

    state_given_trips(arguments, artifact)
    options = compiler_options(arguments)
    if options.values and set(arguments.target or [AS_WRITTEN]) == {AS_WRITTEN}:
        raise ToolError(
            "--compiler-option needs a compiler: --target gpu or tpu",
            hint=command_line([*arguments.words, "--target", "gpu"]),
        )
    return Question(
        hardware=hardware_for(artifact, arguments.hardware, arguments.target or ()),
        targets=tuple(dict.fromkeys(arguments.target or (AS_WRITTEN,))),
        measured=MeasuredProfile.load(arguments.measured)
        if arguments.measured is not None
        else None,
        timeout=arguments.timeout,
        options=options,
        with_timeline=timeline,
        by_default=arguments.hardware is None,
    )


def tool_version() -> str:
    """Returns the version of this package, for documents."""
    from importlib.metadata import version

    return version("stablehlo-tools")


def add_set_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--set INDEX=VALUE`, which may be repeated."""
    parser.add_argument(
        "--set",
        metavar="INDEX=VALUE",
        type=assignment,
        action="append",
        default=[],
        help="value of every element of input INDEX, instead of random ones",
    )


def assignment(text: str) -> tuple[int, float]:
    """Parses the index of an input and a value, such as `3=0.5`."""
    index, equals, value = text.partition("=")
    if not equals or not index.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not INDEX=VALUE")
    return int(index), any_number(value)


def _trips(text: str) -> tuple[str, int]:
    """Parses a location and a number of iterations, such as `solver.py:30=40`."""
    location, equals, count = text.rpartition("=")
    if not equals or not location:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOCATION=N, as in solver.py:30=40")
    return location, positive(count)


def whole_number(text: str, least: int = 0) -> int:
    """Parses a whole number from `least` up."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} up")
    return number


def positive(text: str) -> int:
    """Parses a whole number from 1 up."""
    return whole_number(text, least=1)


def amount(text: str) -> float:
    """Parses a finite number from 0 up."""
    number = any_number(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return abs(number)  # -0.0 too


def positive_amount(text: str, kind: str = "number") -> float:
    """Parses a positive, finite number; `kind` names it in the error."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive {kind}")
    return number


def any_number(text: str) -> float:
    """Parses a number, which may be infinite or NaN."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def seconds(text: str) -> float:
    """Parses a positive, finite number of seconds."""
    return positive_amount(text, "number of seconds")


def gib(text: str) -> float:
    """Parses a positive, finite number of GiB."""
    return positive_amount(text, "number of GiB")


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Adds `--cluster`."""
    parser.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="the scheduler of a Dask cluster whose workers compile: tcp://host:8786",
    )


@contextmanager
def cluster_executor(arguments: argparse.Namespace) -> Generator[Executor | None]:
    """Yields the executor of `--cluster`, or None. Raises ToolError if there is no scheduler."""
    from stablehlo_tools.diagnostics import ToolError

    if arguments.cluster is None:
        yield None
        return
    try:
        from distributed import Client
    except ImportError:
        raise ToolError(
            "--cluster needs Dask", hint="pip install 'stablehlo-tools[cluster]'"
        ) from None
    try:
        client = Client(arguments.cluster, timeout=_TO_CONNECT)
    except (OSError, ValueError) as error:
        raise ToolError(f"no Dask scheduler at {arguments.cluster}: {error}") from None
    with client:
        yield client.get_executor(pure=False)
