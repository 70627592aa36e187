"""Turn an artifact and a pipeline into a lit test of the pipeline's result.

The test holds the simplified artifact, or with --producer the command that makes it, and CHECK
lines for communication, tokens and control flow. Before it is written, it is run: it must pass, and
fail on the artifact before the pipeline. With --cost it also fails if more time is exposed, more
bytes are moved or more memory is needed than now.

INPUT is as for opt; `-` is standard input. Exit code 0: written, or up to date; 1: with --check, a
test would change; 2: bad input.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from stablehlo_tools.cli.usage_errors import command_line

if TYPE_CHECKING:
    from stablehlo_tools.testing.recipe import Recipe

_MAKING = ("pipeline", "output", "producer", "full", "brief", "cost")  # stated in each test

_HARDWARE = "h100"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `make-test` to its parser."""
    parser.add_argument(
        "inputs", metavar="INPUT", nargs="*", help="the artifact; with --update the tests"
    )
    parser.add_argument("-p", "--pipeline", metavar="PIPELINE", help="as for opt")
    parser.add_argument(
        "-o", "--output", metavar="TEST", help="the test: .mlir, or .test with --producer"
    )
    parser.add_argument(
        "--producer",
        metavar="COMMAND",
        help="a command for a RUN line, instead of INPUT; it writes %%t and a suffix",
    )
    parser.add_argument(
        "--cost",
        metavar="HARDWARE",
        nargs="?",
        const=_HARDWARE,
        help="limit the exposed time, the bytes moved and the memory peak to the present values, "
        "as `inspect --hardware` prints them for the program as written (default: "
        f"{_HARDWARE})",
    )
    parser.add_argument(
        "--init",
        metavar="DIR",
        help="write a folder with lit.cfg.py, a first test of INPUT (default: of a placeholder "
        "program) and ci.yml",
    )
    flags = {
        "--full": "check every op, not only communication",
        "--brief": "check only the kind, the groups and the result of each collective",
        "--update": "make tests again from their own inputs",
        "--check": "with --update: write nothing, and exit with 1 if a test would change",
    }
    for flag, text in flags.items():
        parser.add_argument(flag, action="store_true", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Writes the test, or updates tests. Raises ToolError."""
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.testing.recipe import Recipe

    if arguments.init is not None:
        return _init(arguments)
    if arguments.update:
        if any(vars(arguments)[name] for name in _MAKING):
            raise ToolError("--update takes only tests: each test states how it was made")
        return _update(arguments)
    if arguments.check:
        raise ToolError("--check goes with --update")
    if arguments.full and arguments.brief:
        raise ToolError("--full and --brief exclude each other")
    if arguments.pipeline is None or arguments.output is None:
        added = [] if arguments.pipeline is not None else ["-p", "thread-tokens"]
        added += [] if arguments.output is not None else ["-o", "test.mlir"]
        raise ToolError(
            "a test needs a pipeline and an output: -p PIPELINE -o TEST.mlir",
            hint=command_line([*arguments.words, *added]),
        )
    if not arguments.inputs and arguments.producer is None and arguments.cost is not None:
        arguments.inputs, arguments.cost = [arguments.cost], _HARDWARE  # --cost INPUT
    if len(arguments.inputs) != (arguments.producer is None):
        raise ToolError("a test has one input: give one INPUT, or a --producer")
    source = None if arguments.producer else Path(arguments.inputs[0]).name
    full, brief = arguments.full, arguments.brief
    producer, cost = arguments.producer, arguments.cost
    recipe = Recipe(arguments.pipeline, full, source, producer, brief, cost)
    return _make(arguments, recipe)


def _init(arguments: argparse.Namespace) -> int:
    """Writes a suite and prints how to run it. Raises ToolError before anything is written."""
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.testing.new_suite import write_suite

    others = ("output", "producer", "update", "check")
    if any(vars(arguments)[name] for name in others) or len(arguments.inputs) > 1:
        raise ToolError("--init DIR takes at most one INPUT, and not -o, --producer or --update")
    loaded = artifact.load(arguments.inputs[0]) if arguments.inputs else None
    files = write_suite(
        arguments.init, loaded, arguments.pipeline, full=arguments.full, cost=arguments.cost
    )
    print("\n".join([*files, f"try: lit -v {arguments.init}"]))
    return 0


def _make(arguments: argparse.Namespace, recipe: Recipe) -> int:
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.files import atomic
    from stablehlo_tools.passes.pipeline import Pipeline
    from stablehlo_tools.testing.generated_test import generated_test, verify
    from stablehlo_tools.testing.minimised import minimise_module
    from stablehlo_tools.testing.recipe import check_replaceable, run_producer

    check_replaceable(arguments.output, recipe)
    pipeline = Pipeline.parse(arguments.pipeline)
    if recipe.producer is not None:
        data = run_producer(recipe, arguments.output)
    else:
        data = minimise_module(artifact.load(arguments.inputs[0]), pipeline).encode()
    test = generated_test(recipe, arguments.output, data)
    verify(test, recipe, data)
    atomic.write_atomically(arguments.output, test.text.encode())
    return 0


def _update(arguments: argparse.Namespace) -> int:
    from stablehlo_tools.diagnostics import ToolError, naming
    from stablehlo_tools.files import atomic
    from stablehlo_tools.passes.pipeline import Pipeline
    from stablehlo_tools.testing.generated_test import difference, regenerate_test
    from stablehlo_tools.testing.recipe import recipe_of

    if not arguments.inputs:
        raise ToolError("--update needs a test")
    texts = {path: atomic.read_input(path)[0].decode() for path in arguments.inputs}
    for path, text in texts.items():  # all of them, before the first is shown or changed
        Pipeline.parse(recipe_of(text, path).pipeline)
    changed: list[tuple[str | os.PathLike[str], bytes]] = []
    for path, text in texts.items():
        if not arguments.check:
            atomic.check_writable(path)
        with naming(path):
            anew = regenerate_test(text, path)
        if anew != text:
            print(difference(text, anew, path), end="")
            changed.append((path, anew.encode()))
    if arguments.check:
        return 1 if changed else 0
    atomic.write_all_atomically(changed)
    return 0
