"""Holds the prose and the names of the project to limits that may only fall.

    python python/style/guard.py [--places FIGURE] [--lower]

Each figure of `limits.toml` is counted from syntax trees and pages; nothing of the product runs.
The guard fails if a figure is worse than its limit. It also fails if a figure is better than its
limit by more than its slack, so that a gain cannot be lost again; `--lower` writes the new limit.
`--places` prints where the hits are. A hit is a place to look at: rewrite the sentence or choose
the name; do not shuffle words until the pattern misses.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMITS = Path(__file__).with_name("limits.toml")

# Words that put the reader off, each with its remedy; CONTRIBUTING has the rules.
IDIOMS = {
    "start with the actor, not with a clause": (
        r"\b[Ww]hat (?:is|are|was|it|they|an?|the|has|have|no|comes|goes|takes|makes|does|do)\b"
    ),
    "before and after, not in front of and behind": (
        r"\b(?:in front of|behind) (?:an?|the|it|them|each|all|this|that|its|loops?)\b"
    ),
    "the plain verb": (
        r"\b(?:stands?|lies|lay) (?:in|at|on|before|beside|here|first|last|between|above|as)\b"
    ),
    "the field's verb: pass, yield, return": r"\bhand(?:s|ed)? (?:on|out|over|back|it|them)\b",
    "say what is": r"(?<!there )\b(?:is|are|was|were) no (?!longer\b)[a-z]+",
    "name the actor": r"\bnobody\b|\bnothing (?:uses|reads|takes|asks|knows|says)\b",
    "the same, separately": r"(?<!`)\balike\b|\bcompiled apart\b",
    "two sentences": r"\bof (?:which|whom|whose)\b",
    "unchanged": r"\bas (?:it|they) (?:came|come|comes|stands?|were|was)\b",
    "dead, or unused": r"\bfor nothing\b|\bin vain\b|\bwithout a word\b",
}
BARE_NAME = re.compile(
    r"_?(?:of|at|to|by|[a-z]{2,}(?:ed|en|made|had|kept|sent|held|cut|put|read|found))"
)
RELATIVE = re.compile(r"(?:What|Whether|Where|Which|Who|How)\b")
LONG_SENTENCE = 25  # words
SHORT_HELPER = 8  # lines


@dataclass
class Tally:
    """Places that count, and what they are counted against (words, lines, or 1)."""

    places: list[str] = field(default_factory=list[str])
    of: float = 1

    @property
    def figure(self) -> float:
        """Returns hits for each unit of `of`, to two digits; to one from 10 up."""
        figure = len(self.places) / (self.of or 1)
        return round(figure, 1 if figure >= 10 else 2)


class Source:
    """A file of Python, parsed once."""

    def __init__(self, path: Path) -> None:
        self.name = str(path.relative_to(ROOT))
        self.text = path.read_text()
        self.nodes = list(ast.walk(ast.parse(self.text)))
        self.docstrings = list(_find_docstrings(self.nodes))
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        self.comments = [
            (token.start[0], token.string.lstrip("# "))
            for token in tokens
            if token.type == tokenize.COMMENT
        ]

    @property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Returns all functions and methods, nested ones too."""
        return [
            node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]


def _find_docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.Expr, str]]:
    """Yields the statement and the text of each docstring."""
    for node in nodes:
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and (text := ast.get_docstring(node)):
            statement = node.body[0]
            assert isinstance(statement, ast.Expr)
            yield statement, text


def read_sources(folder: Path) -> list[Source]:
    """Returns the files of Python in a folder, in the order of their paths."""
    return [Source(path) for path in sorted(folder.rglob("*.py"))]


def prose_of_page(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of a page, without its blocks of code."""
    fenced = False
    for line, text in enumerate(path.read_text().splitlines(), 1):
        fenced ^= text.lstrip().startswith(("```", "~~~"))
        if not fenced and not text.startswith("    "):
            yield line, text


def prose_of_source(source: Source) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of docstrings, messages and comments."""
    for statement, doc in source.docstrings:
        yield statement.lineno, _without_blocks(doc)
    docstrings = {id(statement.value) for statement, _ in source.docstrings}
    for node in source.nodes:
        if (
            isinstance(node, ast.Constant)
            and id(node) not in docstrings
            and isinstance(node.value, str)
            and node.value.count(" ") >= 3
        ):
            yield node.lineno, node.value
    yield from source.comments


def _without_blocks(doc: str) -> str:
    """Returns a docstring without its indented blocks: IR, drawings, formulas."""
    return "\n".join(line for line in doc.splitlines() if not line.startswith("    "))


def count_idioms(name: str, prose: Iterable[tuple[int, str]]) -> Tally:
    """Returns hits of `IDIOMS` in one file; `of` counts its words, in thousands."""
    tally = Tally(of=0)
    for line, text in prose:
        tally.of += len(text.split()) / 1000
        for remedy, pattern in IDIOMS.items():
            for hit in re.finditer(pattern, text, re.IGNORECASE):
                around = " ".join(text[max(0, hit.start() - 20) : hit.end() + 30].split())
                tally.places.append(f"{name}:{line}: {remedy}: …{around}…")
    return tally


def count_long_sentences(source: Source) -> Tally:
    """Returns sentences of docstrings with more than 25 words; `of` counts hundreds."""
    tally = Tally(of=0)
    for statement, doc in source.docstrings:
        for sentence in re.split(r"(?<=[.:;?])\s+|\n\s*\n|\n- ", _without_blocks(doc)):
            tally.of += 0.01
            if len(words := sentence.split()) > LONG_SENTENCE:
                tally.places.append(f"{source.name}:{statement.lineno}: {' '.join(words[:8])} …")
    return tally


def count_relative_docstrings(source: Source) -> Tally:
    """Returns docstrings that begin with a relative clause instead of a verb or a noun."""
    return Tally(
        [
            f"{source.name}:{statement.lineno}: {doc.splitlines()[0]}"
            for statement, doc in source.docstrings
            if RELATIVE.match(doc)
        ]
    )


def count_bare_names(source: Source) -> Tally:
    """Returns functions named by one participle or preposition. Properties may be so named."""
    return Tally(
        [
            f"{source.name}:{node.lineno}: {node.name}"
            for node in source.functions
            if BARE_NAME.fullmatch(node.name)
            and not any("property" in ast.unparse(item) for item in node.decorator_list)
        ]
    )


def count_shared_names(sources: Iterable[Source]) -> Tally:
    """Returns classes that share their name with another class of the product."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                place = f"{source.name}:{node.lineno}: {node.name}"
                places[node.name.lstrip("_")].append(place)
    return Tally([place for same in places.values() if len(same) > 1 for place in same])


def count_single_use_helpers(source: Source) -> Tally:
    """Returns private functions of 8 lines or fewer that their module mentions once."""
    words = Counter(re.findall(r"\w+", source.text))
    return Tally(
        [
            f"{source.name}:{node.lineno}: {node.name}"
            for node in source.functions
            if (node.end_lineno or 0) - node.lineno < SHORT_HELPER
            and re.match(r"_[^_]", node.name)
            and words[node.name] == 2
        ]
    )


def count_lines_without_comment(source: Source) -> Tally:
    """Returns lines of code; `of` counts comments. Blank lines and docstrings are left out."""
    lines = {line for line, text in enumerate(source.text.splitlines(), 1) if text.strip()}
    for statement, _ in source.docstrings:
        lines -= set(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return Tally([f"{source.name}: a line"] * len(lines), len(source.comments))


def _sum(tallies: Iterable[Tally]) -> Tally:
    all_of = list(tallies)
    places = [place for tally in all_of for place in tally.places]
    return Tally(places, sum(tally.of for tally in all_of))


def measure(root: Path) -> dict[str, Tally]:
    """Returns every figure by the name that `limits.toml` has for it."""
    product = read_sources(root / "stablehlo_tools")
    pages = [*sorted((root / "docs").rglob("*.md")), root / "README.md", root / "CONTRIBUTING.md"]
    prose = [(source.name, prose_of_source(source)) for source in product]
    on_pages = [(str(page.relative_to(root)), prose_of_page(page)) for page in pages]

    def count(counter: Callable[[Source], Tally]) -> Tally:
        return Tally(_sum(map(counter, product)).places)

    return {
        "idioms_in_product": _sum(count_idioms(*each) for each in prose),
        "idioms_in_docs": _sum(count_idioms(*each) for each in on_pages),
        "long_sentences": _sum(map(count_long_sentences, product)),
        "relative_docstrings": count(count_relative_docstrings),
        "bare_names": count(count_bare_names),
        "shared_class_names": count_shared_names(product),
        "single_use_helpers": count(count_single_use_helpers),
        "lines_per_comment": _sum(map(count_lines_without_comment, product)),
    }


def judge(figures: dict[str, float], limits: dict[str, float]) -> list[str]:
    """Returns what is wrong: a figure above its limit, or a limit that a figure left behind."""
    slack = {name: max(3.0 if limit >= 20 else 0.1, 0.05 * limit) for name, limit in limits.items()}
    return [
        f"{name} is {figure:g}, more than {limits[name]:g}: see --places {name}"
        for name, figure in figures.items()
        if figure > limits[name]
    ] + [
        f"{name} fell from {limits[name]:g} to {figure:g}: keep it by --lower"
        for name, figure in figures.items()
        if figure < limits[name] - slack[name]
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if a figure is worse than its limit, or a limit too high."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--places", metavar="FIGURE", help="print the places of one figure")
    parser.add_argument("--lower", action="store_true", help="write limits that fell")
    options = parser.parse_args(arguments)
    tallies = measure(ROOT)
    if options.places:
        print(*tallies[options.places].places, sep="\n")
        return 0
    figures = {name: tally.figure for name, tally in tallies.items()}
    limits: dict[str, float] = tomllib.loads(LIMITS.read_text())
    if options.lower:
        text = LIMITS.read_text()
        for name, figure in figures.items():
            if figure < limits[name]:
                text = re.sub(rf"(?m)^{name} = \S+", f"{name} = {figure:g}", text)
        LIMITS.write_text(text)
        limits = tomllib.loads(text)
    wrong = judge(figures, limits)
    for line in wrong:
        print(f"style: {line}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
