"""Merges the collectives that came out of a loop, as far as they are alike."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.collectives import Collective, classify_communication
from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.bucket_collectives.merge import Merger
from stablehlo_tools.transforms.parts.bucket_collectives.placement import in_block_order

_LARGEST = 32 << 20  # bytes of a bucket's operands: beyond, a larger message gains nothing


def merge_sunk(module: ir.Module, ops: Sequence[ir.Operation]) -> list[ir.Operation]:
    """Makes one collective of several where that keeps their values; returns all that are left.

    `ops` are collectives of one block. Handles to those that are merged become invalid. Raises a
    located ToolError for groups that the module does not have.
    """
    if not ops:
        return []
    merger = Merger(module)
    classify = classify_communication(module.context)
    buckets: list[list[Collective]] = []
    for op in in_block_order(ops):
        collective = classify(op)
        assert collective is not None, "a collective that ran in a loop"
        bucket = next((b for b in buckets if _has_room(b, collective, merger)), None)
        if bucket is None:
            buckets.append([collective])
        else:
            bucket.append(collective)
    kept: list[ir.Operation] = []
    for bucket in buckets:
        for members in _mergeable(bucket, merger):
            kept.append(merger.merge(members) if len(members) > 1 else members[0].op)
    return in_block_order(kept)


def _has_room(bucket: Sequence[Collective], collective: Collective, merger: Merger) -> bool:
    """Whether a bucket holds what is like a collective, and has room for it."""
    traits = merger.traits(collective)
    if isinstance(traits, str) or merger.traits(bucket[0]) != traits:
        return False
    sizes = [member.bytes_in for member in (*bucket, collective)]
    known = [size for size in sizes if size is not None]
    return len(known) == len(sizes) and sum(known) <= _LARGEST


def _mergeable(bucket: Sequence[Collective], merger: Merger) -> list[list[Collective]]:
    """A bucket in parts, none of whose members leads to another; mostly as a whole."""
    if len(bucket) == 1 or merger.why_not(bucket) is None:
        return [list(bucket)]
    parts: list[list[Collective]] = []
    for collective in bucket:
        part = next((p for p in parts if merger.why_not([*p, collective]) is None), None)
        if part is None:
            parts.append([collective])
        else:
            part.append(collective)
    return parts
