"""Shardings inside a manual computation: they may not name its axis."""

from __future__ import annotations

import re

from stablehlo_tools.bindings import ir


def without_axis(op: ir.Operation, axis: str) -> None:
    """Takes an axis out of the shardings that an op states."""
    for name in ("sharding", "sdy.sharding"):
        if name not in op.attributes or f'"{axis}"' not in str(op.attributes[name]):
            continue
        op.attributes[name] = ir.Attribute.parse(
            _without(str(op.attributes[name]), axis), op.context
        )


def _without(text: str, axis: str) -> str:
    """The text of a sharding without an axis, or parts of it, among those of a dimension."""
    reference = rf'"{re.escape(axis)}"(?::\(\d+\)\d+)?'
    text = re.sub(rf"{reference}, ", "", text)
    text = re.sub(rf", {reference}", "", text)
    return re.sub(reference, "", text)
