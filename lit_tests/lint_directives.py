"""Find the test directives that filecheck, lit or the diagnostic verifier would silently skip.

    python lit_tests/lint_directives.py [FILE or DIRECTORY]...

A directive is looked for where a comment starts; prose that mentions one further on is left alone.
What a directive says is not judged. Files under `Inputs` are not tests and are not read.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

SUFFIXES = (".mlir", ".test")
KINDS = ("LABEL", "NEXT", "SAME", "EMPTY", "NOT", "DAG")
KIND = rf"-(?:{'|'.join(KINDS)}|COUNT-\d+)"
SEVERITIES = ("error", "warning", "note", "remark")
# Capitals before a colon that belong to lit and filecheck, or to prose.
NOT_PREFIXES = (
    *("ALLOW_RETRIES", "DEFINE", "REDEFINE", "REQUIRES", "RUN", "UNSUPPORTED", "XFAIL"),
    *("COM", "FIXME", "NOTE", "TODO"),
)

HEAD = re.compile(
    r"(?P<word>[A-Za-z][\w-]*)(?:\{LITERAL\})?(?P<gap>\s*)(?P<colon>:?)\s*(?P<body>.*)"
)
LOOKS_LIKE_IR = re.compile(r"[%@]|\[\[|\{\{|\b(?:stablehlo|func|sdy|mhlo|chlo)\.")
LOOKS_LIKE_PROSE = re.compile(r"[a-z']+,?(?: [\w'.,;:()`-]+)+")
LOOKS_LIKE_COMMAND = re.compile(r"%[st]\b|\|")
UNSUPPORTED_BLOCK = re.compile(r"\[\[\s*(?:#|@LINE)")
DIAGNOSTIC = re.compile(
    rf"expected-(?:{'|'.join(SEVERITIES)})(?:-re)?"
    r" *(?:@(?:[+-]\d+|above|below|unknown))? *\{\{.*\}\}"
)
LIKE_A_DIAGNOSTIC = re.compile(
    r"(?P<first>[A-Za-z]+)(?P<joint>[-_ ])(?P<second>[A-Za-z]+)(?P<rest>.*)"
)


@dataclass(frozen=True)
class Finding:
    """One directive that does nothing, and why."""

    line: int
    message: str


@dataclass(frozen=True)
class Runs:
    """What a file's RUN lines read from the file."""

    lines: int
    prefixes: dict[str, int]  # check prefix -> the line of the RUN that names it
    verifies_diagnostics: bool


@dataclass(frozen=True)
class Head:
    """The first word of a comment, what follows it, and the whole line."""

    word: str
    spaced: bool
    colon: bool
    body: str
    line: str


def lint(text: str) -> list[Finding]:
    """Return the findings of one test file, in line order."""
    lines = text.splitlines()
    runs = _read_runs(lines)
    used: set[str] = set()
    findings: list[Finding] = []
    for number, line in enumerate(lines, start=1):
        message = _line_problem(line, runs, used)
        if message:
            findings.append(Finding(number, message))
    findings += [
        Finding(line, f"no directive uses the check prefix {prefix}")
        for prefix, line in runs.prefixes.items()
        if prefix not in used
    ]
    if not runs.lines:
        findings.append(Finding(1, "no RUN line: lit runs nothing"))
    return sorted(findings, key=lambda finding: finding.line)


def _read_runs(lines: list[str]) -> Runs:
    """Join continued RUN lines; a DEFINE counts, for it holds parts of commands."""
    commands: list[tuple[int, str]] = []
    run_lines = 0
    continued = False
    for number, line in enumerate(lines, start=1):
        match = re.search(r"(RUN|DEFINE):(.*)", line)
        if not match:
            continue
        run_lines += match[1] == "RUN"
        command = match[2].rstrip()
        if continued:
            first, before = commands.pop()
            commands.append((first, before + command.removesuffix("\\")))
        else:
            commands.append((number, command.removesuffix("\\")))
        continued = command.endswith("\\")
    prefixes: dict[str, int] = {}
    for number, command in commands:
        for prefix in _filecheck_prefixes(command):
            prefixes.setdefault(prefix, number)
    verifies = any("--verify-diagnostics" in command for _, command in commands)
    return Runs(run_lines, prefixes, verifies)


def _filecheck_prefixes(command: str) -> Iterator[str]:
    """Yield the prefixes of each filecheck in `command` that reads the test file itself."""
    for part in re.split(r"[|;&]+", command):
        words = [word.strip("'\"") for word in part.split()]
        if "%s" not in words or not {"filecheck", "FileCheck"} & set(words):
            continue
        named = re.findall(r"--?check-prefix(?:es)?[= ]+['\"]?([\w,-]+)", part)
        yield from (prefix for names in named or ["CHECK"] for prefix in names.split(","))


def _line_problem(line: str, runs: Runs, used: set[str]) -> str | None:
    comment = line.split("//", 1)[-1].strip("/#; \t")
    match = HEAD.match(comment)
    if not match:
        return None
    head = Head(match["word"], bool(match["gap"]), bool(match["colon"]), match["body"], line)
    return (
        _diagnostic_problem(comment, runs)
        or _run_problem(head)
        or _directive_problem(head, runs, used)
    )


def _diagnostic_problem(comment: str, runs: Runs) -> str | None:
    if DIAGNOSTIC.fullmatch(comment):
        return None if runs.verifies_diagnostics else "no RUN line passes --verify-diagnostics"
    match = LIKE_A_DIAGNOSTIC.match(comment)
    if not match or (match["joint"] == " " and "{{" not in match["rest"]):
        return None
    near_first = get_close_matches(match["first"].lower(), ["expected"], cutoff=0.8)
    near_second = get_close_matches(match["second"].lower(), SEVERITIES, 1, cutoff=0.7)
    if not near_first or not near_second:
        return None
    return f"malformed diagnostic; write expected-{near_second[0]}[@+N|@-N|@above|@below] {{{{…}}}}"


def _run_problem(head: Head) -> str | None:
    if head.word == "RUN" and head.colon and not head.spaced:
        return None
    if head.word == "RUN" and (head.colon or not LOOKS_LIKE_PROSE.fullmatch(head.body)):
        return "lit reads only 'RUN:'"
    near = head.word not in ("RUN", "return") and get_close_matches(
        head.word.upper(), ["RUN"], cutoff=0.65
    )
    if near and LOOKS_LIKE_COMMAND.search(head.body):
        return f"'{head.word}' is not a directive; did you mean 'RUN:'?"
    return None


def _directive_problem(head: Head, runs: Runs, used: set[str]) -> str | None:
    known = [*runs.prefixes, *({"CHECK"} - runs.prefixes.keys())]
    either = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
    exact = re.fullmatch(rf"(?P<prefix>{either})(?P<kind>{KIND})?", head.word)
    if not exact:
        return _misspelling(head, known)
    if not head.colon:
        prose = not exact["kind"] and LOOKS_LIKE_PROSE.fullmatch(head.body)
        return None if prose else f"no colon right after '{head.word}'"
    if head.spaced:
        return f"a space between '{head.word}' and its colon"
    if exact["prefix"] not in runs.prefixes:
        return _unread(exact["prefix"])
    used.add(exact["prefix"])
    if re.search(rf"(?:COM|RUN).*(?:{either})", head.line):
        return "filecheck takes a line with COM or RUN before a prefix for a comment"
    if (exact["kind"] == "-EMPTY") == bool(head.body):
        return "EMPTY takes no pattern" if head.body else f"'{head.word}:' has no pattern"
    if UNSUPPORTED_BLOCK.search(head.body):
        return "filecheck has no numeric variables and no @LINE"
    return None


def _misspelling(head: Head, known: list[str]) -> str | None:
    """Judge a first word that is no directive but may be meant as one."""
    word = head.word.upper()
    shape = re.fullmatch(rf"(?P<prefix>[A-Z][A-Z0-9_-]*?)(?P<kind>{KIND})?", word)
    if not shape or not (head.word.isupper() or shape["kind"]):
        return None
    kinds = ("", *(f"-{kind}" for kind in (*KINDS, "COUNT-N")))
    valid = [prefix + kind for prefix in known for kind in kinds]
    near = get_close_matches(word.replace("_", "-"), valid, 1, cutoff=0.8)
    joined = any(re.search(rf"(?:^|[-_]){prefix}(?:[-_]|$)", word) for prefix in known)
    if (near or joined) and (head.colon or "-" in word):
        hint = f"; did you mean '{near[0]}:'?" if near else ""
        return f"'{head.word}' is not a directive{hint}"
    # A bare capitalised word may be prose (`P2: …`, `SPMD: …`) unless IR follows it.
    bare = not re.fullmatch(r"[A-Z]\d+", word) and LOOKS_LIKE_IR.search(head.body)
    capital = head.word.isupper() and word not in NOT_PREFIXES
    if head.colon and capital and (shape["kind"] or bare):
        return _unread(shape["prefix"])
    return None


def _unread(prefix: str) -> str:
    return f"no RUN line's filecheck reads the prefix {prefix}"


def _test_files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_file():
            yield path
            continue
        found = (file for suffix in SUFFIXES for file in path.rglob(f"*{suffix}"))
        yield from sorted(file for file in found if "Inputs" not in file.relative_to(path).parts)


def main(arguments: list[str]) -> int:
    """Lint the files named, or those beside this script; return the exit status."""
    paths = [Path(argument) for argument in arguments] or [Path(__file__).parent]
    missing = [path for path in paths if not path.exists()]
    if missing:
        print(f"no such file or directory: {missing[0]}", file=sys.stderr)
        return 2
    checked = 0
    clean = True
    for path in _test_files(paths):
        checked += 1
        for finding in lint(path.read_text(encoding="utf-8")):
            clean = False
            print(f"{path}:{finding.line}: {finding.message}")
    if clean:
        print(f"{checked} files checked")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
