"""Describes a pass and its options, from its module, its class and its fields."""

from __future__ import annotations

import inspect
import sys

from stablehlo_tools.passes.base import options_of
from stablehlo_tools.passes.registry import NAMED, PASSES, find_pass, unknown_pass


def describe(name: str = "") -> str:
    """Returns a pass as text, as `describe_pass`; without a name, a line for each of them.

    Raises ToolError for an unknown name.
    """
    if name:
        return describe_pass(name)
    lines = [f"{each}: {summary}" for each, summary in PASSES.items()]
    for each, steps in NAMED.items():
        lines.append(f"{each}: {','.join(step.text for step in steps)}")
    return "\n".join(lines)


def describe_pass(name: str) -> str:
    """Returns a pass as text: semantics, preconditions, and options with type and default.

    Raises ToolError for an unknown name.
    """
    if name in NAMED:
        steps = [f"  {step.text}: {step.reason}" for step in NAMED[name]]
        return "\n".join([f"{name}, a named pipeline:", *steps])
    kind = find_pass(name)
    if kind is None:
        raise unknown_pass(name)
    module = sys.modules[kind.__module__]
    lines = [f"{name}: {PASSES[name]}", "", inspect.getdoc(module) or ""]
    options = list(options_of(kind))
    if options:
        lines += ["", "Options:", "", inspect.getdoc(kind) or "", ""]
        width = max(len(option.name) for option in options)
        for option in options:
            default = "" if option.is_needed else "default "
            takes = f"{option.takes_text()}, {default}{option.default_text()}"
            lines.append(f"  {option.name:{width}}  {takes}")
    return "\n".join(lines)
