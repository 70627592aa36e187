"""Makes a generated test anew from its own input, around what a person has written into it."""

from __future__ import annotations

import difflib
import re
from itertools import zip_longest

from stablehlo_tools.testing.generated_test import (
    GeneratedTest,
    generated_test,
    is_run_line_of,
    verify,
)
from stablehlo_tools.testing.producer import produced
from stablehlo_tools.testing.recipe import MADE_BY, UPDATED_BY, Recipe, recipe_of

_GENERATED = re.compile(
    rf"\s*(?://|#) (?:CHECK(?:-[A-Z]+(?:-\d+)?)?:|(?:COUNT|LINKS):|{MADE_BY}|{UPDATED_BY}|"
    r"expected-\w+@)"
)
_EXPECTED = re.compile(r"[ \t]*// expected-(?:error|warning|note)@(?:\+\d+|unknown) \{\{.*\}\}\n")


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
    for line in old:
        if _GENERATED.match(line) or is_run_line_of(recipe, line.strip("/# ")):
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
    return _with_a_break(merged) + kept[-1]


def _with_a_break(lines: list[str]) -> list[str]:
    """An empty line ahead of checks where there were none before."""
    for number, line in enumerate(lines[:-1]):
        if UPDATED_BY in line and lines[number + 1]:
            return [*lines[: number + 1], "", *lines[number + 1 :]]
    return lines
