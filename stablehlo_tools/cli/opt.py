"""Run a pipeline of passes on an artifact.

INPUT is MLIR text or bytecode, a portable artifact, a jax.export file or HLO text, detected from
its content; `-` is standard input. OUTPUT's suffix chooses the form: .mlir, .mlirbc, .bc (portable
artifact) or .jax_export. Without -o, text goes to standard output; without -p, opt only converts.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stablehlo_tools.cli.shared_arguments import add_rules, state_given_rules
from stablehlo_tools.diagnostics import ToolError, render_diagnostics

if TYPE_CHECKING:
    from stablehlo_tools.artifacts.artifact import Artifact, ArtifactForm
    from stablehlo_tools.diagnostics import Diagnostic, Diagnostics
    from stablehlo_tools.passes.pipeline import Instrumentation, Pipeline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `opt` to its parser."""
    from stablehlo_tools.passes.registry import NAMED, PASSES

    passes = "\n".join(f"  {name:18s} {summary}" for name, summary in PASSES.items())
    pipelines = "\n".join(
        f"  {name:18s} {','.join(step.text for step in steps)}" for name, steps in NAMED.items()
    )
    parser.epilog = (
        f"passes:\n{passes}\n  and every C++ pass that MLIR has registered, by its name: cse, "
        f"canonicalize,\n  symbol-dce, sdy-*, stablehlo-*\n\nnamed pipelines:\n{pipelines}"
    )
    parser.add_argument("input", metavar="INPUT", help="the artifact, or - for standard input")
    parser.add_argument(
        "-p",
        "--pipeline",
        action="append",
        metavar="PIPELINE",
        help="pass,pass{option=value other=value}, or a named pipeline",
    )
    parser.add_argument(
        "-o", "--output", metavar="OUTPUT", help="output file; the suffix chooses the form"
    )
    add_rules(parser)
    flags = {
        "--split-input-file": "run on each part of the text between lines of `// -----`",
        "--verify-diagnostics": "check reports against expected-error, -warning, -note comments",
        "--print-ir-after-all": "print the module after each pass, on standard error",
        "--time-passes": "print a table of times, on standard error",
        "--print-locations": "print locations in text output",
        "--module-only": "read only the module of a jax.export file, even of an old jax",
    }
    for flag, text in flags.items():
        parser.add_argument(flag, action="store_true", help=text)
    parser.add_argument(
        "--list-passes", action=_ListPasses, nargs=0, help="print the names of all passes and exit"
    )
    parser.add_argument(
        "-h",
        "--help",
        "--help-pass",
        action=_Help,
        nargs="?",
        metavar="PASS",
        help="print this, or the description and options of a pass, and exit",
    )


class _ListPasses(argparse.Action):
    """Prints the names of passes and named pass pipelines, one per line, for scripts and shells."""

    def __call__(self, *_: object) -> None:
        from stablehlo_tools.passes.registry import NAMED, PASSES

        print("\n".join([*PASSES, *NAMED]))
        sys.exit(0)


class _Help(argparse.Action):
    """Prints the help of the command, or of a pass; exits with 2 if the pass does not exist."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if values is None:
            parser.print_help()
            sys.exit(0)
        from stablehlo_tools.passes.describing import describe_pass

        try:
            print(describe_pass(str(values)))
        except ToolError as error:
            told = error.diagnostic
            near = f"stablehlo-tools opt --help {told.instead[1]}" if told.instead else told.hint
            print(replace(told, hint=near).render("stablehlo-tools"), file=sys.stderr)
            sys.exit(2)
        sys.exit(0)


def run(arguments: argparse.Namespace) -> int:
    """Runs the pass pipeline; returns 1 if expected diagnostics do not match. Raises ToolError."""
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.files import atomic
    from stablehlo_tools.passes.pipeline import Instrumentation, Pipeline

    form, to_file = artifact.ArtifactForm.TEXT, arguments.output not in (None, atomic.STDIN)
    if to_file:
        form = artifact.output_form(arguments.output)
        atomic.check_writable(arguments.output)
    given = arguments.pipeline or []
    if len(given) > 1:
        joined = shlex.quote(",".join(given))
        raise ToolError(f"-p is given {len(given)} times", hint=f"one pipeline: -p {joined}")
    pipeline = Pipeline.parse(given[0]) if given else Pipeline(())
    job = _OptJob(
        pipeline, Instrumentation(arguments.print_ir_after_all), arguments.print_locations
    )
    if arguments.split_input_file or arguments.verify_diagnostics:
        if form is not artifact.ArtifactForm.TEXT:
            text = str(Path(arguments.output).with_suffix(artifact.ArtifactForm.TEXT.value))
            raise ToolError(
                "--split-input-file and --verify-diagnostics write only text: use -o NAME.mlir",
                instead=(arguments.output, text),
            )
        data = job.test_text(
            arguments.input, arguments.split_input_file, arguments.verify_diagnostics
        )
    else:
        loaded = artifact.load(arguments.input, module_only=arguments.module_only)
        state_given_rules(arguments, loaded)
        data = job.transform(loaded, form)
    if arguments.time_passes:
        print(job.instrumentation.time_report(), file=sys.stderr)
    if data is None:
        return 1
    if to_file:
        atomic.write_atomically(arguments.output, data)
    else:
        sys.stdout.buffer.write(data)
    return 0


@dataclass(frozen=True)
class _OptJob:
    """A pass pipeline, with options for running it and printing the result."""

    pipeline: Pipeline
    instrumentation: Instrumentation
    locations: bool

    def transform(self, loaded: Artifact, form: ArtifactForm) -> bytes:
        """Runs the pass pipeline on one artifact; prints warnings to standard error.

        If a pass refuses and suggests no other pipeline, warnings are printed too, because they may
        state the reason."""
        from stablehlo_tools.artifacts import artifact
        from stablehlo_tools.diagnostics import Diagnostics
        from stablehlo_tools.passes.pipeline import run_pipeline

        reported = Diagnostics()
        try:
            run_pipeline(loaded, self.pipeline, reported, self.instrumentation)
        except ToolError as error:
            told = error.diagnostic
            if told.instead is None and " -p " not in told.hint:
                self._say(loaded, reported)
            raise
        self._say(loaded, reported)
        return artifact.encode(loaded, form, locations=self.locations)

    @staticmethod
    def _say(loaded: Artifact, reported: Diagnostics) -> None:
        for text in render_diagnostics((*loaded.left_behind(), *reported.collected), loaded.name):
            print(text, file=sys.stderr)

    def test_text(self, path: str, split: bool, verify: bool) -> bytes | None:
        """Runs on each part of a text; returns None if diagnostics are not as expected."""
        from stablehlo_tools.artifacts.artifact import ArtifactForm, parse
        from stablehlo_tools.files.atomic import read_input
        from stablehlo_tools.testing.expected_diagnostics import join_parts, mismatches, split_input

        data, name = read_input(path)
        text = data.decode(errors="replace")  # if it is not text, its reader reports the error
        parts = split_input(text) if split else [text]
        outputs: list[str] = []
        problems: list[str] = []
        for part in parts:
            if verify:
                output, reported = self._run_part(part, name)
                problems += mismatches(part, reported)
            else:
                output = self.transform(parse(part.encode(), name), ArtifactForm.TEXT).decode()
            outputs.append(output)
        for problem in problems:
            print(f"{name}: {problem}", file=sys.stderr)
        return None if problems else join_parts(outputs).encode()

    def _run_part(self, part: str, name: str) -> tuple[str, list[Diagnostic]]:
        """Returns the output of one part, "" if it was refused, and all diagnostics."""
        from stablehlo_tools.artifacts.artifact import parse, to_text
        from stablehlo_tools.diagnostics import Diagnostics
        from stablehlo_tools.passes.pipeline import run_pipeline

        diagnostics = Diagnostics()
        try:
            loaded = parse(part.encode(), name)
            run_pipeline(loaded, self.pipeline, diagnostics, self.instrumentation)
        except ToolError as error:
            return "", [*diagnostics.collected, error.diagnostic]
        return to_text(loaded.module, locations=self.locations), diagnostics.collected
