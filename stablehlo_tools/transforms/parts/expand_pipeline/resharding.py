"""Chunks of layers go from the ranks that run them to those that hold consecutive layers, and back.

Chunk p runs on rank p mod `ranks`; where layers lie in order, in `ranks` equal parts, it is number
p mod `repeats` on rank p div `repeats`. From each rank `repeats` chunks go out and as many come in,
so that they go in as many rounds, in each of which every rank sends one and receives one: a regular
bipartite graph is a sum of perfect matchings (König 1916). No rank ever holds more than its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.transforms.parts.expand_pipeline.chunks import RANK_DIMENSION, Chunks
from stablehlo_tools.transforms.parts.expand_pipeline.region import Axis, Region, channel_handle

Round = tuple[int, ...]  # by the rank that runs it, the chunk that goes, counted over all ranks


class Exchanged(NamedTuple):
    """A stack in the other order, and the permutes that bring it there."""

    value: ir.Value
    permutes: tuple[ir.Operation, ...]


def to_layer_order(build: Builder, axis: Axis, chunks: Chunks, value: ir.Value) -> Exchanged:
    """[repeats, ranks, …] as the ranks run it becomes [ranks, repeats, …], layers in order."""
    return _Exchange(build, axis, chunks).write(value, RANK_DIMENSION, 0)


def to_rank_order(build: Builder, axis: Axis, chunks: Chunks, value: ir.Value) -> Exchanged:
    """The reverse: [ranks, repeats, …] in the order of layers, divided along dimension 0."""
    return _Exchange(build, axis, chunks).write(value, 0, RANK_DIMENSION)


class _Exchange:
    def __init__(self, build: Builder, axis: Axis, chunks: Chunks) -> None:
        self._axis = axis
        self._chunks = chunks
        anchor = build.point.ref_operation
        assert anchor is not None, "stacks are made in front of a loop"
        self._region = Region(axis, anchor, 0)

    def write(self, value: ir.Value, before: int, after: int) -> Exchanged:
        region, build = self._region, self._region.end
        local = region.bring(value, before)
        shape = shape_of(local)
        del shape[before]
        rows = build.reshape(local, shape)
        table = region.bring(self._table(ordered=before == 0), 0)
        whole = build.splat(0, shape, element_of(value))
        permutes: list[ir.Operation] = []
        for turn, sent in enumerate(rounds(self._chunks.ranks, self._chunks.repeats)):
            taken = build.dynamic_slice(rows, self._at(table, turn, 0, rows), [1, *shape[1:]])
            if any(p % self._chunks.ranks != p // self._chunks.repeats for p in sent):
                taken = self._permute(build, taken, sent, ordered=before == 0)
                permutes.append(maker_of(taken))
            starts = self._at(table, turn, 1, rows)
            whole = build.update(whole, taken, starts)
        shape.insert(after, 1)
        (result,) = region.close([(build.reshape(whole, shape), after)])
        return Exchanged(result, tuple(permutes))

    def _permute(self, build: Builder, value: ir.Value, sent: Round, *, ordered: bool) -> ir.Value:
        """A chunk that stays is sent by the rank to itself, which takes no link."""
        ways = [(p % self._chunks.ranks, p // self._chunks.repeats) for p in sent]
        if ordered:
            ways = sorted((target, source) for source, target in ways)
        pairs = [[group[one], group[other]] for one, other in ways for group in self._axis.groups]
        with build.context:
            dense = ir.DenseElementsAttr.get(np.array(pairs, dtype=np.int64))
        handle = channel_handle(0, build.context)
        return build.op(
            "collective_permute",
            [value],
            value.type,
            source_target_pairs=dense,
            channel_handle=handle,
        )

    def _table(self, *, ordered: bool) -> ir.Value:
        """[ranks, rounds, 2]: which of its chunks a rank sends, and which place it fills."""
        ranks, repeats = self._chunks.ranks, self._chunks.repeats
        turns = rounds(ranks, repeats)
        found = np.zeros((ranks, len(turns), 2), dtype=np.int32)
        run, lain = (1, 0) if ordered else (0, 1)
        for turn, sent in enumerate(turns):
            for p in sent:
                found[p % ranks, turn, run] = p // ranks
                found[p // repeats, turn, lain] = p % repeats
        return self._region.outside.constant(found)

    def _at(self, table: ir.Value, turn: int, column: int, rows: ir.Value) -> list[ir.Value]:
        build = self._region.end
        taken = build.slice(table, [0, turn, column], [1, turn + 1, column + 1])
        zeros = [build.i32(0)] * (len(shape_of(rows)) - 1)
        return [build.reshape(taken, []), *zeros]


@lru_cache
def rounds(ranks: int, repeats: int) -> tuple[Round, ...]:
    """All chunks in `repeats` rounds; those in which every chunk stays come first."""
    left: list[list[list[int]]] = [[[] for _ in range(ranks)] for _ in range(ranks)]
    for p in range(ranks * repeats):
        left[p % ranks][p // repeats].append(p)
    found: list[Round] = []
    for _ in range(repeats):
        stays = all(left[rank][rank] for rank in range(ranks))
        targets = list(range(ranks)) if stays else _matching(left)
        found.append(tuple(left[rank][target].pop(0) for rank, target in enumerate(targets)))
    return tuple(found)


def _matching(left: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """For each rank another one to send to, all different, by augmenting paths (Kuhn 1955)."""
    taken: dict[int, int] = {}

    def augment(rank: int, seen: set[int]) -> bool:
        for target, waiting in enumerate(left[rank]):
            if not waiting or target in seen:
                continue
            seen.add(target)
            if target not in taken or augment(taken[target], seen):
                taken[target] = rank
                return True
        return False

    for rank in range(len(left)):
        found = augment(rank, set())
        assert found, "as many go to a rank as from it"
    return sorted(taken, key=lambda target: taken[target])
