"""The table of a pipeline: its columns, in integers, and the rows of it that each rank has.

In a program for all devices such a table is a constant that a manual computation takes in divided
along the axis; in the program of one device, a constant sliced at the device's place on the axis.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.loops import constant_integer
from stablehlo_tools.analysis.replica_groups import AxisRef, DeviceMesh, mesh_axes_groups
from stablehlo_tools.analysis.shardings import sharding_axes, sharding_per_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import DYNAMIC_SLICE, MANUAL_COMPUTATION
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.values import CONSTANTS, producer, value_of


class Column(enum.IntEnum):
    """Where each integer stands in a row.

    `RUNS`, `ENDS` and `RECEIVED` are flags: the rank has work; it is the last chunk of the
    direction; the input is taken from a receive slot. `CHUNK`, `MICROBATCH`, `SOURCE` and `KEPT`
    are those of a `schedules.lockstep.Cell`, never below 0. `DELIVERY` is the slot for what arrives
    at the end of the tick. `FIRST` is the first layer of the chunk, `LAYERS` how many it has.
    """

    RUNS = 0
    ENDS = 1
    RECEIVED = 2
    CHUNK = 3
    MICROBATCH = 4
    SOURCE = 5
    KEPT = 6
    DELIVERY = 7
    FIRST = 8
    LAYERS = 9


@dataclass(frozen=True)
class MeshAxis:
    """An axis and its lines: the devices that differ along it alone, in order."""

    mesh: str
    name: str
    groups: tuple[tuple[int, ...], ...]
    devices: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.groups[0])

    def ring(self, step: int) -> frozenset[tuple[int, int]]:
        """From each device to the one `step` further along the axis, the last to the first."""
        return frozenset(
            (group[rank], group[(rank + step) % self.size])
            for group in self.groups
            for rank in range(self.size)
        )


@dataclass(frozen=True)
class RankTable:
    """The table of all ranks, [ranks, ticks, columns], and the axis that they lie on."""

    entries: NDArray[np.int32]
    axis: MeshAxis


def rank_table(value: ir.Value, facts: ModuleFacts, known: DeviceValues) -> RankTable | None:
    """The whole table that a rank's [1, ticks, columns] is the part of; None where it is none."""
    owner = producer(value)
    if owner is None:
        # A table that a manual computation takes in divided along the axis.
        argument = ir.BlockArgument(value)
        op = argument.owner.owner.operation
        if op.name != MANUAL_COMPUTATION:
            return None
        entries = _constant(op.operands[argument.arg_number])
        sharding = sharding_per_value(op.attributes["in_shardings"])[argument.arg_number]
        mesh_name, axes = sharding_axes(sharding)
        mesh = facts.meshes.get(mesh_name)
        if entries is None or mesh is None or len(axes) != 1:
            return None
        if dict(mesh.axes).get(axes[0]) != len(entries) or len(entries) < 2:
            return None
        return RankTable(entries, _axis(mesh_name, mesh, axes[0]))
    # A table sliced at the device's place on an axis.
    entries = _constant(owner.operands[0]) if owner.name == DYNAMIC_SLICE else None
    starts = list(owner.operands)[1:]
    if entries is None or any(constant_integer(start) != 0 for start in starts[1:]):
        return None
    places = known.scalar(starts[0])
    if places is None:
        return None
    rows = _along(facts, len(entries), [int(place) for place in places])
    return None if rows is None else RankTable(entries, rows)


def _along(facts: ModuleFacts, ranks: int, places: Sequence[int]) -> MeshAxis | None:
    """The axis on which each device has the place given for it."""
    for mesh_name, mesh in facts.meshes.items():
        for name, size in mesh.axes:
            if size != ranks or size < 2 or mesh.size != len(places):
                continue
            axis = _axis(mesh_name, mesh, name)
            if all(places[d] == rank for group in axis.groups for rank, d in enumerate(group)):
                return axis
    return None


def _axis(mesh_name: str, mesh: DeviceMesh, name: str) -> MeshAxis:
    return MeshAxis(mesh_name, name, mesh_axes_groups(mesh, (AxisRef(name),)), mesh.size)


def _constant(value: ir.Value) -> NDArray[np.int32] | None:
    op = producer(value)
    if op is None or op.name not in CONSTANTS or len(shape_of(value)) != 3:
        return None
    if str(element_of(value)) != "i32" or shape_of(value)[2] != len(Column):
        return None
    attribute = value_of(op)
    assert attribute is not None, "integers can be handed out"
    return np.array(ir.DenseElementsAttr(attribute), dtype=np.int32)
