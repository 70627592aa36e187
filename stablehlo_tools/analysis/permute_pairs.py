"""Reads the pairs of a collective_permute, and analyses them as a graph with cycles.

Every id is the source of at most one pair and the target of at most one. So each component of the
graph is a chain or a cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stablehlo_tools.analysis.collectives import Collective, tensor_bytes
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError

PERMUTE = "collective_permute"
PAIRS = "source_target_pairs"


def pairs_of(collective: Collective) -> tuple[Pair, ...]:
    """Returns the (source, target) pairs, in the permute's own numbering."""
    table = np.array(ir.DenseIntElementsAttr(collective.inner.attributes[PAIRS]))
    rows = [] if table.size == 0 else table.reshape(-1, 2).tolist()
    return tuple((int(source), int(target)) for source, target in rows)


def check_min_bytes(min_bytes: int, name: str, precondition: str, module: ir.Module) -> None:
    """Raises ToolError for a negative limit."""
    if min_bytes < 0:
        raise ToolError(
            f"{name}: min-bytes must be a number of bytes, 0 or more ({precondition})",
            module.operation.location,
        )


def why_left(collective: Collective, min_bytes: int) -> str | None:
    """Says why a permute is not worth a rewrite, whatever its pairs are; None if it may be."""
    if collective.is_async:
        return "it is in an async_start"
    type_ = ir.ShapedType(collective.op.results[0].type)
    if type_.has_static_shape and 0 in type_.shape:
        return "it has no elements"
    if not list(collective.op.results[0].uses):
        return "its result is not used"
    size = tensor_bytes(type_) if min_bytes else None
    if size is not None and size < min_bytes:
        return f"its {size} bytes are less than min-bytes={min_bytes}"
    return None


Pair = tuple[int, int]


@dataclass(frozen=True)
class AcyclicParts:
    """The pairs of a permute in three acyclic parts, each in its original order.

    `forward` and `back` have no cycle, and with `own` make up all pairs. `back` has one pair of
    each cycle of two or more ids. `own` are the ids that send to themselves.
    """

    forward: tuple[Pair, ...]
    back: tuple[Pair, ...]
    own: tuple[int, ...]
    cycles: tuple[tuple[int, ...], ...]

    @property
    def back_targets(self) -> frozenset[int]:
        """The ids that receive along a back edge."""
        return frozenset(target for _, target in self.back)


def cut_cycles(pairs: Sequence[Pair]) -> AcyclicParts:
    """Cuts each cycle at the pair that leads furthest, by the numbers of its ids.

    That is the edge which closes a ring: 3>0 of 0>1>2>3>0, 0>3 of 3>2>1>0>3. Of equally long edges,
    it is the one with the largest source, so that equal cycles are cut in the same way.
    """
    cycles = find_cycles(pairs)
    back = {
        max(pairwise((*cycle, cycle[0])), key=lambda pair: (abs(pair[0] - pair[1]), pair[0]))
        for cycle in cycles
        if len(cycle) > 1
    }
    own = {(cycle[0], cycle[0]) for cycle in cycles if len(cycle) == 1}
    return AcyclicParts(
        forward=tuple(pair for pair in pairs if pair not in back | own),
        back=tuple(pair for pair in pairs if pair in back),
        own=tuple(source for source, target in pairs if (source, target) in own),
        cycles=tuple(cycles),
    )


def find_cycles(pairs: Sequence[Pair]) -> list[tuple[int, ...]]:
    """Returns the cycles, each from its smallest id on; those of one id send to themselves."""
    target_of = dict(pairs)
    cycles: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for start in sorted(target_of):
        path: list[int] = []
        at: int | None = start
        while at is not None and at not in seen:
            seen.add(at)
            path.append(at)
            at = target_of.get(at)
        if path and at == start:
            cycles.append(tuple(path))
    return cycles


def cycle_text(cycle: Sequence[int]) -> str:
    """Returns `0>1>2>3>0`."""
    return ">".join(str(i) for i in (*cycle, cycle[0]))
