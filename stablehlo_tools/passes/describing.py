"""Describes a pass and its options, from its module, its class and its fields."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from stablehlo_tools.passes.base import Pass
from stablehlo_tools.passes.registry import NAMED, PASSES, find_pass, unknown_pass

_TYPES = {bool: "a flag", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Option:
    """An option of a pass: the type of its value or its choices, and its default."""

    name: str
    takes: tuple[str, ...]
    is_choice: bool
    is_list: bool
    default: object
    is_needed: bool

    def takes_text(self, mark: str = "") -> str:
        """Returns the accepted values as text: `gpu or tpu`, `a number`; choices between marks."""
        words = (f"{mark}{word}{mark}" if self.is_choice else word for word in self.takes)
        text = " or ".join(words)
        return f"a list, by commas, of: {text}" if self.is_list else text

    def default_text(self, mark: str = "") -> str:
        """Returns the default as text: `0.1`, `on`, `none`, `needed`; values between marks."""
        if self.is_needed:
            return "needed"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        several = self.default if isinstance(self.default, tuple) else (self.default,)
        items: tuple[object, ...] = () if self.default is None else several
        return ",".join(f"{mark}{item}{mark}" for item in items) or "none"


def options_of(kind: type[Pass]) -> Iterator[Option]:
    """Yields the options of a pass, in the order of its fields."""
    hints = typing.get_type_hints(kind)
    for each in dataclasses.fields(kind):
        hint = hints[each.name]
        is_list = typing.get_origin(hint) is tuple
        takes, is_choice = _taken(hint)
        needed = each.default is dataclasses.MISSING
        name = each.name.replace("_", "-")
        yield Option(name, takes, is_choice, is_list, each.default, needed)


def _taken(hint: Any) -> tuple[tuple[str, ...], bool]:
    """Returns the choices of an option, or the name of its type; and True if they are choices."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _taken(next(part for part in inner if part is not types.NoneType))
    if origin is Literal:
        return tuple(map(str, inner)), True
    if origin is tuple:
        return _taken(inner[0])
    return (_TYPES[hint],), False


def describe(name: str = "") -> str:
    """Returns a pass as text, as `described`; without a name, a line for each pass and pipeline.

    Raises ToolError for an unknown name.
    """
    if name:
        return described(name)
    lines = [f"{each}: {summary}" for each, summary in PASSES.items()]
    for each, steps in NAMED.items():
        lines.append(f"{each}: {','.join(step.text for step in steps)}")
    return "\n".join(lines)


def described(name: str) -> str:
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
