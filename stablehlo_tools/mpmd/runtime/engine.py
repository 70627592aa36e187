"""Defines the engines that run the ranks of a set on the devices of a process.

They are `one_rank` and `all_ranks`. Values are `Parts`: the parts of an argument or a result on the
devices of a rank that belong to this process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.running.functions import Parts
from stablehlo_tools.mpmd.running.localisation import Index, LocalProgram

type Values = dict[int, list[Parts]]  # by rank, in order


@dataclass(frozen=True)
class PreparedSet:
    """A set with per-device programs in the form `pairs`, and the parts that each device has.

    `following[r][n]` is the result of rank r that is argument n in the next step.
    """

    ranks: RankSet
    local: tuple[LocalProgram, ...]
    following: Mapping[int, Mapping[int, int]]


class Engine(ABC):
    """Runs steps. `ranks` are those of this process."""

    ranks: tuple[int, ...]

    def __init__(self, prepared: PreparedSet) -> None:
        self.prepared = prepared
        self.devices_of_rank = prepared.ranks.manifest.devices
        self.signs: deque[Parts] = deque()  # results of the steps in flight

    @abstractmethod
    def devices(self, rank: int) -> list[tuple[int, Any]]:
        """Returns this process's devices of a rank, with their positions in the rank."""

    @abstractmethod
    def run(self, arguments: Values) -> Values:
        """Runs a step. Returns its results; donated arguments are deleted."""

    def wait(self) -> None:
        """Waits until at most one step is in flight."""
        while len(self.signs) > 1:
            jax.block_until_ready(self.signs.popleft())

    @abstractmethod
    def process_of(self, rank: int, place: int) -> int:
        """Returns the process of a device of a rank."""

    def copy_to_devices(self, rank: int, array: Any, indices: Sequence[Index]) -> Parts:
        """Copies the indexed parts of a value to the devices of a rank.

        The copies are needed because a step may reuse their memory, and the caller may overwrite
        the value.
        """
        parts: Parts = []
        for place, device in self.devices(rank):
            part = array[indices[place]]
            if not isinstance(part, jax.Array):  # jax may read NumPy's memory later
                part = np.array(part)
            parts.append(jax.device_put(part, device, may_alias=False))
        return parts


def devices_for(ranks: RankSet) -> list[Any]:
    """Returns the devices of a set: all of a job's, or the first ones of a single process.

    Raises ToolError if their number does not fit.
    """
    everything, size = jax.devices(), ranks.manifest.devices
    count, alone = ranks.ranks * size, jax.process_count() == 1
    if len(everything) < count or (len(everything) > count and not alone):
        raise ToolError(
            f"this {'process' if alone else 'job'} has {len(everything)} devices, but the set is "
            f"for {count}: {ranks.ranks} ranks of {size}"
        )
    return everything[:count]
