"""The element types of artifacts: their MLIR names and NumPy dtypes.

Pure NumPy and ml_dtypes. Two-, four- and six-bit types are stored one to a byte.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class ElementKind(enum.Enum):
    """The kind of values of an element type."""

    BOOLEAN = "boolean"
    SIGNED = "signed"
    UNSIGNED = "unsigned"
    FLOAT = "float"
    COMPLEX = "complex"


@dataclass(frozen=True)
class ElementType:
    """An element type: `f32`, `ui4`, `complex<f64>` …; `bits` is its width without padding."""

    name: str
    dtype: np.dtype[Any]
    kind: ElementKind
    bits: int

    @property
    def is_inexact(self) -> bool:
        """True if its arithmetic rounds."""
        return self.kind in (ElementKind.FLOAT, ElementKind.COMPLEX)


def element_type(name: str) -> ElementType | None:
    """Returns the element type that MLIR spells `name`, or None if NumPy cannot hold it."""
    return _BY_NAME.get(name)


def from_dtype(dtype: np.dtype[Any]) -> ElementType | None:
    """Returns the element type of a NumPy dtype, or None if there is none."""
    return _BY_DTYPE.get(dtype)


def real_part(element: ElementType) -> ElementType:
    """Returns `f32` for `complex<f32>`, and any other element type unchanged."""
    return _BY_NAME[element.name.removeprefix("complex<").removesuffix(">")]


def to_bits(values: Array, element: ElementType) -> Array:
    """Returns bit patterns as unsigned integers without padding; complex adds a dimension of 2."""
    if element.kind is ElementKind.COMPLEX:
        part = real_part(element)
        pairs = np.ascontiguousarray(values).view(part.dtype)
        return to_bits(pairs.reshape(*values.shape, 2), part)
    bits = np.ascontiguousarray(values).view(f"u{element.dtype.itemsize}").reshape(values.shape)
    padding = 8 * element.dtype.itemsize - element.bits
    return bits & np.array((1 << element.bits) - 1, bits.dtype) if padding else bits


def from_bits(bits: Array, element: ElementType) -> Array:
    """Inverts `to_bits` for types that are not complex; extends the sign of narrow integers."""
    if element.kind is ElementKind.SIGNED and element.bits < 8:
        sign = 1 << (element.bits - 1)
        return ((bits.astype(np.int8) ^ sign) - sign).astype(element.dtype)
    return bits.view(element.dtype)


_FLOATS = {
    "f64": (np.float64, 64),
    "f32": (np.float32, 32),
    "f16": (np.float16, 16),
    "bf16": (ml_dtypes.bfloat16, 16),
    "f8E3M4": (ml_dtypes.float8_e3m4, 8),
    "f8E4M3": (ml_dtypes.float8_e4m3, 8),
    "f8E4M3FN": (ml_dtypes.float8_e4m3fn, 8),
    "f8E4M3FNUZ": (ml_dtypes.float8_e4m3fnuz, 8),
    "f8E4M3B11FNUZ": (ml_dtypes.float8_e4m3b11fnuz, 8),
    "f8E5M2": (ml_dtypes.float8_e5m2, 8),
    "f8E5M2FNUZ": (ml_dtypes.float8_e5m2fnuz, 8),
    "f8E8M0FNU": (ml_dtypes.float8_e8m0fnu, 8),
    "f6E2M3FN": (ml_dtypes.float6_e2m3fn, 6),
    "f6E3M2FN": (ml_dtypes.float6_e3m2fn, 6),
    "f4E2M1FN": (ml_dtypes.float4_e2m1fn, 4),
}
_ALL = (
    ElementType("i1", np.dtype(np.bool_), ElementKind.BOOLEAN, 8),
    *(  # ml_dtypes registers the names of those of less than 8 bits
        ElementType(f"{sign}i{width}", np.dtype(f"{sign}int{width}"), kind, width)
        for width in (2, 4, 8, 16, 32, 64)
        for sign, kind in (("", ElementKind.SIGNED), ("u", ElementKind.UNSIGNED))
    ),
    *(
        ElementType(name, np.dtype(type_), ElementKind.FLOAT, bits)
        for name, (type_, bits) in _FLOATS.items()
    ),
    ElementType("complex<f32>", np.dtype(np.complex64), ElementKind.COMPLEX, 64),
    ElementType("complex<f64>", np.dtype(np.complex128), ElementKind.COMPLEX, 128),
)
_BY_NAME = {element.name: element for element in _ALL}
_BY_DTYPE = {element.dtype: element for element in _ALL}
