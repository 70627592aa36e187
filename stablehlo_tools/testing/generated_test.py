"""Generates a whole test of a pass pipeline on a module, and verifies it before it is written.

The test of a changed module has CHECK lines, of an unchanged one a diff, of a refused one the
expected diagnostics. A test that would also pass on its unprocessed input is refused, because it
could not fail. The PyPI package filecheck, which also runs the lit tests, checks texts in memory.

`regenerate_test` makes a test again from its own input. It keeps lines that a person has added.
"""

from __future__ import annotations

import difflib
import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import product, zip_longest
from pathlib import Path

from stablehlo_tools.artifacts.artifact import parse
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import Diagnostic, ToolError, first_line, installing
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.report.exposure import Question, exposure
from stablehlo_tools.testing.brief_lines import LINK, link_count
from stablehlo_tools.testing.check_patterns import escape_literal
from stablehlo_tools.testing.expected_diagnostics import mismatches
from stablehlo_tools.testing.outcome import Effect, TestOutcome, outcome_of
from stablehlo_tools.testing.recipe import (
    MADE_BY,
    UPDATED_BY,
    Recipe,
    quote_for_shell,
    recipe_of,
    run_producer,
)

_TESTS = "lit_tests"
_GENERATED = re.compile(
    rf"\s*(?://|#) (?:CHECK(?:-[A-Z]+(?:-\d+)?)?:|(?:COUNT|LINKS):|{MADE_BY}|{UPDATED_BY}|"
    r"RUN: stablehlo-tools inspect %t\.after\S* --hardware \S+ --at-most|"
    r"expected-\w+@)"
)
_EXPECTED = re.compile(r"[ \t]*// expected-(?:error|warning|note)@(?:\+\d+|unknown) \{\{.*\}\}\n")


@dataclass(frozen=True)
class GeneratedTest:
    """The comment lines before the input, and the input; empty if a producer makes it."""

    header: list[str]
    input: str

    @property
    def text(self) -> str:
        """The whole file."""
        return "\n".join(self.header) + "\n" + self.input


def generated_test(recipe: Recipe, path: str, data: bytes) -> GeneratedTest:
    """Generates the test for `path`; `data` is its input.

    Raises ToolError if the input is not an artifact, or if `--cost` is set and the pass pipeline
    refuses the input.
    """
    outcome = _outcome(recipe, data, recipe.source or path)
    embedded = recipe.producer is None
    # If a collective could be added between checked lines, the test also counts collectives.
    counted = outcome.checks.has_gaps and outcome.collectives is not None
    traits = _TestTraits(counted, outcome.links > 0, bool(outcome.said))
    runs = [*_run_lines(recipe, outcome.effect, traits), *_bound_lines(recipe, outcome)]
    checks: list[str] = []
    if outcome.effect is Effect.CHANGED:
        checks += [f"COUNT: {outcome.collectives}".rstrip()] if traits.counted else []
        checks += [f"LINKS: {{{{^}}}}{outcome.links}{{{{$}}}}"] if traits.linked else []
        checks += outcome.checks.lines
    elif outcome.effect is Effect.REFUSED and not embedded:
        checks = [f"CHECK: error: {escape_literal(outcome.refusal.message)}"]
    shown, parts = Path(path).name, Path(path).absolute().parts
    if _TESTS in parts:  # the path from the root of the repository
        shown = str(Path(*parts[len(parts) - 1 - parts[::-1].index(_TESTS) :]))
    made = [recipe.made_by, UPDATED_BY + quote_for_shell(shown)]
    header = [*runs, *made, *([""] if checks else []), *checks]
    leader = "#" if path.endswith(".test") else "//"
    text = _expecting(data.decode(), outcome.said) if embedded else ""
    lines = [f"{leader} {line}" if line else "" for line in header]
    return GeneratedTest([*lines, ""] if embedded else lines, text)


def verify(test: GeneratedTest, recipe: Recipe, data: bytes) -> None:
    """Runs the checks of the test. Raises ToolError if it does not pass, or could not fail."""
    embedded = recipe.producer is None
    outcome = _outcome(recipe, test.text.encode() if embedded else data, "<test>")
    problems = mismatches(test.text, outcome.said) if embedded else []
    is_changed = outcome.effect is Effect.CHANGED
    seen_by_filecheck = None
    if is_changed:
        seen_by_filecheck = outcome.after
    elif outcome.effect is Effect.REFUSED and not embedded:
        seen_by_filecheck = outcome.refusal.render("input") + "\n"
    if seen_by_filecheck is not None:
        problem = mismatch(test.text, seen_by_filecheck)
        problems += [problem] if problem else []
    if problems:
        raise ToolError(f"a bug in make-test: the generated test fails: {problems[0]}")
    links_tell = outcome.links and outcome.links != link_count(outcome.before)
    if is_changed and not links_tell and not mismatch(test.text, outcome.before):
        hint = "" if recipe.full else ": use --full"
        raise ToolError(
            f"the checks ignore all changes of the pipeline, so the test could not fail{hint}"
        )


def _outcome(recipe: Recipe, data: bytes, name: str) -> TestOutcome:
    pipeline = Pipeline.parse(recipe.pipeline)
    return outcome_of(data, name, pipeline, everything=recipe.full, brief=recipe.brief)


def _of_any_pipeline(line: str) -> str:
    return re.sub(r"(?<= -p )('[^']*'|\S+)", "PIPELINE", line)


@dataclass(frozen=True)
class _TestTraits:
    """The properties of a run that decide which RUN lines a test has."""

    counted: bool  # the collectives are counted
    linked: bool  # the lines of the token chain are counted
    said: bool  # the passes warn


def _run_lines(recipe: Recipe, effect: Effect, traits: _TestTraits) -> list[str]:
    given, pipeline = recipe.input, f"-p {quote_for_shell(recipe.pipeline)}"
    opt = f"stablehlo-tools opt {given}"
    embedded = recipe.producer is None
    checked = " --verify-diagnostics" if embedded and traits.said else ""
    if effect is Effect.UNCHANGED:
        commands = [
            f"{opt} > %t.before",
            f"{opt} {pipeline}{checked} > %t.after",
            "diff -u %t.before %t.after",
        ]
    elif effect is Effect.REFUSED and embedded:
        commands = [f"{opt} {pipeline} --verify-diagnostics"]
    elif effect is Effect.REFUSED:
        commands = [f"not {opt} {pipeline} 2>&1 | filecheck %s"]
    elif not traits.counted and not traits.linked and recipe.cost is None:
        commands = [f"{opt} {pipeline}{checked} | filecheck %s"]
    else:
        count = "stablehlo-tools inspect %t.after.mlir | filecheck %s --check-prefix=COUNT"
        links = f"grep -c {LINK} %t.after.mlir | filecheck %s --check-prefix=LINKS"
        commands = [
            f"{opt} {pipeline}{checked} > %t.after.mlir",
            "filecheck %s < %t.after.mlir",
            *([count] if traits.counted else []),
            *([links] if traits.linked else []),
        ]
    return [f"RUN: {c}" for c in ([] if recipe.producer is None else [recipe.producer]) + commands]


def _bound_lines(recipe: Recipe, outcome: TestOutcome) -> list[str]:
    """Returns the RUN line that bounds the cost of the transformed module by its present cost."""
    if recipe.cost is None:
        return []
    if outcome.effect is Effect.REFUSED:
        raise ToolError(f"--cost: the pipeline refuses the input: {outcome.refusal.message}")
    question = Question(load_hardware(recipe.cost), with_timeline=False)
    (report,) = exposure([parse(outcome.after.encode(), "<test>")], question)
    bounds = (f"--at-most {n}={math.ceil(most)}" for n, most in report.bounded_figures.items())
    after = "%t.after.mlir" if outcome.effect is Effect.CHANGED else "%t.after"
    inspected = f"stablehlo-tools inspect {after} --hardware {quote_for_shell(recipe.cost)}"
    return [f"RUN: {inspected} {' '.join(bounds)}"]


def _expecting(text: str, said: Sequence[Diagnostic]) -> str:
    """Adds a comment with the expected diagnostic above its line, for each diagnostic."""
    lines = text.splitlines(keepends=True)
    below: Counter[int] = Counter()  # comments of a line, the first written is the lowest
    # The last line first, so that the numbers of the others stay valid.
    for diagnostic in sorted(said, key=lambda d: d.place.line, reverse=True):
        line = diagnostic.place.line if diagnostic.place.file is None else 0
        number = max(line - 1, 0)
        indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
        below[line] += 1
        where = f"+{below[line]}" if line else "unknown"
        # `}}` ends an expectation.
        message = diagnostic.message.partition("}}")[0]
        expected = f"// expected-{diagnostic.severity.value}@{where} {{{{{message}}}}}\n"
        lines.insert(number, indent + expected)
    return "".join(lines)


def regenerate_test(text: str, path: str) -> str:
    """Returns the test as make-test would generate it now; input and hand-written comments stay.

    Raises ToolError if make-test did not make the test, and as `generated_test` and `verify` do.
    """
    recipe = recipe_of(text, path)
    # The comments before the input, and the input without expectations.
    lines = _EXPECTED.sub("", text).splitlines(keepends=True)
    comments = (not line.strip() or re.match(r"\s*(?://|#(?![\w-]))", line) for line in lines)
    count = next((i for i, comment in enumerate(comments) if not comment), len(lines))
    header, given = [line.rstrip("\n") for line in lines[:count]], "".join(lines[count:])
    data = run_producer(recipe, path) if recipe.producer is not None else given.encode()
    fresh = generated_test(recipe, path, data)
    merged = GeneratedTest(_merge_headers(header, fresh.header, recipe), fresh.input)
    verify(merged, recipe, data)
    return merged.text


def difference(before: str, after: str, path: str) -> str:
    """Returns a unified diff; empty if the texts are equal."""
    lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
    return "".join(difflib.unified_diff(*lines, path, path))


def _merge_headers(old: list[str], fresh: list[str], recipe: Recipe) -> list[str]:
    """Returns the fresh lines, with the old comments and empty lines in their old places."""
    kept: list[list[str]] = [[]]  # the lines before each generated line, and at the end
    generated: list[str] = []
    run_lines = {  # every possible RUN line of this recipe, with any pass pipeline
        _of_any_pipeline(known)
        for effect, traits in product(Effect, product((False, True), repeat=3))
        for known in _run_lines(recipe, effect, _TestTraits(*traits))
    }
    for line in old:
        if _GENERATED.match(line) or _of_any_pipeline(line.strip("/# ")) in run_lines:
            generated.append(line)
            kept.append([])
        else:
            kept[-1].append(line)
    wanted = [line for line in fresh if line]
    merged: list[str] = []
    matcher = difflib.SequenceMatcher(None, generated, wanted, autojunk=False)
    for _, old_start, old_end, start, end in matcher.get_opcodes():
        for position, new in zip_longest(range(old_start, old_end), range(start, end)):
            merged += kept[position] if position is not None else []
            merged += [wanted[new]] if new is not None else []
    for number, line in enumerate(merged[:-1]):
        if UPDATED_BY in line and merged[number + 1]:
            merged.insert(number + 1, "")  # before checks, if the old test had none
            break
    return merged + kept[-1]


def mismatch(checks: str, text: str) -> str | None:
    """Runs FileCheck on a text with the CHECK lines of a test; returns its error or None.

    Raises ToolError if the package `filecheck` is not installed.
    """
    try:
        from filecheck.finput import FInput
        from filecheck.matcher import Matcher
        from filecheck.options import Options
        from filecheck.parser import Parser, pattern_for_opts
    except ImportError:
        raise ToolError(
            "the tests are checked with the package filecheck, which is not installed",
            hint=installing("tests"),
        ) from None
    options = Options("test")
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(io.StringIO()):
        parser = Parser(options, io.StringIO(checks), *pattern_for_opts(options))
        try:
            code = Matcher(options, FInput("output", text), parser).run()
        except RuntimeError as error:  # it ran out of text
            return first_line(str(error))
    return first_line(said.getvalue()) if code else None
