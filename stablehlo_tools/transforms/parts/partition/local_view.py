"""What the rules for single ops see of the body that is localized: `LocalView`.

The rules (`local_ops`, `indexed_ops`, `moved_pieces`) know this much and not who walks the body.
"""

from __future__ import annotations

from typing import Protocol

from stablehlo_tools.analysis.tensor_shardings import Axes, Dims, ValueShardings
from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.partition.collectives import CollectiveWriter
from stablehlo_tools.transforms.parts.partition.local_index import DeviceOffsets


class LocalView(Protocol):
    """A body of which all values above the op at hand are one device's parts."""

    shardings: ValueShardings
    offsets: DeviceOffsets
    collectives: CollectiveWriter

    def divided(self, value: ir.Value) -> Dims:
        """How a value, local or about to be, is divided; made by ops already passed."""
        ...

    def size(self, axes: Axes) -> int:
        """Into how many parts axes divide."""
        ...

    def whole_shape(self, value: ir.Value) -> list[int]:
        """The global shape of a value that is local already."""
        ...

    def part_type(self, value: ir.Value, dims: Dims) -> ir.Type:
        """The type of one device's part of a global value."""
        ...

    def replace(self, op: ir.Operation, value: ir.Value) -> None:
        """Puts a local value in the place of an op's one result, whose attributes still say how it
        is divided, and erases the op."""
        ...

    def stand_in(self, old: ir.Value, new: ir.Value) -> None:
        """Lets a value made from another one, divided alike, take its place everywhere else."""
        ...

    def adopt(self, old: ir.Value, new: ir.Value) -> None:
        """Puts a value in the place of one that is divided alike."""
        ...
