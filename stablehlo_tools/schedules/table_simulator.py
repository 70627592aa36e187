"""Runs a table, and times it: makespan, bubbles, memory and messages.

Every rank runs its steps in order, each as soon as its inputs are available. The simulator and the
validator share one machine (`execute`); the validator only needs to know if the run finishes. A
step that can run stays runnable whatever the other ranks do. So the order in which ranks are
advanced here changes neither the times nor whether the run finishes.

The literature defines two bubbles. END: the share of the makespan, from time 0, in which ranks do
not compute. SPAN: the same share of the longest span of a rank, from its first step to its last,
which applies if iterations follow each other without a barrier. (arXiv 2401.10241 states ZB-H2,
ZB-1p, ZB-2p and ZB-V by SPAN; 1F1B, interleaved 1F1B and ZB-H1 by END.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.setting import Costs, costs
from stablehlo_tools.schedules.table import (
    COMPUTE,
    Action,
    ActionKind,
    ActionPair,
    Row,
    Step,
    Table,
    actions_of,
)

RENDEZVOUS = 0

# The kinds of a datum: the result of a forward or of a gradient, or either received by a rank.
_FORWARD, _GRADIENT, _ACTIVATION_IN, _GRADIENT_IN = range(4)

_NOT_YET = -1.0


@dataclass(frozen=True)
class Execution:
    """Start and end of every step, row by row; `stuck` maps a rank to the step that cannot run.

    The rows of stuck ranks end early. An idle cell starts and ends at the end of the step before.
    """

    starts: tuple[list[float], ...]
    ends: tuple[list[float], ...]
    stuck: dict[int, int]


def execute(table: Table, costs: Costs, buffers: int | None = None) -> Execution:
    """Runs a table that is structurally valid.

    If `buffers` is None, transfers overlap with compute and start once both ends are reached.
    Otherwise both ends block their rank. A send then completes once fewer than `buffers` messages
    from its rank to the receiver's are unreceived, a receive once its message has arrived. With 0
    buffers, send and receive meet, and both last as long as the transfer. If the table has no sends
    and receives, a transfer starts when its stage ends, and buffers do not matter.
    """
    return _SimulatorState(table, costs, buffers).run()


class _DatumNeed(NamedTuple):
    """A datum that a phase of a stage reads, without its microbatch, and its transfer time."""

    datum: int
    delay: float


class _StagePhase(NamedTuple):
    """A phase of a stage: its time, the data it produces and reads, without the microbatch."""

    time: float
    makes: int | None
    needs: tuple[_DatumNeed, ...]


class _SimulatorState:
    """The state of a run. A datum is an int that encodes its kind, stage and microbatch."""

    def __init__(self, table: Table, costs: Costs, buffers: int | None) -> None:
        self._table = table
        self._communication = costs.communication
        self._overlapped = costs.overlapped
        self._buffers = buffers
        self._routes = table.placement.routes
        self._explicit = table.communicates
        self._phases = {
            kind: [
                [self._phase(costs, kind, stage, route) for stage in range(table.stages)]
                for route in self._routes
            ]
            for kind in COMPUTE
        }
        self._there = [_NOT_YET] * (4 * table.stages * table.microbatches)  # times of arrival
        self._waiting: dict[int, int] = {}  # the rank that waits for a datum
        self._offered: dict[int, tuple[int, float]] = {}  # one reached end of a transfer
        self._received: dict[tuple[int, int], list[float]] = {}  # times of receives, by channel
        self._sent: dict[tuple[int, int], int] = {}  # number of sends, by channel
        self._full: dict[tuple[int, int], int] = {}  # the rank that waits for a free buffer
        self._clocks = [0.0] * table.ranks
        self._starts: tuple[list[float], ...] = tuple([] for _ in range(table.ranks))
        self._ends: tuple[list[float], ...] = tuple([] for _ in range(table.ranks))
        self._runnable = list(reversed(range(table.ranks)))
        self._copies = _Copies(table, costs) if table.offloads else None

    def run(self) -> Execution:
        """Advances ranks until all are at their ends or wait."""
        rows = self._table.rows
        while self._runnable:
            rank = self._runnable.pop()
            row = rows[rank]
            at = len(self._ends[rank])
            while at < len(row) and self._take(rank, row[at]):
                at += 1
        done = map(len, self._ends)
        stuck = {rank: at for rank, at in enumerate(done) if at < len(rows[rank])}
        return Execution(self._starts, self._ends, stuck)

    def _phase(
        self, costs: Costs, kind: ActionKind, stage: int, route: tuple[int, ...]
    ) -> _StagePhase:
        own = _DatumNeed(self._datum(_FORWARD, stage), 0.0)
        gradient = self._datum(_GRADIENT, stage)
        if kind is ActionKind.FORWARD:
            return _StagePhase(
                costs.forward[stage],
                own.datum,
                self._neighbour_needs(_FORWARD, stage - 1, stage, route),
            )
        if kind is ActionKind.WEIGHT_GRADIENT:
            return _StagePhase(costs.weight_gradient[stage], None, (_DatumNeed(gradient, 0.0),))
        times = costs.backward if kind is ActionKind.BACKWARD else costs.input_gradient
        needs = (own, *self._neighbour_needs(_GRADIENT, stage + 1, stage, route))
        return _StagePhase(times[stage], gradient, needs)

    def _neighbour_needs(
        self, what: int, source: int, stage: int, route: tuple[int, ...]
    ) -> tuple[_DatumNeed, ...]:
        """Returns the datum that a stage reads of a neighbour; empty without such a neighbour."""
        if not 0 <= source < len(route):
            return ()
        if route[source] == route[stage]:
            return (_DatumNeed(self._datum(what, source), 0.0),)
        if self._explicit:
            return (_DatumNeed(self._datum(what + _ACTIVATION_IN, source), 0.0),)
        return (_DatumNeed(self._datum(what, source), self._communication),)

    def _datum(self, what: int, stage: int) -> int:
        return (what * self._table.stages + stage) * self._table.microbatches

    def _take(self, rank: int, step: Step | None) -> bool:
        """Runs one step and returns True if it is ready; else records the datum it waits for."""
        if type(step) is not Action:
            if isinstance(step, ActionPair):
                return self._take_pair(rank, step)
            self._record(rank, self._clocks[rank], self._clocks[rank])
            return True
        kind, stage, microbatch = step
        phases = self._phases.get(kind)
        if phases is None:
            if not kind.is_copy:
                return self._transfer(rank, step)
            # A copy between device and host never waits for another rank.
            clock = self._clocks[rank]
            assert self._copies is not None, "a table with copies has a lane for them"
            self._record(rank, clock, self._copies.take(rank, step, clock))
            return True
        phase = phases[microbatch % len(phases)][stage]
        start = self._start(rank, phase, microbatch)
        if start is None:
            return False
        if self._copies is not None:
            start = self._copies.start_of(step, start)
        end = start + phase.time
        self._starts[rank].append(start)
        self._ends[rank].append(end)
        self._clocks[rank] = end
        if self._copies is not None:
            self._copies.done(rank, step, end)
        if phase.makes is not None:
            self._arrive(phase.makes + microbatch, end)
        return True

    def _take_pair(self, rank: int, pair: ActionPair) -> bool:
        start, apart = self._clocks[rank], 0.0
        for action in pair:
            kind, stage, microbatch = action
            phase = self._phases[kind][microbatch % len(self._routes)][stage]
            ready = self._start(rank, phase, microbatch)
            if ready is None:
                return False
            if self._copies is not None:
                ready = self._copies.start_of(action, ready)
            start, apart = max(start, ready), apart + phase.time
        # Overlapped phases share the rank: together they last a fraction of their sum.
        end = start + apart * self._overlapped
        self._record(rank, start, end)
        for action in pair:
            kind, stage, microbatch = action
            if self._copies is not None:
                self._copies.done(rank, action, end)
            makes = self._phases[kind][microbatch % len(self._routes)][stage].makes
            if makes is not None:
                self._arrive(makes + microbatch, end)
        return True

    def _start(self, rank: int, phase: _StagePhase, microbatch: int) -> float | None:
        """Returns the time at which a rank can start a phase; None, and it waits, if not yet."""
        start = self._clocks[rank]
        for datum, delay in phase.needs:
            there = self._there[datum + microbatch]
            if there == _NOT_YET:
                self._waiting[datum + microbatch] = rank
                return None
            if there + delay > start:
                start = there + delay
        return start

    def _arrive(self, datum: int, when: float) -> None:
        self._there[datum] = when
        waiting = self._waiting.pop(datum, None)
        if waiting is not None:
            self._runnable.append(waiting)

    def _record(self, rank: int, start: float, end: float) -> None:
        self._starts[rank].append(start)
        self._ends[rank].append(end)
        self._clocks[rank] = end

    def _transfer(self, rank: int, end: Action) -> bool:
        """One end of a transfer between two ranks."""
        kind, stage, microbatch = end
        of_activation = kind in (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD)
        away = 1 if of_activation else -1
        source = stage if kind.is_send else stage - away
        datum = self._datum(_ACTIVATION_IN if of_activation else _GRADIENT_IN, source) + microbatch
        if self._buffers is None:
            # One end of a transfer that does not occupy its rank.
            clock = self._clocks[rank]
            self._record(rank, clock, clock)
            other = self._offered.pop(datum, None)
            if other is None:
                self._offered[datum] = (rank, clock)
            else:
                self._arrive(datum, max(clock, other[1]) + self._communication)
            return True
        if self._buffers == RENDEZVOUS:
            return self._meet(rank, datum)
        route = self._routes[microbatch % len(self._routes)]
        channel = (route[source], route[source + away])
        if kind.is_send:
            return self._send(rank, datum, channel, self._buffers)
        there = self._there[datum]
        if there == _NOT_YET:
            self._waiting[datum] = rank
            return False
        clock = max(self._clocks[rank], there)
        self._received.setdefault(channel, []).append(clock)
        self._record(rank, self._clocks[rank], clock)
        sender = self._full.pop(channel, None)
        if sender is not None:
            self._runnable.append(sender)
        return True

    def _meet(self, rank: int, datum: int) -> bool:
        """One end of a transfer for which both ranks wait."""
        other = self._offered.get(datum)
        if other is None or other[0] == rank:
            self._offered[datum] = (rank, self._clocks[rank])
            return False
        del self._offered[datum]
        start = max(self._clocks[rank], other[1])
        end = start + self._communication
        for one in (rank, other[0]):
            self._record(one, start, end)
        self._runnable.append(other[0])
        self._arrive(datum, end)
        return True

    def _send(self, rank: int, datum: int, channel: tuple[int, int], buffers: int) -> bool:
        """Runs a send with `buffers` (k) buffers: message n waits until message n-k is received."""
        sent = self._sent.get(channel, 0)
        received = self._received.setdefault(channel, [])
        before = sent - buffers
        if before >= len(received):
            self._full[channel] = rank
            return False
        clock = max(self._clocks[rank], received[before] if before >= 0 else 0.0)
        self._sent[channel] = sent + 1
        self._record(rank, clock, clock)
        self._arrive(datum, clock + self._communication)
        return True


class _Copies:
    """The lanes of each rank for copies to the host and back, one copy after the other on each.

    A copy to the host begins once its forward ends and its lane is free, one back at its RELOAD.
    """

    def __init__(self, table: Table, costs: Costs) -> None:
        self._times = costs.copy
        self._lanes = {
            kind: [0.0] * table.ranks for kind in (ActionKind.OFFLOAD, ActionKind.RELOAD)
        }  # free
        self._there: dict[Action, float] = {}  # the end of each copy
        self._leaving = {
            action[1:]
            for row in table.rows
            for action in actions_of(row)
            if action.kind is ActionKind.OFFLOAD
        }

    def done(self, rank: int, action: Action, end: float) -> None:
        """Starts the copy of a forward's activation to the host, if it is offloaded."""
        if action.kind is ActionKind.FORWARD and action[1:] in self._leaving:
            self._begin(rank, action._replace(kind=ActionKind.OFFLOAD), end)

    def take(self, rank: int, end: Action, clock: float) -> float:
        """Returns the time at which the rank continues after one end of a copy."""
        if end.kind is ActionKind.OFFLOAD:
            return max(clock, self._there.get(end, clock))
        self._begin(rank, end, clock)
        return clock

    def start_of(self, action: Action, ready: float) -> float:
        """Returns the start of a phase that is ready except for a copy from the host."""
        if action.kind is ActionKind.FORWARD or action.kind is ActionKind.WEIGHT_GRADIENT:
            return ready
        return max(ready, self._there.get(action._replace(kind=ActionKind.RELOAD), ready))

    def _begin(self, rank: int, copy: Action, clock: float) -> None:
        lanes = self._lanes[copy.kind]
        lanes[rank] = max(lanes[rank], clock) + self._times[copy.stage]
        self._there[copy] = lanes[rank]


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
        spans: list[float] = []
        for row, starts, ends in rows:
            # Transfers do not count: a receive that is posted early does not occupy the rank.
            computes = [at for at, step in enumerate(row) if _computes(step)]
            spans.append(ends[computes[-1]] - starts[computes[0]] if computes else 0.0)
        return tuple(spans)

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

        One is alive from its forward to its full backward, or to its weight gradient, on the device
        or on the host.
        """
        stages = self.table.stages
        counted = replace(costs(stages, kept=1), offloaded=(0.0,) * stages)
        return tuple(int(_peak(row, counted)) for row in self.table.rows)

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

    With `blocking`, a transfer occupies both ranks from the time both have reached it; with
    `buffers`, it occupies the sender until a buffer is free. Otherwise it overlaps with compute.
    Raises ToolError if the costs are for another number of stages, the table deadlocks, or
    `blocking` is set for a table without sends and receives.
    """
    if costs.stages != table.stages:
        raise ToolError(
            f"the costs have {costs.stages} stages, but the schedule has {table.stages}"
        )
    if blocking and not table.communicates and messages(table):
        raise ToolError(f"{table.name}: blocking transfers need a table with sends and receives")
    run = execute(table, costs, buffers if blocking else None)
    for rank, at in run.stuck.items():
        step = table.rows[rank][at]
        raise ToolError(f"{table.name}: rank {rank}, step {at}: {step} waits for ever")
    return Timeline(table, costs, run.starts, run.ends)


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
            if kind is ActionKind.FORWARD:
                count += stage < last and route[stage] != route[stage + 1]
            elif kind is ActionKind.BACKWARD or kind is ActionKind.INPUT_GRADIENT:
                count += stage > 0 and route[stage] != route[stage - 1]
    return count


def change_of_memory(action: Action, costs: Costs) -> float:
    """Returns the change, in bytes, of the memory that a rank holds by an action."""
    kind, stage, _ = action
    if kind is ActionKind.FORWARD:
        return costs.activation[stage]
    if kind is ActionKind.BACKWARD:
        return -costs.activation[stage]
    if kind is ActionKind.INPUT_GRADIENT:
        return costs.kept[stage] - costs.activation[stage]
    if kind is ActionKind.OFFLOAD:
        return -costs.offloaded[stage]
    if kind is ActionKind.RELOAD:
        return costs.offloaded[stage]
    return -costs.kept[stage] if kind is ActionKind.WEIGHT_GRADIENT else 0.0


def _peak(row: Row, costs: Costs) -> float:
    """Returns the peak bytes of a rank's activations.

    A pair allocates the new activation before it frees the old one.
    """
    alive = peak = 0.0
    for action in actions_of(row):
        alive += change_of_memory(action, costs)
        peak = max(peak, alive)
    return peak


def _computes(step: Step | None) -> bool:
    return step is not None and (not isinstance(step, Action) or step.kind.is_compute)


def _share(busy: float, whole: float) -> float:
    return 1 - busy / whole if whole else 0.0
