"""Integers that a compiler knows before the run: of constants, and of what identities make one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from stablehlo_tools.analysis.device_values import COMPUTED, Values, element_dtype, evaluated
from stablehlo_tools.analysis.loops import comparison_direction
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.integer_arithmetic import HOLD_OF_EQUALS
from stablehlo_tools.dialect.reducers import absorbing_integer
from stablehlo_tools.ir.values import producer

_DEEPEST = 16  # ops from a value to its constants
_LARGEST = 1 << 16  # elements
_MOST = 64  # ops looked at, for one value
_RIGHT = frozenset({"power", "remainder"})  # only the operand on the right decides


def folded(value: ir.Value) -> Values | None:
    """The integers or booleans that a value surely is, in its shape; None where that is unknown."""
    known = _Folding().of(value, 0)
    return None if known is None else known[0]


class _Folding:
    """Computes values as `device_arithmetic` does: with a leading dimension, here of size 1."""

    def __init__(self) -> None:
        self.left = _MOST

    def of(self, value: ir.Value, depth: int) -> Values | None:
        op, dtype = producer(value), element_dtype(value.type)
        self.left -= 1
        if op is None or dtype is None or depth > _DEEPEST or self.left < 0:
            return None
        shape = ir.RankedTensorType(value.type).shape
        if math.prod(shape) > _LARGEST:
            return None
        number = self._decided(op, dtype, depth + 1)
        if number is not None:
            return np.broadcast_to(np.array(number, dtype), (1, *shape))
        if op.name not in COMPUTED:
            return None
        return evaluated(op, (self.of(operand, depth + 1) for operand in op.operands))

    def _decided(self, op: ir.Operation, dtype: np.dtype[Any], depth: int) -> int | None:
        """The number that every element is, whatever some of the operands are."""
        name = op.name.removeprefix("stablehlo.")
        if name == "compare":
            one, other = op.operands
            if one != other or element_dtype(one.type) is None:
                return None
            return int(comparison_direction(op) in HOLD_OF_EQUALS)
        if name in ("subtract", "xor"):
            return 0 if op.operands[0] == op.operands[1] else None
        if name == "clamp":
            low, high = (self._splat(op.operands[i], depth) for i in (0, 2))
            return low if low == high else None
        width = 1 if dtype.kind == "b" else 8 * dtype.itemsize
        known = absorbing_integer(name, width, signed=dtype.kind == "i")
        if known is None:
            return None
        absorbing, result = known
        operands = list(op.operands)[1:] if name in _RIGHT else list(op.operands)
        is_decided = any(self._splat(operand, depth) == absorbing for operand in operands)
        return result if is_decided else None

    def _splat(self, value: ir.Value, depth: int) -> int | None:
        known = self.of(value, depth)
        is_splat = known is not None and known.size and (known == known.flat[0]).all()
        return int(known.flat[0]) if known is not None and is_splat else None
