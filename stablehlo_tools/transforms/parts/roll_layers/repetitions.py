"""Finds repetitions in a block: the same ops, with the same attributes and types, several times.

A model whose layers are in a Python loop is traced layer by layer, and so is its backward: the text
is periodic. Constants are left out, since layers may share them in different ways. Ops on rows of
weights that are already stacked in the arguments are left out, too: each layer reads another row,
and writes its gradients to another row. Equal text does not prove that the operands correspond; see
`iterations`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from stablehlo_tools.analysis.dataflow import Dataflow, Node
from stablehlo_tools.analysis.dimension_propagation.tilings import CONTRACTIONS
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import (
    ADD,
    DYNAMIC_SLICE,
    PAD,
    RESHAPE,
    SHARDING_CONSTRAINT,
    SLICE,
)
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.structural_key import block_key, op_key
from stablehlo_tools.ir.values import CONSTANTS

_TAKES_ROWS = frozenset({SLICE, DYNAMIC_SLICE})
_KEEPS_ROWS = frozenset({RESHAPE, SHARDING_CONSTRAINT})
_SUMS = frozenset({ADD, SHARDING_CONSTRAINT})


class Repetition(NamedTuple):
    """The ops from `first` up to `limit` of a sequence, which repeat with a period of `period`
    ops."""

    first: int
    limit: int
    period: int

    @property
    def size(self) -> int:
        """The number of its ops."""
        return self.limit - self.first

    def lies_in(self, other: Repetition) -> bool:
        """Returns True if all of its ops belong to another repetition."""
        return other.first <= self.first and self.limit <= other.limit


class OpSequence(NamedTuple):
    """The ops of a block that can repeat, in order, and a number for each that is the same for
    equal ops."""

    nodes: tuple[Node, ...]
    looks: np.ndarray


def sequence_of(flow: Dataflow, effects: Effects, without: Set[int] = frozenset()) -> OpSequence:
    """Returns the ops of a block, without constants and without the indices in `without`. It also
    leaves out ops that slice rows of the block's inputs, and ops that pad rows with zeros and add
    these up."""
    given = {number for number in range(len(flow.values)) if number not in flow.maker}
    rows, put, nodes = set[int](), set[int](), list[Node]()
    for node in flow.nodes:
        if node.index in without:
            continue
        if node.name in CONSTANTS:
            given.update(node.results)
        elif (node.name in _TAKES_ROWS and given.issuperset(node.inputs)) or (
            node.name in _KEEPS_ROWS and rows.issuperset(node.inputs)
        ):
            rows.update(node.results)
        elif _puts_row(node) or (node.name in _SUMS and not put.isdisjoint(node.inputs)):
            put.update(node.results)
        else:
            nodes.append(node)
    known: dict[Any, int] = {}
    # An op with effects equals no other, so it cannot be part of a repetition.
    looks = [
        known.setdefault(node.index if effects.has_effect(node.op) else look(node.op), len(known))
        for node in nodes
    ]
    return OpSequence(tuple(nodes), np.array(looks, dtype=np.int64))


def _puts_row(node: Node) -> bool:
    """Returns True if an op pads one row with zeros to a stack."""
    if node.name != PAD or shape_of(node.op.operands[0])[:1] != [1]:
        return False
    edges = (integers(node.op, f"edge_padding_{side}") for side in ("low", "high"))
    return not any(any(edge[1:]) for edge in edges)


def look(op: ir.Operation) -> Hashable:
    """Returns a key of an op without its operands. For its regions, it includes which values each
    op in them uses."""
    outer: dict[ir.Value, int] = {}
    types = tuple(value.type for value in op.operands)

    def outside(value: ir.Value) -> Hashable:
        return value.type, outer.setdefault(value, len(outer))

    blocks = [block for region in op.regions for block in region.blocks]
    return op_key(op), types, tuple(block_key(block, outside) for block in blocks)


def repetitions(sequence: OpSequence) -> list[Repetition]:
    """Returns the repetitions that contain a contraction: the one with the most ops first, and of
    equal ones that with the shortest period."""
    looks, found = sequence.looks, list[Repetition]()
    contracts = np.array([node.name in CONTRACTIONS for node in sequence.nodes], dtype=bool)
    for period in range(2, len(looks) // 2 + 1):
        # A run of equal pairs at distance `period` is a repetition with one period more.
        same = looks[:-period] == looks[period:]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
        for first, limit in edges.reshape(-1, 2).tolist():
            if limit - first >= period and contracts[first:][:period].any():
                found.append(Repetition(first, limit + period, period))
    return sorted(found, key=lambda each: (-each.size, each.period, each.first))


def phases(flow: Dataflow, nodes: Sequence[Node], each: Repetition) -> list[int]:
    """Returns the positions in the first period at which an iteration may begin, so that there are
    two complete ones. The one that carries the fewest bytes comes first."""
    place = {n: i for i, node in enumerate(nodes) for n in node.results}
    last: dict[int, int] = {}
    for i in range(each.first, each.limit):
        for number in nodes[i].inputs:
            if each.first <= place.get(number, -1) < i:
                last[number] = i
    crossing = np.zeros(len(nodes) + 2)
    for number, use in last.items():
        crossing[place[number] + 1] += _bytes(flow.values[number])
        crossing[use + 1] -= _bytes(flow.values[number])
    handed = np.cumsum(crossing)
    begins = range(each.first, min(each.first + each.period, each.limit - 2 * each.period + 1))
    return sorted(begins, key=lambda at: (handed[at + each.period], at))


def _bytes(value: ir.Value) -> int:
    type_ = value.type
    if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
        return 1
    return int(np.prod(type_.shape, dtype=np.int64)) * 4
