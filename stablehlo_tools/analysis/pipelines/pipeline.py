"""What is known of a pipeline that stands in a module."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.pipelines.holdings import Holdings
from stablehlo_tools.analysis.pipelines.rank_tables import MeshAxis
from stablehlo_tools.bindings import ir
from stablehlo_tools.schedules.lockstep import Lockstep

Iterations = NDArray[np.int32]  # [ranks, ticks]: layers that a rank runs in a tick


@dataclass(frozen=True)
class Phase:
    """One direction of a pipeline in the program.

    `layers` is the loop over a chunk's layers, `iterations` how many of them a rank runs in each
    tick, those on garbage among them. Bytes are of a rank: of `sent` a tick, of `received` slots.
    """

    back: bool
    layers: ir.Operation
    iterations: Iterations
    permutes: tuple[ir.Operation, ...]
    sent: int
    received: int
    held: Holdings


@dataclass(frozen=True)
class Pipeline:
    """A pipeline as it stands in a module.

    `schedule` is what its tables say. `devices` hold what is said of one rank: several where other
    axes of the mesh are left to a partitioner. `sizes` are the layers of each virtual stage; `kept`
    the bytes that forwards keep for backwards; `finals` the reductions over the ranks at the end.
    """

    loop: ir.Operation
    axis: MeshAxis
    devices: int
    schedule: Lockstep
    sizes: tuple[int, ...]
    phases: tuple[Phase, ...]
    kept: int
    finals: tuple[Collective, ...]

    @property
    def weights(self) -> int:
        """Bytes of the weights that a rank holds."""
        stacks: dict[ir.Value, int] = {}
        for phase in self.phases:
            stacks.update(phase.held.weights)
        return sum(stacks.values())

    @property
    def skips(self) -> bool:
        """Whether a rank without work runs no layers."""
        directions = zip(self.phases, self.schedule.directions, strict=True)
        return all(
            not phase.iterations[rank, tick]
            for phase, direction in directions
            for tick, column in enumerate(direction.cells)
            for rank, cell in enumerate(column)
            if cell is None
        )
