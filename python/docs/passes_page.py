"""The pages of the passes, from the docstrings and options of the passes."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Sequence

from stablehlo_tools.passes.base import Pass, options_of
from stablehlo_tools.passes.registry import NAMED, PASSES, NamedStep, find_pass

INDEX = """# Passes

A pipeline is `pass,pass{option=value other=value}`, or the name of a pipeline below. A flag is on
when it is named, and takes `=false`. Passes that MLIR, Shardy and StableHLO register in C++ run by
their own names among these: `cse`, `canonicalize`, `symbol-dce`, `sdy-*`, `stablehlo-*`.
[`opt`](../commands/opt.md) runs a pipeline, and [`optimize`](../commands/optimize.md) finds one.
"""
SKETCHES = "<!-- snippet: sketches: the rewrite, in shortened IR; the lit tests run it -->\n"
FOLDER = "reference/passes"
ARROW = "==>"
NUMBERED = re.compile(r" {2}(P\d+) {2}(\S.*)")


def pages() -> Iterator[tuple[str, str]]:
    """The page of each pass, and that of all of them."""
    lines = [f"- [`{name}`]({name}.md): {_summary(name)}" for name in PASSES]
    pipelines = [_pipeline_section(name, steps) for name, steps in NAMED.items()]
    index = "\n".join([INDEX, *lines, "", "## Named pipelines", "", *pipelines])
    yield f"{FOLDER}/index.md", index
    for name in PASSES:
        yield f"{FOLDER}/{name}.md", _pass_page(name)


def _kind(name: str) -> type[Pass]:
    kind = find_pass(name)
    assert kind is not None, "PASSES has Python passes only"
    return kind


def _docstring(name: str) -> str:
    return inspect.getdoc(sys.modules[_kind(name).__module__]) or ""


def _summary(name: str) -> str:
    """The first sentence of its docstring, which begins with a verb."""
    first = " ".join(_docstring(name).partition("\n\n")[0].split())
    return first[0].lower() + first[1:]


def _pass_page(name: str) -> str:
    lines = [f"# {name}", "", SKETCHES, *_as_markdown(_docstring(name))]
    rows = list(_option_rows(_kind(name)))
    if rows:
        described = inspect.getdoc(_kind(name)) or ""
        lines += ["", "## Options", "", *_as_markdown(described), ""]
        lines += ["| option | takes | default |", "|---|---|---|", *rows]
    return "\n".join([*lines, "", ""])


def _as_markdown(docstring: str) -> Iterator[str]:
    """The lines of a docstring, numbered preconditions as a list; indented IR is code already."""
    in_list = False
    for line in docstring.splitlines():
        numbered = NUMBERED.fullmatch(line)
        if line.strip() == ARROW:  # between two pieces of code, and so code itself
            yield f"    {ARROW}"
        elif numbered:
            if not in_list:
                yield ""
            in_list = True
            yield f"- **{numbered[1]}** {numbered[2]}"
        elif in_list and line.strip():
            yield f"  {line.strip()}"
        else:
            in_list = False
            yield line


def _option_rows(kind: type[Pass]) -> Iterator[str]:
    for option in options_of(kind):
        yield f"| `{option.name}` | {option.takes_text('`')} | {option.default_text('`')} |"


def _pipeline_section(name: str, steps: Sequence[NamedStep]) -> str:
    numbered = [f"{i}. `{step.text}`: {step.reason}" for i, step in enumerate(steps, start=1)]
    options = [
        f"`{', '.join(step.takes)}` {'goes' if len(step.takes) == 1 else 'go'} to `{step.text}`"
        for step in steps
        if step.takes
    ]
    told = ["", f"Options: {'; '.join(options)}."] if options else []
    return "\n".join([f"### {name}", "", *numbered, *told, ""])
