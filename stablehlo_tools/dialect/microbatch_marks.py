"""Marks on values that each microbatch computes for itself, as custom calls.

    %m = custom_call @stablehlo_tools.estimate(%sum)   a sum over the batch, by this microbatch
    %t = custom_call @stablehlo_tools.mean(%loss)      this microbatch's share of a mean
    %r = custom_call @stablehlo_tools.each(%m)         a row for each microbatch: [parts, …]
    %m = custom_call @stablehlo_tools.own(%r)          the row of this microbatch

`transforms/parts/per_microbatch.py` inserts them; the writer of a microbatch replaces them:

              on a microbatch           on the whole batch
    estimate  operand * microbatches    operand
    mean      operand / microbatches    operand
    each      one row                   the same row for each microbatch
    own       the row                   the first row
"""

from __future__ import annotations

from enum import StrEnum

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import called_target

_PREFIX = "stablehlo_tools."


class Mark(StrEnum):
    """The kind of a mark."""

    ESTIMATE = f"{_PREFIX}estimate"
    MEAN = f"{_PREFIX}mean"
    EACH = f"{_PREFIX}each"
    OWN = f"{_PREFIX}own"


_MARKS = frozenset(Mark)


def mark_of(op: ir.Operation) -> Mark | None:
    """Returns the mark that an op is; None for other ops."""
    target = called_target(op)
    return Mark(target) if target in _MARKS else None
