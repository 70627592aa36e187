"""Every command and snippet of README and docs does what the page says, or says why it is not run.

How a page says so: python/docs/snippets.py. Slow ones, and all of their page, run with -m soak.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import forked_commands
import pytest
from docs.running import MismatchError, Runner, agrees, environment
from docs.snippets import Kind, Snippet, commands_of, snippets_of
from forked_process import MODULES_FOR_ARTIFACTS

from stablehlo_tools.cli.commands import COMMANDS
from stablehlo_tools.cli.parsers import parser_of

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def runs(snippet: Snippet) -> bool:
    return snippet.kind not in (Kind.SHOWN, Kind.SYNOPSIS)


# Five seconds of CPU each, or more, with commands that other pages have, too.
LONG = {
    "docs/concepts/exposure.md",
    "docs/how/faster.md",
    "docs/how/fit.md",
    "docs/how/hang.md",
    "docs/how/pipeline.md",
    "docs/how/test.md",
    "docs/how/where-time-goes.md",
    "docs/reference/commands/check-order.md",
    "docs/reference/passes/accumulate-gradients.md",
    "docs/reference/passes/pipeline-collectives.md",
    "docs/reference/passes/schedule-overlap.md",
}
FAST = [
    pytest.param(page, marks=pytest.mark.soak if named(page) in LONG else ())
    for page in PAGES
    if any(runs(s) and not s.slow for s in snippets_of(page))
]
SLOW = [page for page in PAGES if any(runs(s) and s.slow for s in snippets_of(page))]


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose `python` and `stablehlo-tools` start loaded, as those of lit runs do."""
    found = environment(tmp_path_factory.mktemp("cache"))
    # Nearly all of them work on artifacts.
    forked_commands.start(found, more={"stablehlo-tools": MODULES_FOR_ARTIFACTS})
    return found


def run_page(
    page: Path, folder: Path, environment: dict[str, str], snippets: Iterator[Snippet]
) -> None:
    runner = Runner(named(page), folder, environment)
    try:
        for snippet in snippets:
            runner.run(snippet)
    finally:
        runner.close()


@pytest.mark.parametrize("page", FAST, ids=named)
def test_page_prints_what_it_says(page: Path, tmp_path: Path, commands: dict[str, str]) -> None:
    run_page(page, tmp_path, commands, (each for each in snippets_of(page) if not each.slow))


@pytest.mark.soak
@pytest.mark.parametrize("page", SLOW, ids=named)
def test_slow_page_prints_what_it_says(
    page: Path, tmp_path: Path, commands: dict[str, str]
) -> None:
    run_page(page, tmp_path, commands, iter(snippets_of(page)))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_snippet_is_accounted_for(page: Path) -> None:
    left = [f"{named(page)}:{s.line}" for s in snippets_of(page) if not s.accounted_for]
    assert not left, "neither run nor marked with a reason; python/docs/snippets.py says how"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_options_are_those_of_the_command(page: Path) -> None:
    for snippet in snippets_of(page):
        for words in _command_lines(snippet):
            command = words[1]
            assert command in COMMANDS, f"{named(page)}:{snippet.line}: {command}"
            known = parser_of([command])[1][command]._option_string_actions
            wrong = [each for each in OPTION.findall(" ".join(words)) if each not in known]
            assert not wrong, f"{named(page)}:{snippet.line}: {command} has no {', '.join(wrong)}"


def _command_lines(snippet: Snippet) -> Iterator[list[str]]:
    """The words of each `stablehlo-tools COMMAND …` of a snippet, what is run and what is not."""
    if snippet.kind is Kind.SYNOPSIS:
        yield snippet.text.split()
    elif snippet.text.startswith("$ "):
        for command in commands_of(snippet):
            words = shlex.split(command.words, comments=True)
            if len(words) > 1 and words[0] == "stablehlo-tools" and not words[1].startswith("-"):
                own = words.index("|") if "|" in words else len(words)
                yield words[: words.index("--train") if "--train" in words else own]


def test_the_example_of_the_pages_is_the_file() -> None:
    shown = [s for s in snippets_of(ROOT / "docs/how/export.md") if s.title == "export_step.py"]
    assert [each.text for each in shown] == [
        (ROOT / "python/examples/export_step.py").read_text(encoding="utf-8")
    ]


def page_of(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_wrong_output_is_found(tmp_path: Path) -> None:
    page = page_of(tmp_path, "```console\n$ echo one; echo two\none\nthree\n```\n")
    with pytest.raises(MismatchError, match=r"page.md:2: echo one(.|\n)*three(.|\n)*two"):
        _run_all(page, tmp_path / "run")


def test_a_failing_command_is_found_though_its_output_is_left_out(tmp_path: Path) -> None:
    page = page_of(tmp_path, "    $ cat missing; exit 2\n    …\n")
    with pytest.raises(MismatchError, match="exit code 2"):
        _run_all(page, tmp_path / "run")


def test_a_page_runs_in_order_and_keeps_its_names_and_files(tmp_path: Path) -> None:
    text = """
```python title="inputs/one.py"
print(1)
```

```python
x = 20
```

```pycon
>>> x + 1
21
>>> raise ValueError("no")
ValueError: no
```

<!-- snippet: before: echo 5 > five -->
Text.

    $ python inputs/one.py && cat five
    1
    …
"""
    _run_all(page_of(tmp_path, text), tmp_path / "run")


def test_a_wrong_session_is_found(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"page.md:4: 1 \+ 1"):
        _run_all(page_of(tmp_path, "\n\n```pycon\n>>> 1 + 1\n3\n```\n"), tmp_path / "run")


def _run_all(page: Path, folder: Path) -> None:
    folder.mkdir()
    runner = Runner(page.name, folder, environment(folder))
    try:
        for snippet in snippets_of(page):
            runner.run(snippet)
    finally:
        runner.close()


def test_marks_say_what_is_not_run(tmp_path: Path) -> None:
    text = """# Page
<!-- snippet: sketches: drawn -->

    a sketch

<!-- snippet: not run: takes
a week -->

    $ sleep 604800

<!-- snippet: slow -->

    $ sleep 60

- a list

    and its second paragraph

```console
$ true
```
"""
    found = snippets_of(page_of(tmp_path, text))
    assert [(s.kind, s.reason, s.slow) for s in found] == [
        (Kind.SHOWN, "drawn", False),
        (Kind.SHOWN, "takes a week", False),
        (Kind.CONSOLE, "", True),
        (Kind.CONSOLE, "", False),
    ]


def test_a_block_without_a_mark_is_not_accounted_for(tmp_path: Path) -> None:
    (snippet,) = snippets_of(page_of(tmp_path, "Text.\n\n    drawn\n"))
    assert not snippet.accounted_for


def test_an_unknown_mark_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sloow"):
        snippets_of(page_of(tmp_path, "<!-- snippet: sloow -->\n\n    $ true\n"))


def test_times_and_versions_are_not_compared() -> None:
    assert agrees(["jax 0.12.0 took 1.5 s"], ["jax 0.13.1 took 20 s"])
    assert not agrees(["took 1.5 ms"], ["took 1.6 ms"])
    assert agrees(["a", "…", "z"], ["a", "b", "c", "z"])
    assert not agrees(["a", "…", "z"], ["a", "b", "c"])
    assert agrees(["x … z"], ["x anything z", ""])
