"""Which devices share a value at each level of manual computations, and values that cross them.

Where some axes of the mesh are left to the partitioner, it moves data along them as it likes: what
one device needs, all that differ from it along free axes only must have. Outside of every manual
computation that holds for all devices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.demand.program import ENTER, LEAVE, Program, Step
from stablehlo_tools.analysis.replica_groups import AxisRef, mesh_axes_groups
from stablehlo_tools.analysis.shardings import manual_axes, sharding_axes, sharding_per_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION

Groups = NDArray[Any]
Need = NDArray[np.bool_]  # by device and place; one column where places are not told apart


class Levels:
    """The groups of devices that share values, for each manual computation and outside of all."""

    def __init__(self, program: Program, facts: ModuleFacts) -> None:
        self._facts = facts
        self._everyone: Groups = np.arange(facts.grid.size).reshape(1, -1)
        self._outside = self._everyone if program.is_global else None
        self._known: dict[ir.Operation, Groups | None] = {}

    def groups(self, computation: ir.Operation | None) -> Groups | None:
        """Rows of devices that share what one of them needs; None where each is on its own."""
        if computation is None:
            return self._outside
        if computation not in self._known:
            self._known[computation] = self._groups(computation)
        return self._known[computation]

    def _groups(self, computation: ir.Operation) -> Groups | None:
        names = {*_meshes(computation, "in_shardings"), *_meshes(computation, "out_shardings")}
        mesh = self._facts.meshes.get(next(iter(names))) if len(names) == 1 else None
        manual: set[str] = set()
        around: ir.Operation | None = computation
        while around is not None:
            if around.name == MANUAL_COMPUTATION:
                manual |= manual_axes(around)
            around = around.parent
        if mesh is None or mesh.size != self._facts.grid.size:
            return self._everyone
        free = [AxisRef(name) for name, size in mesh.axes if name not in manual and size > 1]
        return np.array(mesh_axes_groups(mesh, free)) if free else None


def shared(need: Need, groups: Groups | None) -> Need:
    """What each device needs, once all of a group need what one of it does."""
    if groups is None:
        return need
    spread = need.copy()
    spread[groups] = need[groups].any(axis=1, keepdims=True)
    return spread


def crossing_values(program: Program, facts: ModuleFacts) -> dict[int, int]:
    """The shards that one manual computation takes as another left them: inside to outside.

    A training step has one computation for each direction, and what the first saves for the second
    goes through global values that nothing else is done with.
    """
    made: dict[int, tuple[Step, int]] = {}
    same: dict[int, int] = {}
    for step in program.steps:
        if step.above is not None or step.name not in (ENTER, LEAVE):
            continue
        if step.name == LEAVE:
            made.update((number, (step, i)) for i, number in enumerate(step.results))
            continue
        for position, (outside, inside) in enumerate(zip(step.operands, step.results, strict=True)):
            if outside not in made:
                continue
            left, index = made[outside]
            if _form(left, "out_shardings", index, facts) == _form(
                step, "in_shardings", position, facts
            ) and (program.types[outside] == program.types[inside]):
                same[inside] = outside
    return same


def _form(step: Step, name: str, position: int, facts: ModuleFacts) -> tuple[object, ...]:
    """How a value is divided among the devices."""
    sharding = sharding_per_value(step.op.attributes[name])[position]
    mesh = sharding_axes(sharding)[0]
    dimensions = tuple(str(d) for d in bindings.TensorShardingAttr(sharding).dimension_shardings)
    return facts.meshes.get(mesh, mesh), dimensions, manual_axes(step.op)


def _meshes(computation: ir.Operation, name: str) -> list[str]:
    return [sharding_axes(s)[0] for s in sharding_per_value(computation.attributes[name])]
