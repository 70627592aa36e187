"""Reads the numbers of a constant of floats, complex or quantized numbers, of any element type.

NumPy reads few of MLIR's element types from an attribute, so the attribute's text is parsed.
"""

from __future__ import annotations

import re

import numpy as np

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.verify.element_types import Array, element_type

_DENSE = re.compile(r'value = dense<("0x[0-9A-Fa-f]*"|[^>]*)>')
_QUANTIZED = re.compile(r"!quant\.uniform<\w+(?:<.*?>)?:\w+, ([-+.e\d]+)(?::(-?\d+))?>")


class UnmappedError(ToolError):
    """An op that has no form in the field; programs with it are compared in floats."""


def elements_of(op: ir.Operation, type_: ir.RankedTensorType | None = None) -> Array:
    """Returns the numbers of a constant as float64 or complex128; only one if all are the same.

    `type_` is the type of the constant before the mapping."""
    type_ = type_ or ir.RankedTensorType(op.results[0].type)
    name = str(type_.element_type)
    found = _DENSE.search(str(op.get_asm(print_generic_op_form=True, large_elements_limit=None)))
    assert found is not None, "a dense constant"
    body = found[1]
    if name.startswith("!quant."):
        parts = _QUANTIZED.fullmatch(name)
        words = re.findall(r"-?\d+", body)
        if parts is None:  # with a scale for each channel
            raise UnmappedError(f"constants of {name}")
        return (np.array(list(map(int, words)), np.float64) - int(parts[2] or 0)) * float(parts[1])
    element = element_type(name)
    assert element is not None, name
    numbers = _parse(body, element.dtype)
    return numbers.reshape(type_.shape) if numbers.size > 1 else numbers


def _parse(body: str, dtype: np.dtype) -> Array:
    """Parses numbers as MLIR prints them: a string of all bytes, or words.

    A word is a decimal number, or a bit pattern if it has no decimal form."""
    wide = np.complex128 if dtype.kind == "c" else np.float64
    if body.startswith('"'):
        return np.frombuffer(bytes.fromhex(body[3:-1]), dtype).astype(wide)
    part = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype

    def number(word: str) -> float:
        if word.startswith("0x"):
            pattern = np.array([int(word, 16)], f"u{part.itemsize}")
            return float(pattern.view(part)[0].astype(np.float64))
        return float(np.float64(word).astype(part).astype(np.float64))

    numbers = np.array([number(word) for word in re.findall(r"[^\[\](),\s]+", body)])
    return numbers.view(np.complex128) if dtype.kind == "c" else numbers
