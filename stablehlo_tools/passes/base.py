"""Defines the base class of passes: frozen dataclasses whose fields are the options.

The types of the fields are bool, int, float, str, Literal of text, or tuples of these; `| None` if
the default is None.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics

_TYPES = {bool: "a flag", int: "a whole number", float: "a number", str: "text"}

# A pass joins the search of `optimize` by one declaration in its class:
#     milestone: ClassVar = Milestone(RoadStage.SPLIT, ("parts=2", "parts=4"))
# The search uses at most one choice of each stage, in the order of the stages. It fills in the
# options that depend on the machine (`hardware`, `memory-limit`).


class RoadStage(enum.IntEnum):
    """The stages of the search, in order. Numbers leave room for others between them."""

    FOLD = 10  # global view: a program that is pipelined already becomes a loop
    MICROBATCHES = 20  # global view: less memory
    STATE = 25  # global view: the sharding of an optimizer's state
    PIPELINE = 30  # global view: layers over a mesh axis, before the loop over them is cut
    CONSTRAINTS = 35  # global view: shardings that a partitioner would have to guess
    PARTITION = 40  # makes collectives explicit, which all later stages rewrite
    RECOMPUTE = 45  # the residuals to keep, now that times and bytes are those of a device
    SMALLER = 50  # collectives that move less
    HIERARCHY = 60  # collectives over fewer devices each
    SPLIT = 80  # independent parts: the compute of one hides collectives of another
    LOOPS = 90  # collectives in another iteration than their own
    MERGE = 100  # fewer and larger collectives, after the stages that move them
    HOLD = 102  # sums that a compiler would move and join stay in place
    LINKS = 105  # collectives of several links in flight together
    ORDER = 110  # the order of issue: last, as other passes would undo it


class When(enum.Enum):
    """The programs for which a stage is tried."""

    ALWAYS = "always"
    TOO_LARGE = "if the export does not fit the device's memory"
    ASKED = "if a mesh axis is given for it"


@dataclass(frozen=True)
class Milestone:
    """The stage of a pass in the search, and the options to try.

    `options`: texts of options in pipeline syntax, "" for none. `{axis}` in one is replaced by the
    mesh axis that is free for a pipeline. `slow`: further options that take about as long as a
    compilation, and are tried after the first candidates have been compiled.
    """

    stage: RoadStage
    options: tuple[str, ...] = ("",)
    when: When = When.ALWAYS
    slow: tuple[str, ...] = ()


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
        return f"a comma-separated list of: {text}" if self.is_list else text

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
                raise ValueError(f"must be true or false, not {text!r}")
            return values[text]
        if text is None:
            raise ValueError("needs a value")
        if self.is_list:
            return tuple(map(self._parse_item, text.split(",")))
        return self._parse_item(text)

    def _parse_item(self, text: str) -> Any:
        if self.choices and text not in self.choices:
            raise ValueError(f"must be {' or '.join(self.choices)}, not {text!r}")
        try:
            return self.kind(text)
        except ValueError:
            raise ValueError(f"must be {_TYPES[self.kind]}, not {text!r}") from None


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
