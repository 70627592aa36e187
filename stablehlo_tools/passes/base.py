"""Defines the base class of passes: frozen dataclasses whose fields are the options."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.passes.road import Milestone


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
