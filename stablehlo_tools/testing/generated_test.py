"""A whole test of what a pipeline makes of a module, verified before anyone sees it.

The test of a changed module holds CHECK lines, of an unchanged one a diff, of a refused one the
expected diagnostics. A test that would also pass on its unprocessed input could not fail: none is
made. FileCheck, the one of PyPI that the lit tests are run with, is asked on texts in memory.

A test is made anew (`regenerated`) from its own input, around what a person has written into it.
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
from stablehlo_tools.testing.check_patterns import escaped
from stablehlo_tools.testing.expected_diagnostics import mismatches
from stablehlo_tools.testing.outcome import Effect, Outcome, outcome_of
from stablehlo_tools.testing.recipe import MADE_BY, UPDATED_BY, Recipe, produced, quoted, recipe_of

_TESTS = "lit_tests"
_GENERATED = re.compile(
    rf"\s*(?://|#) (?:CHECK(?:-[A-Z]+(?:-\d+)?)?:|(?:COUNT|LINKS):|{MADE_BY}|{UPDATED_BY}|"
    r"RUN: stablehlo-tools inspect %t\.after\S* --hardware \S+ --at-most|"
    r"expected-\w+@)"
)
_EXPECTED = re.compile(r"[ \t]*// expected-(?:error|warning|note)@(?:\+\d+|unknown) \{\{.*\}\}\n")


@dataclass(frozen=True)
class GeneratedTest:
    """The lines ahead of the input, which are comments, and the input, empty where it is made."""

    header: list[str]
    input: str

    @property
    def text(self) -> str:
        """The whole file."""
        return "\n".join(self.header) + "\n" + self.input


def generated_test(recipe: Recipe, path: str, data: bytes) -> GeneratedTest:
    """Makes the test that is to stand at `path`; `data` is its input.

    Raises ToolError where the input is none, and where the test could not fail.
    """
    outcome = _outcome(recipe, data, recipe.source or path)
    embedded = recipe.producer is None
    # Whether a collective could be added where the checks leave lines out.
    counted = outcome.checks.has_gaps and outcome.collectives is not None
    traits = _Traits(counted, outcome.links > 0, bool(outcome.said))
    runs = [*_run_lines(recipe, outcome.effect, traits), *_bound_lines(recipe, outcome)]
    checks: list[str] = []
    if outcome.effect is Effect.CHANGED:
        checks += [f"COUNT: {outcome.collectives}".rstrip()] if traits.counted else []
        checks += [f"LINKS: {{{{^}}}}{outcome.links}{{{{$}}}}"] if traits.linked else []
        checks += outcome.checks.lines
    elif outcome.effect is Effect.REFUSED and not embedded:
        checks = [f"CHECK: error: {escaped(outcome.refusal.message)}"]
    shown, parts = Path(path).name, Path(path).absolute().parts
    if _TESTS in parts:  # the path from the root of the repository
        shown = str(Path(*parts[len(parts) - 1 - parts[::-1].index(_TESTS) :]))
    made = [recipe.made_by, UPDATED_BY + quoted(shown)]
    header = [*runs, *made, *([""] if checks else []), *checks]
    leader = "#" if path.endswith(".test") else "//"
    text = _expecting(data.decode(), outcome.said) if embedded else ""
    lines = [f"{leader} {line}" if line else "" for line in header]
    return GeneratedTest([*lines, ""] if embedded else lines, text)


def verify(test: GeneratedTest, recipe: Recipe, data: bytes) -> None:
    """Runs what the test runs. Raises ToolError where it does not pass, or could not fail."""
    embedded = recipe.producer is None
    seen = test.text.encode() if embedded else data
    outcome = _outcome(recipe, seen, "<test>")
    problems = mismatches(test.text, outcome.said) if embedded else []
    seen_by_filecheck = None
    if outcome.effect is Effect.CHANGED:
        seen_by_filecheck = outcome.after
    elif outcome.effect is Effect.REFUSED and not embedded:
        seen_by_filecheck = outcome.refusal.render("input") + "\n"
    if seen_by_filecheck is not None:
        problem = mismatch(test.text, seen_by_filecheck)
        problems += [problem] if problem else []
    if problems:
        raise ToolError(f"a bug in make-test: the test that it made does not pass: {problems[0]}")
    links_tell = outcome.links and outcome.links != link_count(outcome.before)
    if (
        outcome.effect is Effect.CHANGED
        and not links_tell
        and not mismatch(test.text, outcome.before)
    ):
        hint = "" if recipe.full else ": use --full"
        raise ToolError(
            "the pipeline changes only what the checks leave out, so that the test could not "
            f"fail{hint}"
        )


def _outcome(recipe: Recipe, data: bytes, name: str) -> Outcome:
    pipeline = Pipeline.parse(recipe.pipeline)
    return outcome_of(data, name, pipeline, everything=recipe.full, brief=recipe.brief)


def _of_any_pipeline(line: str) -> str:
    return re.sub(r"(?<= -p )('[^']*'|\S+)", "PIPELINE", line)


@dataclass(frozen=True)
class _Traits:
    """What decides which RUN lines a test has."""

    counted: bool  # its collectives
    linked: bool  # the lines of its token chain are counted
    said: bool  # the passes warn


def _run_lines(recipe: Recipe, effect: Effect, traits: _Traits) -> list[str]:
    given, pipeline = recipe.input, f"-p {quoted(recipe.pipeline)}"
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


def _bound_lines(recipe: Recipe, outcome: Outcome) -> list[str]:
    """The RUN line that fails where what the pipeline makes costs more than now, as written."""
    if recipe.cost is None:
        return []
    if outcome.effect is Effect.REFUSED:
        raise ToolError(f"--cost: the pipeline refuses the input: {outcome.refusal.message}")
    question = Question(load_hardware(recipe.cost), with_timeline=False)
    (report,) = exposure([parse(outcome.after.encode(), "<test>")], question)
    bounds = (f"--at-most {n}={math.ceil(most)}" for n, most in report.bounded_figures.items())
    after = "%t.after.mlir" if outcome.effect is Effect.CHANGED else "%t.after"
    inspected = f"stablehlo-tools inspect {after} --hardware {quoted(recipe.cost)}"
    return [f"RUN: {inspected} {' '.join(bounds)}"]


def _expecting(text: str, said: Sequence[Diagnostic]) -> str:
    """The text with a comment above each line for each thing that is said of it."""
    lines = text.splitlines(keepends=True)
    below: Counter[int] = Counter()  # comments of a line, the first written is the lowest
    for diagnostic in sorted(said, key=lambda d: d.place.line, reverse=True):
        line = diagnostic.place.line if diagnostic.place.file is None else 0
        number = max(line - 1, 0)
        indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
        below[line] += 1
        where = f"+{below[line]}" if line else "unknown"
        message = diagnostic.message.partition("}}")[0]
        expected = f"// expected-{diagnostic.severity.value}@{where} {{{{{message}}}}}\n"
        lines.insert(number, indent + expected)
    return "".join(lines)


def regenerated(text: str, path: str) -> str:
    """The test as make-test would make it now; the input and hand-written comments stay.

    Raises ToolError for a test that make-test did not make, and as `generated_test` does.
    """
    recipe = recipe_of(text, path)
    header, given = _parts(text)
    data = produced(recipe, path) if recipe.producer is not None else given.encode()
    fresh = generated_test(recipe, path, data)
    merged = GeneratedTest(_merged(header, fresh.header, recipe), fresh.input)
    verify(merged, recipe, data)
    return merged.text


def difference(before: str, after: str, path: str) -> str:
    """A unified diff, empty where the texts are the same."""
    lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
    return "".join(difflib.unified_diff(*lines, path, path))


def _parts(text: str) -> tuple[list[str], str]:
    """The comments ahead of the input, and the input without expected diagnostics."""
    text = _EXPECTED.sub("", text)
    lines = text.splitlines(keepends=True)
    comments = (not line.strip() or re.match(r"\s*(?://|#(?![\w-]))", line) for line in lines)
    count = next((i for i, comment in enumerate(comments) if not comment), len(lines))
    return [line.rstrip("\n") for line in lines[:count]], "".join(lines[count:])


def _merged(old: list[str], fresh: list[str], recipe: Recipe) -> list[str]:
    """The fresh lines, with the comments and empty lines of the old ones where they stood."""
    kept: list[list[str]] = [[]]  # what stands ahead of each generated line, and at the end
    generated: list[str] = []
    run_lines = {  # that the test of this recipe, or of another pipeline, may have
        _of_any_pipeline(known)
        for effect, traits in product(Effect, product((False, True), repeat=3))
        for known in _run_lines(recipe, effect, _Traits(*traits))
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
        pairs = zip_longest(range(old_start, old_end), range(start, end))
        for position, new in pairs:
            merged += kept[position] if position is not None else []
            merged += [wanted[new]] if new is not None else []
    for number, line in enumerate(merged[:-1]):
        if UPDATED_BY in line and merged[number + 1]:
            merged.insert(number + 1, "")  # ahead of checks where there were none before
            break
    return merged + kept[-1]


def mismatch(checks: str, text: str) -> str | None:
    """What FileCheck has against a text, given the CHECK lines of a test; None where they match.

    Raises ToolError where the package `filecheck` is not installed.
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
