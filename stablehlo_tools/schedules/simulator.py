"""Times a table: makespan, bubbles, memory and messages.

Two bubbles are in use. By END: the share of the makespan, from time 0, that ranks do not compute.
By SPAN: the same of the longest span of one rank, from its own first step to its own last: what is
left when iterations follow each other without a barrier (arXiv 2401.10241 states its ZB-H2, ZB-1p,
ZB-2p and ZB-V so, its 1F1B, interleaved 1F1B and ZB-H1 by END).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.actions import Action, Kind, Step, actions_of
from stablehlo_tools.schedules.costs import Costs, costs
from stablehlo_tools.schedules.execution import RENDEZVOUS, execute
from stablehlo_tools.schedules.table import Row, Table


@dataclass(frozen=True)
class Timeline:
    """When every step of a table starts and ends, row by row, in the unit of the costs."""

    table: Table
    costs: Costs
    starts: tuple[list[float], ...]
    ends: tuple[list[float], ...]

    @cached_property
    def makespan(self) -> float:
        """From time 0 to the end of the last step."""
        return max(max(ends, default=0.0) for ends in self.ends)

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """From the start of each rank's first phase to the end of its last; 0 without any."""
        rows = zip(self.table.rows, self.starts, self.ends, strict=True)
        return tuple(_span(row, starts, ends) for row, starts, ends in rows)

    @cached_property
    def span(self) -> float:
        """The longest of the spans."""
        return max(self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank computes."""
        return tuple(
            sum(
                end - start
                for step, start, end in zip(row, starts, ends, strict=True)
                if _computes(step)
            )
            for row, starts, ends in zip(self.table.rows, self.starts, self.ends, strict=True)
        )

    @property
    def idle(self) -> tuple[float, ...]:
        """The time of the makespan that each rank does not compute."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The idle share of all ranks' time from 0 to the makespan: by END."""
        return _share(sum(self.busy), self.makespan * self.table.ranks)

    @property
    def bubble_of_span(self) -> float:
        """The same of the longest span: by SPAN."""
        return _share(sum(self.busy), self.span * self.table.ranks)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """The most activations alive on each rank, in stages x microbatches.

        One is alive from its forward to its full backward, or to its weight gradient.
        """
        return peak_activations(self.table)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most bytes held by each rank: its stages' weights and the activations alive."""
        return peak_bytes(self.table, self.costs)

    @cached_property
    def messages(self) -> int:
        """Transfers between ranks."""
        return messages(self.table)

    @property
    def bytes_sent(self) -> float:
        """Bytes of all transfers between ranks."""
        return self.messages * self.costs.message


def simulate(
    table: Table, costs: Costs, blocking: bool = False, buffers: int = RENDEZVOUS
) -> Timeline:
    """Times a valid table.

    With `blocking` a transfer holds both of its ranks from when both have reached it or, with
    buffers, its sender until there is room for the message; else it runs beside compute. Raises
    ToolError where the costs are of another number of stages, the table runs into a deadlock, or
    blocking transfers are asked of a table that names none.
    """
    if costs.stages != table.stages:
        raise ToolError(f"costs of {costs.stages} stages for a schedule of {table.stages}")
    if blocking and not table.communicates and messages(table):
        raise ToolError(f"{table.name}: blocking transfers need a table with sends and receives")
    run = execute(table, costs, buffers if blocking else None)
    for rank, at in run.stuck.items():
        step = table.rows[rank][at]
        raise ToolError(f"{table.name}: rank {rank}, step {at}: {step} waits for ever")
    return Timeline(table, costs, run.starts, run.ends)


def peak_activations(table: Table) -> tuple[int, ...]:
    """The most activations alive on each rank at any time, in stages x microbatches."""
    counted = costs(table.stages, activation=1, kept=1)
    return tuple(int(_peak(row, counted)) for row in table.rows)


def peak_bytes(table: Table, costs: Costs) -> tuple[float, ...]:
    """The most bytes held by each rank at any time: weights and activations."""
    held = table.placement.held
    return tuple(
        sum(costs.weights[stage] for stage in stages) + _peak(row, costs)
        for row, stages in zip(table.rows, held, strict=True)
    )


def messages(table: Table) -> int:
    """Transfers between ranks, whether the table names them or not."""
    placement, last = table.placement, table.stages - 1
    routes = placement.routes
    count = 0
    for row in table.rows:
        for kind, stage, microbatch in actions_of(row):
            route = routes[microbatch % len(routes)]
            if kind is Kind.FORWARD:
                count += stage < last and route[stage] != route[stage + 1]
            elif kind is Kind.BACKWARD or kind is Kind.INPUT_GRADIENT:
                count += stage > 0 and route[stage] != route[stage - 1]
    return count


def change_of_memory(action: Action, costs: Costs) -> float:
    """By how many bytes an action changes what its rank holds."""
    kind, stage, _ = action
    if kind is Kind.FORWARD:
        return costs.activation[stage]
    if kind is Kind.BACKWARD:
        return -costs.activation[stage]
    if kind is Kind.INPUT_GRADIENT:
        return costs.kept[stage] - costs.activation[stage]
    return -costs.kept[stage] if kind is Kind.WEIGHT_GRADIENT else 0.0


def _peak(row: Row, costs: Costs) -> float:
    """The most that a rank's activations take.

    A pair holds the new activation before the old one is freed.
    """
    alive = peak = 0.0
    for action in actions_of(row):
        alive += change_of_memory(action, costs)
        peak = max(peak, alive)
    return peak


def _span(row: Row, starts: list[float], ends: list[float]) -> float:
    """Transfers do not count: a receive that is posted ahead holds nobody."""
    computes = [at for at, step in enumerate(row) if _computes(step)]
    return ends[computes[-1]] - starts[computes[0]] if computes else 0.0


def _computes(step: Step | None) -> bool:
    return step is not None and (not isinstance(step, Action) or step.kind.is_compute)


def _share(busy: float, whole: float) -> float:
    return 1 - busy / whole if whole else 0.0
