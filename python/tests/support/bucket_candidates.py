"""Which collectives of a module could be merged: alike, of one block, none needed by another.

Sets of them, one for each block and `CollectiveTraits`, are divided by how many of the same set a
collective needs before it: of those that need as many, none needs another. Any subset that is
merged may still stand in the way of others, or of an order of effects; `Merger.why_not` knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stablehlo_tools.analysis.collective_likeness import CollectiveTraits
from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.transforms.parts.bucket_collectives.merge import Merger

Depths = Mapping[int, int]  # of each set: how many, one needed by the next, a value needs
_NONE: Depths = {}


def candidates(collectives: Sequence[Collective], merger: Merger) -> list[list[Collective]]:
    """The sets of two and more, in program order, each in program order.

    Raises a located ToolError for groups that the module does not have.
    """
    by_block: dict[ir.Block, list[Collective]] = {}
    for collective in collectives:
        if isinstance(merger.traits(collective), CollectiveTraits):
            by_block.setdefault(collective.op.block, []).append(collective)
    sets: dict[object, list[Collective]] = {}
    for number, (block, listed) in enumerate(by_block.items()):
        if len(listed) < 2:
            continue
        depths = _depths(block, listed, merger)
        for collective in listed:
            traits = merger.traits(collective)
            depth = depths[key_of(collective.op)]
            sets.setdefault((number, traits, depth), []).append(collective)
    return [found for found in sets.values() if len(found) > 1]


def _depths(
    block: ir.Block, listed: Sequence[Collective], merger: Merger
) -> dict[ir.Value | ir.Operation, int]:
    """How many of its own set each collective needs before it, one needed by the next."""
    numbers: dict[object, int] = {}
    sets = {
        key_of(collective.op): numbers.setdefault(merger.traits(collective), len(numbers))
        for collective in listed
    }
    before: dict[ir.Value, Depths] = {}
    found: dict[ir.Value | ir.Operation, int] = {}
    for view in block.operations:
        op = view.operation
        depths = _largest([before[value] for value in _used(op) if value in before])
        key = key_of(op)
        if key in sets:
            found[key] = depths.get(sets[key], 0)
            depths = {**depths, sets[key]: found[key] + 1}
        if depths:
            before.update(dict.fromkeys(op.results, depths))
    return found


def _largest(listed: Sequence[Depths]) -> Depths:
    """The larger of each depth; the same mapping where there is one."""
    different = list({id(depths): depths for depths in listed}.values())
    if len(different) < 2:
        return different[0] if different else _NONE
    result: dict[int, int] = {}
    for depths in different:
        for number, depth in depths.items():
            result[number] = max(depth, result.get(number, 0))
    return result


def _used(op: ir.Operation) -> Iterator[ir.Value]:
    """The values that an op uses, in its regions too."""
    yield from op.operands
    if not len(op.regions):
        return
    inner: list[ir.Value] = []

    def visit(nested: ir.Operation) -> ir.WalkResult:
        inner.extend(nested.operands)
        return ir.WalkResult.ADVANCE

    walk(op, visit)
    yield from inner
