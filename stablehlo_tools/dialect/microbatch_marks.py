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

A microbatch may sort its own rows. The ops that depend on their order have an attribute,
`stablehlo_tools.rows`: the dimension of the rows in each operand, then in each result; -1 without
rows. On a microbatch they are the same ops. `transforms/parts/routing.py` writes and drops it:

    %p = custom_call @stablehlo_tools.places(%keys) {rows = [0, 0]}     iota, for the rows there are
    %k, %order = sort(%keys, %p) {rows = [0, 0, 0, 0]}
"""

from __future__ import annotations

from enum import StrEnum

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import called_target

_PREFIX = "stablehlo_tools."
ROWS, PLACES = f"{_PREFIX}rows", f"{_PREFIX}places"


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
