"""Shapes as HLO text prints them: `f32[8,128]{1,0:T(8,128)(2,1)S(1)}`, and tuples of such.

Pure Python. Source: openxla.org/xla/shapes and openxla.org/xla/tiled_layout.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from functools import cached_property

DEVICE_MEMORY = 0  # the memory space of a layout that names none
HOST_MEMORY = 5
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_TILES = re.compile(r"T((?:\([^)]*\))+)")
_SPACE = re.compile(r"S\((\d+)\)")
_BITS = re.compile(r"\d+")
COMMENT = re.compile(r"/\*.*?\*/")
_PUNCTUATION = re.compile(r"[(){}\[\],]")
_BRACKET = re.compile(r"[(){}]")

_STABLEHLO_TYPES = {
    "pred": "i1",
    **{f"s{bits}": f"i{bits}" for bits in (2, 4, 8, 16, 32, 64)},
    **{f"u{bits}": f"ui{bits}" for bits in (2, 4, 8, 16, 32, 64)},
    "c64": "complex<f32>",
    "c128": "complex<f64>",
}


@dataclass(frozen=True)
class Array:
    """An array: its element type in HLO's spelling, dimensions, layout and memory space.

    `minor_to_major` is empty if the text has no layout. `tiles` are those of a TPU's layout.
    """

    element_type: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    space: int = DEVICE_MEMORY

    @cached_property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.dims)

    @cached_property
    def bits(self) -> int:
        """The bits of an element; 0 for a token."""
        bits = _BITS.search(self.element_type)
        return 8 if self.element_type == "pred" else int(bits.group()) if bits else 0

    @cached_property
    def bytes(self) -> int:
        """The bytes of all elements without padding."""
        return -(-self.elements * self.bits // 8)

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """The dimensions from major to minor, the last ones padded to whole tiles."""
        dims = [self.dims[d] for d in reversed(self.minor_to_major)] or list(self.dims)
        tile = self.tiles[0] if self.tiles else ()
        dims = [1] * (len(tile) - len(dims)) + dims
        for place, size in enumerate(reversed(tile), 1):
            dims[-place] = -(-dims[-place] // size) * size
        return tuple(dims)

    @cached_property
    def padded_bytes(self) -> int:
        """The bytes in memory, including padding."""
        return -(-math.prod(self.padded) * self.bits // 8)


@dataclass(frozen=True, slots=True)
class TupleShape:
    """A tuple of shapes."""

    elements: tuple[Shape, ...]


type Shape = Array | TupleShape


@functools.cache
def parse_shape(text: str) -> Shape:
    """Parses a shape as HLO prints it. Raises ValueError if the text is not a shape."""
    if text.startswith("("):
        return TupleShape(tuple(parse_shape(element) for element in split_tuple(text)))
    array = _ARRAY.match(text)
    if array is None:
        raise ValueError(f"not a shape: {text!r}")
    element_type, dims, order, rest = array.groups()
    tiles = _TILES.search(rest or "")
    space = _SPACE.search(rest or "")
    return Array(
        element_type,
        tuple(int(re.sub(r"\D", "", size)) for size in dims.split(",") if size),
        tuple(int(d) for d in (order or "").split(",") if d),
        tuple(
            tuple(int(size) if size.strip().isdigit() else 1 for size in tile.split(","))
            for tile in (tiles[1].strip("()").split(")(") if tiles else ())
        ),  # `(8,128)(2,1)`; a `*`, which merges a dimension with the next, counts as 1
        int(space.group(1)) if space else DEVICE_MEMORY,
    )


def split_tuple(shape: str) -> list[str]:
    """Returns the elements of a tuple shape as printed; of any other shape, itself alone."""
    if not shape.startswith("("):
        return [shape]
    return split_list(COMMENT.sub("", shape[1 : closing_bracket(shape, 0)]))


def split_list(text: str) -> list[str]:
    """Splits at the commas outside brackets, and drops an empty last part."""
    parts: list[str] = []
    depth = begin = 0
    for found in _PUNCTUATION.finditer(text):
        if found[0] != ",":
            depth += 1 if found[0] in "({[" else -1
        elif not depth:
            parts.append(text[begin : found.start()].strip())
            begin = found.end()
    last = text[begin:].strip()
    return [*parts, last] if last else parts


def closing_bracket(text: str, at: int) -> int | None:
    """Returns the position where the bracket that opens at `at` closes; None if it does not."""
    depth = 0
    for found in _BRACKET.finditer(text, at):
        depth += 1 if found[0] in "({" else -1
        if not depth:
            return found.start()
    return None


def arrays(shape: Shape) -> tuple[Array, ...]:
    """Returns the arrays in a shape, with tuples flattened."""
    if isinstance(shape, Array):
        return (shape,)
    return tuple(array for element in shape.elements for array in arrays(element))


def stablehlo_type(element_type: str) -> str:
    """Returns StableHLO's name of an HLO element type: `s32` is `i32`, `f8e4m3fn` is `f8E4M3FN`."""
    if element_type in _STABLEHLO_TYPES:
        return _STABLEHLO_TYPES[element_type]
    small_float = element_type[0] == "f" and "e" in element_type
    return "f" + element_type[1:].upper() if small_float else element_type
