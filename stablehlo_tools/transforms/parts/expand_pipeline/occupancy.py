"""How often the loops over layers run in a tick, in the mean.

Each rank reads in its table how many layers it runs, 0 where it has no work. All ranks exchange in
every tick, so that a tick takes as long as its slowest rank: what counts for the time is how often
that one runs each loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools.schedules.lockstep import Direction
from stablehlo_tools.transforms.parts.expand_pipeline.expansion_plan import Chunks

_BACKWARD = 2.0  # forwards that a backward takes: two products of a weight for one


def mean_runs(
    directions: Sequence[Direction], chunks: Sequence[Chunks], backwards: Sequence[bool]
) -> list[float]:
    """The iterations of each loop in a tick on the rank that takes longest, the mean of all
    ticks."""
    runs = [_iterations(each, own) for each, own in zip(directions, chunks, strict=True)]
    weights = [_BACKWARD if back else 1.0 for back in backwards]
    load = sum(weight * each for weight, each in zip(weights, runs, strict=True))
    slowest = np.argmax(load, axis=0)
    ticks = np.arange(len(slowest))
    return [float(each[slowest, ticks].mean()) for each in runs]


def _iterations(direction: Direction, chunks: Chunks) -> NDArray[np.int64]:
    """[ranks, ticks]"""
    return np.array(
        [
            [
                0 if cell is None else chunks.sizes[cell.chunk * chunks.ranks + rank]
                for rank, cell in enumerate(column)
            ]
            for column in direction.cells
        ]
    ).T
