"""Reads the order of the collectives out of scheduled HLO text.

In a scheduled module the text order of a computation is the order in which a device issues its
instructions. This module turns that text into a tree of collective events, with everything that
runs inside another instruction (a `while`, a `conditional`, a `call`, an async wrapper, a fusion)
standing where that instruction stands. Pure Python: no MLIR and no jax here; time and space are
linear in the text and in the events.

The forms that the compilers write, all read as one start and one done, or one sync event:

    all-gather(…)                                    XLA:CPU; XLA:GPU where it chose to wait
    all-gather-start(…) … all-gather-done(…)         also reduce-scatter, all-to-all, …
    async-start(…), calls=%c … async-done(…)         %c holds the collective
    send(…) … send-done(…), recv(…) … recv-done(…)
    fusion(…), calls=%c                              XLA:TPU; %c holds the collective and passes it
                                                     to AsyncCollectiveStart or -Done, or neither
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from stablehlo_tools.targets.hlo_text import (
    ASYNC_MARKER,
    COLLECTIVES,
    DESCENDED,
    SYNCHRONOUS,
    TRANSFERS,
    WRAPPERS,
    Combined,
    Computations,
    Identities,
    Instruction,
    parse_computations,
)

_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CHAIN = re.compile(r'chain_id="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_EVENT_LIMIT = 1_000_000


class Phase(enum.Enum):
    """What an event is to its collective."""

    START = "start"
    DONE = "done"
    SYNC = "sync"  # issued and waited for in one instruction


@dataclass(frozen=True)
class Event:
    """One collective instruction at its place in the schedule.

    `position` counts events from 0 in issue order, loops and branches entered once. `ids` are the
    program's ops it stands for: none for a collective that XLA added, several where XLA merged
    them. `start` is the position that a DONE waits for, None where the text does not tell (the
    start lies in the loop iteration before). `partial` says that the tag of a collective of
    several operands is lost and that `ids`, which are those of its op_name, may lack some.
    """

    position: int
    phase: Phase
    kind: str
    ids: tuple[int, ...]
    op_name: str
    instruction: str
    computation: str
    nesting: tuple[str, ...] = ()
    start: int | None = None
    shape: str = ""
    groups: str = ""
    partial: bool = False

    @property
    def issues(self) -> bool:
        """Whether the collective begins here."""
        return self.phase is not Phase.DONE


@dataclass(frozen=True)
class Loop:
    """A `while`: the condition, then body and condition again; `trip_count` where XLA knows it."""

    condition: tuple[Node, ...]
    body: tuple[Node, ...]
    trip_count: int | None = None


@dataclass(frozen=True)
class Choice:
    """A `conditional`: one of the branches runs."""

    branches: tuple[tuple[Node, ...], ...]


type Node = Event | Loop | Choice


@dataclass(frozen=True)
class Schedule:
    """The collective events of a scheduled module, as a tree and in issue order."""

    nodes: tuple[Node, ...]
    events: tuple[Event, ...]

    def done_positions(self) -> dict[int, int]:
        """From the position of a START to the position of its DONE."""
        return {e.start: e.position for e in self.events if e.start is not None}


def parse_schedule(text: str, combined: Combined | None = None) -> Schedule:
    """The schedule of a module in scheduled HLO text.

    `combined` is what `tagging` recovered for collectives whose tag XLA dropped. Raises
    ValueError for text that is no scheduled module.
    """
    header = text.lstrip()[:4096].partition("\n")[0]
    if not header.startswith("HloModule") or "is_scheduled=true" not in header:
        raise ValueError("not the text of a scheduled HLO module")
    computations, entry = parse_computations(text)
    builder = _Builder(computations, combined or {})
    nodes = builder.block(entry, ())
    return Schedule(nodes, tuple(builder.events))


@dataclass
class _Block:
    """What is open while a computation is expanded: positions of starts, by name and by chain."""

    computation: str
    nesting: tuple[str, ...]
    started: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    chains: dict[str, list[int]] = field(default_factory=dict[str, list[int]])


class _Builder:
    """Expands computations from the entry on, numbering the events."""

    def __init__(self, computations: Computations, combined: Combined) -> None:
        self.computations = computations
        self.identities = Identities(computations, combined)
        self.events: list[Event] = []
        self.communicating: dict[str, bool] = {}

    def block(self, name: str, nesting: tuple[str, ...]) -> tuple[Node, ...]:
        """The nodes of a computation, expanded at a place of the schedule."""
        state = _Block(name, nesting)
        return tuple(
            node
            for instruction in self.computations.get(name, ())
            for node in self._expand(instruction, state)
        )

    def _expand(self, instruction: Instruction, state: _Block) -> Iterator[Node]:
        opcode = instruction.opcode
        base, _, suffix = opcode.rpartition("-")
        if opcode == "while":
            yield from self._loop(instruction, state)
        elif opcode == "conditional":
            yield from self._choice(instruction, state)
        elif opcode == "call":
            for name in self._talking(instruction):
                yield from self.block(name, state.nesting)
        elif opcode == "fusion":
            yield from self._fusion(instruction, state)
        elif suffix == "start":
            yield from self._start(instruction, base, state)
        elif suffix == "update":
            for operand in instruction.operands[:1]:
                if operand in state.started:
                    state.started[instruction.name] = state.started.pop(operand)
        elif suffix == "done":
            yield from self._done(instruction, base, state)
        elif opcode in TRANSFERS:
            yield self._begin(instruction, opcode, Phase.START, state)
        elif not _is_async_marker(instruction):
            yield self._begin(instruction, opcode, Phase.SYNC, state)

    def _loop(self, instruction: Instruction, state: _Block) -> Iterator[Loop]:
        called = instruction.called()
        condition, body = called.get("condition", [""])[0], called.get("body", [""])[0]
        if not (self._talks(condition) or self._talks(body)):
            return
        trips = _TRIP_COUNT.search(instruction.line)
        first = self.block(condition, (*state.nesting, "while condition"))
        yield Loop(
            first,
            self.block(body, (*state.nesting, "while body")),
            int(trips.group(1)) if trips else None,
        )

    def _choice(self, instruction: Instruction, state: _Block) -> Iterator[Choice]:
        names = instruction.branches()
        if any(self._talks(name) for name in names):
            yield Choice(
                tuple(
                    self.block(name, (*state.nesting, f"branch {index}"))
                    for index, name in enumerate(names)
                )
            )

    def _fusion(self, instruction: Instruction, state: _Block) -> Iterator[Node]:
        for name in self._talking(instruction):
            roles = self._async_roles(name)
            for inner in self.computations[name]:
                chain = _CHAIN.search(inner.line)
                if inner.opcode not in COLLECTIVES:
                    yield from self._expand(inner, _Block(name, state.nesting))
                elif inner.name in roles:
                    yield from self._chained(inner, roles[inner.name], chain, state)
                elif chain is None:
                    yield self._begin(inner, inner.opcode, Phase.SYNC, state)
                # A chained collective with no role is a step between its start and its done.

    def _async_roles(self, computation: str) -> dict[str, Phase]:
        """Which collectives of a fused computation feed AsyncCollectiveStart, which -Done."""
        roles: dict[str, Phase] = {}
        for inner in self.computations[computation]:
            target = _TARGET.search(inner.line) if inner.opcode == "custom-call" else None
            if target and target.group(1) in ("AsyncCollectiveStart", "AsyncCollectiveDone"):
                phase = Phase.START if target.group(1).endswith("Start") else Phase.DONE
                roles.update(dict.fromkeys(inner.operands, phase))
        return roles

    def _chained(
        self, inner: Instruction, phase: Phase, chain: re.Match[str] | None, state: _Block
    ) -> Iterator[Event]:
        key = f"{inner.opcode} {chain.group(1) if chain else inner.marked_ids()}"
        if phase is Phase.START:
            event = self._begin(inner, inner.opcode, Phase.START, state)
            state.chains.setdefault(key, []).append(event.position)
            yield event
            return
        opened = state.chains.get(key)
        yield self._finish(inner, inner.opcode, opened.pop(0) if opened else None, state)

    def _start(self, instruction: Instruction, base: str, state: _Block) -> Iterator[Event]:
        if base in COLLECTIVES or base in TRANSFERS:
            event = self._begin(instruction, base, Phase.START, state)
            state.started[instruction.name] = [event.position]
            yield event
            return
        inner = [
            (name, wrapped)
            for name in self._talking(instruction)
            for wrapped in self._collectives_within(name)
        ]
        for name, wrapped in inner:
            kind = wrapped.opcode.removesuffix("-start")
            own = _Block(name, state.nesting)
            event = self._begin(wrapped, kind, Phase.START, own, fallback=instruction)
            state.started.setdefault(instruction.name, []).append(event.position)
            yield event

    def _collectives_within(self, name: str) -> Iterator[Instruction]:
        """The collectives that an async computation issues, however it wraps them."""
        for instruction in self.computations.get(name, ()):
            opcode = instruction.opcode
            collective = opcode.removesuffix("-start") in SYNCHRONOUS or opcode in TRANSFERS
            if collective or (opcode == "custom-call" and not _is_async_marker(instruction)):
                yield instruction
            else:
                for called in self._talking(instruction):
                    yield from self._collectives_within(called)

    def _done(self, instruction: Instruction, base: str, state: _Block) -> Iterator[Event]:
        for operand in instruction.operands[:1]:
            if operand in state.started:
                for start in state.started.pop(operand):
                    yield self._finish(instruction, base, start, state)
                return
        if base in COLLECTIVES or base in TRANSFERS:
            yield self._finish(instruction, base, None, state)

    def _begin(
        self,
        instruction: Instruction,
        kind: str,
        phase: Phase,
        state: _Block,
        fallback: Instruction | None = None,
    ) -> Event:
        ids, partial = self.identities.of(instruction)
        # The async wrapper of a collective may keep the tag that the collective itself has lost.
        if fallback is not None and (partial or not ids):
            outer, outer_partial = self.identities.of(fallback)
            if outer and not outer_partial:
                ids, partial = outer, False
        event = self._append(instruction, kind, phase, state, ids, partial, None)
        if kind in TRANSFERS:
            state.started[instruction.name] = [event.position]
        return event

    def _finish(
        self, instruction: Instruction, kind: str, start: int | None, state: _Block
    ) -> Event:
        if start is None:
            ids, partial = self.identities.of(instruction)
        else:
            opened = self.events[start]
            kind, ids, partial = opened.kind, opened.ids, opened.partial
        return self._append(instruction, kind, Phase.DONE, state, ids, partial, start)

    def _append(
        self,
        instruction: Instruction,
        kind: str,
        phase: Phase,
        state: _Block,
        ids: tuple[int, ...],
        partial: bool,
        start: int | None,
    ) -> Event:
        if len(self.events) >= _EVENT_LIMIT:
            raise ValueError(f"the schedule has more than {_EVENT_LIMIT} collective events")
        event = Event(
            position=len(self.events),
            phase=phase,
            kind=kind,
            ids=ids,
            op_name=instruction.op_name(),
            instruction=instruction.name,
            computation=state.computation,
            nesting=state.nesting,
            start=start,
            shape=instruction.shape(),
            groups=instruction.groups(),
            partial=partial,
        )
        self.events.append(event)
        return event

    def _talking(self, instruction: Instruction) -> list[str]:
        """The computations called by an instruction that hold a collective."""
        names = [name for group in instruction.called().values() for name in group]
        return [name for name in names if self._talks(name)]

    def _talks(self, name: str) -> bool:
        """Whether a computation holds a collective, itself or through what it calls."""
        if name not in self.communicating:
            self.communicating[name] = False  # a cycle would be malformed HLO
            self.communicating[name] = any(
                not _may_contain(instruction.opcode) or bool(self._talking(instruction))
                for instruction in self.computations.get(name, ())
            )
        return self.communicating[name]


def _may_contain(opcode: str) -> bool:
    """Whether an instruction is no collective but may call one."""
    base, _, suffix = opcode.rpartition("-")
    return opcode in DESCENDED or (suffix in ("start", "update", "done") and base in WRAPPERS)


def _is_async_marker(instruction: Instruction) -> bool:
    """Whether this is one of the custom calls that XLA:TPU marks async collectives with."""
    return ASYNC_MARKER in instruction.line
