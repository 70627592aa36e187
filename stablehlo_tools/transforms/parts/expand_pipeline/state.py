"""What a pipelined layer loop carries from tick to tick, and how it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.expand_pipeline.chunks import Chunks
from stablehlo_tools.transforms.parts.expand_pipeline.constraints import without_axis
from stablehlo_tools.transforms.parts.expand_pipeline.stacks import Stacks


@dataclass
class State:
    """What a phase carries from tick to tick, each by the carry of the layer loop that it is of.

    `received` are flows as they came, `finals` flows behind the last layer, `sums` the terms added
    up so far, `stores` the rows written so far.
    """

    received: dict[int, ir.Value] = field(default_factory=dict[int, ir.Value])
    finals: dict[int, ir.Value] = field(default_factory=dict[int, ir.Value])
    sums: dict[int, ir.Value] = field(default_factory=dict[int, ir.Value])
    stores: dict[int, ir.Value] = field(default_factory=dict[int, ir.Value])

    def flat(self) -> list[ir.Value]:
        """All values, in an order that `like` knows."""
        return [value for group in self._groups() for value in group.values()]

    def like(self, values: Sequence[ir.Value]) -> State:
        """A state with other values."""
        rest = list(values)
        groups = [{carry: rest.pop(0) for carry in group} for group in self._groups()]
        return State(*groups)

    def _groups(self) -> tuple[dict[int, ir.Value], ...]:
        return self.received, self.finals, self.sums, self.stores


@dataclass(frozen=True)
class Kept:
    """The stacks that a forward leaves for the backward, by carry, and how many slots hold each."""

    slots: int = 0
    carries: frozenset[int] = frozenset()


NOTHING_KEPT = Kept()


@dataclass(frozen=True)
class How:
    """How phases are written: `skip` leaves out the layers of a rank that has no work, `axis` is
    the manual one."""

    chunks: Chunks
    stacks: Stacks
    skip: bool
    axis: str

    def finish(self, copy: ir.Operation) -> None:
        """What every op that is copied into the manual computation needs: inside of it no sharding
        may name its axis."""
        without_axis(copy, self.axis)
