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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.running.localisation import Index, LocalProgram

type Parts = list[jax.Array]
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
        self._signs: deque[Parts] = deque()  # of each step that may not be done yet

    @abstractmethod
    def devices(self, rank: int) -> list[tuple[int, Any]]:
        """The devices of a rank that are this process's, with their places in it."""

    @abstractmethod
    def run(self, arguments: Values) -> Values:
        """The results of a step; what is donated of the arguments is gone."""

    def wait(self) -> None:
        """Until no more than one step is on its way."""
        while len(self._signs) > 1:
            jax.block_until_ready(self._signs.popleft())

    def _sign(self, parts: Parts) -> None:
        """`parts` are there when the present step is done."""
        self._signs.append(parts)

    @abstractmethod
    def process_of(self, rank: int, place: int) -> int:
        """The process that has a device of a rank."""

    def placed(self, rank: int, array: Any, indices: Sequence[Index]) -> Parts:
        """What the devices of a rank have of a value, each what its index says. Copies, for a step
        may take their memory, and whoever gave the value may write it over."""
        return [
            jax.device_put(_own(array[indices[place]]), device, may_alias=False)
            for place, device in self.devices(rank)
        ]


def _own(part: Any) -> Any:
    """A part that nobody writes over: jax may copy NumPy's memory later than it returns."""
    return part if isinstance(part, jax.Array) else np.array(part)


def any_values(devices: Sequence[Any]) -> NamedSharding:
    """ "Replicated" with other contents on each device: the only form that holds any values."""
    return NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec())


def run_on(executable: Any, taken: Sequence[Parts], whole: NamedSharding) -> list[Parts]:
    """Runs a program of one device on those of this process; `whole` is over all of it."""
    if whole.num_devices == 1:
        results = executable.execute_sharded([part for (part,) in taken])
    else:
        make = jax.make_array_from_single_device_arrays
        results = executable.execute_sharded([make(p[0].shape, whole, p) for p in taken])
    return [list(parts) for parts in results.disassemble_into_single_device_arrays()]


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
