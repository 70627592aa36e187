"""Defines the base class of passes: frozen dataclasses whose fields are the options.

The types of the fields are bool, int, float, str, Literal of text, or tuples of these; `| None` if
the default is None.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.passes.road import Milestone

_TYPES = {bool: "a flag", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Pass(ABC):
    """One rewrite of a module. Subclasses are frozen dataclasses; their fields are the options."""

    name: ClassVar[str]
    milestone: ClassVar[Milestone | None] = None  # its stage in the search of `optimize`

    @abstractmethod
    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place. Raises ToolError, and may then leave it half-rewritten."""

    @classmethod
    def done_elsewhere(cls, options: Mapping[str, str], option: str) -> tuple[str, str] | None:
        """Returns the message and the command for an option's value that another command handles.

        `options` are the other options. Returns None if no command handles it.
        """
        del options, option
        return None

    def __str__(self) -> str:
        """Returns the pass as pipeline text, with the options that differ from their defaults."""
        texts = [
            _option_text(option.name, getattr(self, option.name))
            for option in dataclasses.fields(self)
            if getattr(self, option.name) != option.default
        ]
        return self.name + ("{" + " ".join(texts) + "}" if texts else "")


def _option_text(name: str, value: object) -> str:
    name = name.replace("_", "-")
    if value is True:
        return name
    if value is False:
        return f"{name}=false"
    if isinstance(value, tuple):
        return f"{name}={','.join(str(item) for item in value)}"  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    return f"{name}={value}"


@dataclass(frozen=True)
class Option:
    """An option of a pass: the type of its value or of its items, choices if any, and default."""

    attribute: str
    kind: type
    choices: tuple[str, ...]
    is_list: bool
    default: object

    @property
    def name(self) -> str:
        """The name in pipeline text."""
        return self.attribute.replace("_", "-")

    @property
    def is_needed(self) -> bool:
        """True if it has no default."""
        return self.default is dataclasses.MISSING

    def takes_text(self, mark: str = "") -> str:
        """Returns the accepted values as text: `gpu or tpu`, `a number`; choices between marks."""
        words = (f"{mark}{choice}{mark}" for choice in self.choices)
        text = " or ".join(words) or _TYPES[self.kind]
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

    def parse(self, text: str | None) -> Any:
        """Returns the value that a text stands for; the text of a flag may be None.

        Raises ValueError that continues "option NAME" and says what is accepted.
        """
        if self.kind is bool:
            values = {None: True, "true": True, "false": False}
            if text not in values:
                raise ValueError(f"takes true or false, not {text!r}")
            return values[text]
        if text is None:
            raise ValueError("needs a value")
        if self.is_list:
            return tuple(map(self._parse_item, text.split(",")))
        return self._parse_item(text)

    def _parse_item(self, text: str) -> Any:
        if self.choices and text not in self.choices:
            raise ValueError(f"takes {' or '.join(self.choices)}, not {text!r}")
        try:
            return self.kind(text)
        except ValueError:
            raise ValueError(f"takes {_TYPES[self.kind]}, not {text!r}") from None


def options_of(pass_class: type[Pass]) -> Iterator[Option]:
    """Yields the options of a pass, in the order of its fields."""
    hints = typing.get_type_hints(pass_class)
    for field in dataclasses.fields(pass_class):
        hint = hints[field.name]
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
        is_list = typing.get_origin(hint) is tuple
        hint = typing.get_args(hint)[0] if is_list else hint
        is_choice = typing.get_origin(hint) is Literal
        choices = tuple(map(str, typing.get_args(hint))) if is_choice else ()
        kind = str if is_choice else hint
        yield Option(field.name, kind, choices, is_list, field.default)
