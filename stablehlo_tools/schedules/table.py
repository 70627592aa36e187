"""A schedule: what every rank does, in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stablehlo_tools.schedules.actions import Action, Step
from stablehlo_tools.schedules.placement import Placement

Row = tuple[Step | None, ...]


@dataclass(frozen=True)
class Table:
    """One row of steps for each rank; None is an idle cell, which only says where a step stands.

    The order of a row is the schedule; times come from the simulator. With `training` every stage
    runs forward and backward for every microbatch, else forward only. Where the rows hold sends and
    receives, all transfers between ranks are in them; where they hold none, transfers are implied.
    """

    name: str
    placement: Placement
    microbatches: int
    rows: tuple[Row, ...]
    training: bool = True

    @property
    def ranks(self) -> int:
        """The number of pipeline ranks, p."""
        return self.placement.ranks

    @property
    def stages(self) -> int:
        """The number of stages of the model."""
        return self.placement.stages

    @property
    def communicates(self) -> bool:
        """Whether the rows hold the sends and receives."""
        return any(
            isinstance(step, Action) and not step.kind.is_compute
            for row in self.rows
            for step in row
        )


def table_of(
    name: str,
    placement: Placement,
    microbatches: int,
    rows: Iterable[Sequence[Step | None]],
    training: bool = True,
) -> Table:
    """A table of rows of any sequences."""
    return Table(name, placement, microbatches, tuple(map(tuple, rows)), training)


def compacted(table: Table) -> Table:
    """The table without its idle cells."""
    rows = [[step for step in row if step is not None] for row in table.rows]
    return table_of(table.name, table.placement, table.microbatches, rows, table.training)
