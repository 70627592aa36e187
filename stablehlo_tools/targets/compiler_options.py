"""Options of XLA's compilers for one compilation, as `jax.jit` accepts them. Pure Python.

    jax.jit(f, compiler_options={"xla_gpu_all_gather_combine_threshold_bytes": 0})

They belong to a compilation, not to an artifact: a program does not contain them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stablehlo_tools.diagnostics import ToolError

type Value = bool | int | float | str

_NAME = re.compile(r"(?:xla|megascale|barna|jf)_\w+")
_SLOTS = "xla_gpu_experimental_parallel_collective_overlap_limit"
_MULTI_STREAMING = "xla_gpu_experimental_enable_collective_multi_streaming"


@dataclass(frozen=True)
class CompilerOptions:
    """Names and values, each name once, sorted."""

    values: tuple[tuple[str, Value], ...] = ()

    @staticmethod
    def parse(texts: Iterable[str]) -> CompilerOptions:
        """Parses texts `NAME=VALUE`. Raises ToolError for any other form and a repeated name.

        Unknown names and invalid values are only reported by XLA, when it compiles.
        """
        values: dict[str, Value] = {}
        for text in texts:
            name, equals, value = text.strip().removeprefix("--").partition("=")
            if not equals or not value or not _NAME.fullmatch(name):
                raise ToolError(
                    f"{text!r} is not a compiler option: expected NAME=VALUE, such as {_SLOTS}=2"
                )
            if name in values:
                raise ToolError(f"compiler option {name} is given twice")
            values[name] = _value(value)
        return CompilerOptions(tuple(sorted(values.items())))

    @staticmethod
    def from_values(values: Mapping[str, Value]) -> CompilerOptions:
        """Makes options of names and values, as for jax.jit. Raises ToolError as `parse` does."""
        return CompilerOptions.parse(f"{name}={_text(value)}" for name, value in values.items())

    def __or__(self, other: CompilerOptions) -> CompilerOptions:
        """Returns the options of both; those of `other` override."""
        return CompilerOptions(tuple(sorted({**dict(self.values), **dict(other.values)}.items())))

    def texts(self) -> tuple[str, ...]:
        """The options as texts `NAME=VALUE`, for `parse`."""
        return tuple(f"{name}={_text(value)}" for name, value in self.values)

    def __str__(self) -> str:
        return ", ".join(self.texts())

    @property
    def one_stream(self) -> bool:
        """True if XLA:GPU runs collectives that are in flight together one after the other.

        Its scheduler counts slots, but its runtime uses one stream for each communication domain,
        unless multi-streaming is set.
        """
        values = dict(self.values)
        return int(values.get(_SLOTS, 1)) > 1 and values.get(_MULTI_STREAMING) is not True


NO_OPTIONS = CompilerOptions()


def _value(text: str) -> Value:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
