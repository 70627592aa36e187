"""What runs the ranks of a set on the devices of a process: `one_rank` or `all_ranks`.

Values are `Parts`: what each device of a rank has of an argument or a result, of those devices that
are this process's.
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
class Prepared:
    """A set whose programs are those of a device, in the form `pairs`, and what each device has of
    what they take and give; `following[r][n]`: the result that argument n is in the next step."""

    ranks: RankSet
    local: tuple[LocalProgram, ...]
    following: Mapping[int, Mapping[int, int]]


class Engine(ABC):
    """Runs steps. `ranks`: those of this process."""

    ranks: tuple[int, ...]

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.devices_of_rank = prepared.ranks.manifest.devices
        self.signs: deque[Parts] = deque()  # there when a step is done, of those on their way

    @abstractmethod
    def devices(self, rank: int) -> list[tuple[int, Any]]:
        """The devices of a rank that are this process's, with their places in it."""

    @abstractmethod
    def run(self, arguments: Values) -> Values:
        """The results of a step; what is donated of the arguments is gone."""

    def wait(self) -> None:
        """Until no more than one step is on its way."""
        while len(self.signs) > 1:
            jax.block_until_ready(self.signs.popleft())

    @abstractmethod
    def process_of(self, rank: int, place: int) -> int:
        """The process that has a device of a rank."""

    def placed(self, rank: int, array: Any, indices: Sequence[Index]) -> Parts:
        """What the devices of a rank have of a value, each what its index says. Copies, for a step
        may take their memory, and whoever gave the value may write it over."""
        parts: Parts = []
        for place, device in self.devices(rank):
            part = array[indices[place]]
            if not isinstance(part, jax.Array):  # jax may copy NumPy's memory later than it returns
                part = np.array(part)
            parts.append(jax.device_put(part, device, may_alias=False))
        return parts


def devices_for(ranks: RankSet) -> list[Any]:
    """The devices of a set: all of a job's, the first ones of a process by itself. Raises ToolError
    where there are others."""
    everything, size = jax.devices(), ranks.manifest.devices
    count, alone = ranks.ranks * size, jax.process_count() == 1
    if len(everything) < count or (len(everything) > count and not alone):
        raise ToolError(
            f"this {'process' if alone else 'job'} has {len(everything)} devices, and the set is "
            f"for {count}: {ranks.ranks} ranks of {size}"
        )
    return everything[:count]
