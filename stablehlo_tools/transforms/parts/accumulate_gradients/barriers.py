"""Barriers that hold weights back together with samples."""

from __future__ import annotations

from stablehlo_tools.dialect.names import BARRIER
from stablehlo_tools.transforms.parts.accumulate_gradients.division import Division


def free_whole_values(division: Division) -> bool:
    """Lets values that no microbatch changes go past the barriers of a division, so that what is
    computed from them can stay in front of the loop. Whether there were any.

    Rematerialisation puts weights and samples behind one barrier. The division is not valid any
    more where this returns True.
    """
    values, found = division.dims.graph.values, False
    for node in division.gone:
        if node.name != BARRIER:
            continue
        for operand, result in zip(node.operands, node.results, strict=True):
            if result in division.whole:
                values[result].replace_all_uses_with(values[operand])
                found = True
    return found
