"""The snippets of a page of the docs: what is run, what is written to a file, what only shows.

A snippet is a fenced or an indented block of code. What it is follows from how it is written:

    ```console              commands behind `$ `, each with what it prints; `…` leaves text out
    ```python               run in one interpreter for the page
    ```pycon                the same, each `>>> ` with what it prints
    ```python title="f.py"  written to that file, whatever the language
    stablehlo-tools …       (without a `$`) a command or its synopsis: its options are looked up

An indented block that has a line behind `$ ` is a console. Everything else, and what cannot be run
as above, has a mark, a comment in front of it:

    <!-- snippet: slow -->              run by the long tests
    <!-- snippet: not run: REASON -->   shown only
    <!-- snippet: sketches: REASON -->  of the page: blocks that are none of the above show only
    <!-- snippet: before: COMMAND -->   run first; the text says it in words
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

PROMPT = "$ "
_FENCE = re.compile(r"(?P<indent> *)```(?P<language>[\w-]*)(?P<rest>[^`]*)")
_TITLE = re.compile(r'title="([^"]+)"')
_MARK = re.compile(r"<!-- snippet: (?P<text>.*?) *-->", re.DOTALL)
_LIST = re.compile(r" *([-*+]|\d+\.) ")
_CODE_INDENT = "    "


class Kind(Enum):
    """What is done with a snippet."""

    CONSOLE = "console"
    PYTHON = "python"
    SESSION = "pycon"
    FILE = "file"
    SYNOPSIS = "synopsis"
    SHOWN = "shown"


@dataclass(frozen=True)
class Snippet:
    """A block of code, or commands that run in front of one (`hidden`)."""

    kind: Kind
    line: int  # of its first line of code in the page, from 1
    text: str
    title: str = ""  # the file that it is written to
    slow: bool = False
    reason: str = ""  # why it is not run; empty where it is, or where none is given
    hidden: bool = False

    @property
    def accounted_for(self) -> bool:
        """Whether it is run, written or looked up, or says why not."""
        return self.kind is not Kind.SHOWN or bool(self.reason)


def snippets_of(page: Path) -> list[Snippet]:
    """The snippets of a page, in its order."""
    return list(_snippets(page.read_text(encoding="utf-8")))


def _snippets(text: str) -> Iterator[Snippet]:
    sketches = next(
        (mark["text"].partition(":")[2] for mark in _MARK.finditer(text) if _is_page_wide(mark)), ""
    ).strip()
    marks: list[str] = []
    for block in _blocks(text.splitlines()):
        if isinstance(block, str):
            marks.append(block)
            continue
        yield from _marked(block, marks, sketches)
        marks = []


def _is_page_wide(mark: re.Match[str]) -> bool:
    return mark["text"].startswith("sketches:")


def _marked(block: _Block, marks: list[str], sketches: str) -> Iterator[Snippet]:
    kind, reason, slow = block.kind, sketches if block.kind is Kind.SHOWN else "", False
    for mark in marks:
        word, _, rest = mark.partition(":")
        match word.strip():
            case "slow":
                slow = True
            case "not run":
                kind, reason = Kind.SHOWN, " ".join(rest.split())
            case "before":
                commands = "\n".join(PROMPT + each.strip() for each in rest.strip().splitlines())
                yield Snippet(Kind.CONSOLE, block.line, commands, hidden=True, slow=slow)
            case "sketches":
                pass
            case unknown:
                raise ValueError(f"line {block.line}: no mark is called {unknown!r}")
    yield Snippet(kind, block.line, block.text, block.title, slow, reason)


@dataclass(frozen=True)
class _Block:
    line: int
    language: str | None  # None where it is indented
    title: str
    text: str

    @property
    def kind(self) -> Kind:
        if self.title:
            return Kind.FILE
        if self.language in ("python", "pycon"):
            return Kind.PYTHON if self.language == "python" else Kind.SESSION
        lines = self.text.splitlines()
        if self.language in (None, "console") and any(map(_is_prompt, lines)):
            return Kind.CONSOLE
        return Kind.SYNOPSIS if lines and lines[0].startswith("stablehlo-tools ") else Kind.SHOWN


def _is_prompt(line: str) -> bool:
    return line.startswith(PROMPT)


def _blocks(lines: list[str]) -> Iterator[_Block | str]:
    """Blocks of code, and the marks between them, in order."""
    at, in_list = 0, False
    while at < len(lines):
        line = lines[at]
        fence = _FENCE.fullmatch(line)
        if fence:
            end = _end_of_fence(lines, at, fence["indent"])
            body = [each.removeprefix(fence["indent"]) for each in lines[at + 1 : end]]
            title = _TITLE.search(fence["rest"])
            yield _Block(
                at + 2, fence["language"], title[1] if title else "", "\n".join(body) + "\n"
            )
            at = end + 1
        elif line.startswith("<!--"):
            end = next((i for i in range(at, len(lines)) if "-->" in lines[i]), at)
            mark = _MARK.match("\n".join(lines[at : end + 1]))
            if mark:
                yield mark["text"]
            at = end + 1
        elif line.startswith(_CODE_INDENT) and not in_list and (at == 0 or not lines[at - 1]):
            end = _end_of_indented(lines, at)
            body = [each.removeprefix(_CODE_INDENT) for each in lines[at:end]]
            yield _Block(at + 1, None, "", "\n".join(body) + "\n")
            at = end
        else:
            in_list = bool(_LIST.match(line)) or (in_list and (not line or line.startswith(" ")))
            at += 1


def _end_of_fence(lines: list[str], at: int, indent: str) -> int:
    for end in range(at + 1, len(lines)):
        if lines[end].rstrip() == f"{indent}```":
            return end
    raise ValueError(f"line {at + 1}: this fence has no end")


def _end_of_indented(lines: list[str], at: int) -> int:
    """Behind the last line of code; blank lines belong to it where more code follows."""
    end = last = at
    while end < len(lines) and (not lines[end] or lines[end].startswith(_CODE_INDENT)):
        if lines[end]:
            last = end
        end += 1
    return last + 1


@dataclass(frozen=True)
class Command:
    """A command of a console, and what it is said to print."""

    words: str
    printed: tuple[str, ...]
    line: int


def commands_of(console: Snippet) -> list[Command]:
    """The commands of a console; one that ends with a backslash goes on in the next line."""
    found: list[Command] = []
    lines = console.text.splitlines()
    at = 0
    while at < len(lines):
        if not lines[at].startswith(PROMPT):
            raise ValueError(f"line {console.line}: text in front of the first command")
        first = at
        words = lines[at].removeprefix(PROMPT)
        while words.endswith("\\"):
            at += 1
            words = f"{words[:-1].rstrip()} {lines[at].strip()}"
        end = next((i for i in range(at + 1, len(lines)) if _is_prompt(lines[i])), len(lines))
        printed = [line.rstrip() for line in lines[at + 1 : end]]
        while printed and not printed[-1]:
            printed.pop()
        found.append(Command(words, tuple(printed), console.line + first))
        at = end
    return found
