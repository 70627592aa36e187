"""Reads the order of the collectives out of scheduled HLO text.

In a scheduled module the text order of a computation is the order in which a device issues its
instructions. This module turns that text into a tree of collective events. The events inside
another instruction (a `while`, a `conditional`, a `call`, an async wrapper, a fusion) are at the
position of that instruction. Pure Python: no MLIR and no jax here. Time and space are linear in the
text and in the events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from stablehlo_tools.hlo_input.async_forms import (
    COLLECTIVES,
    DESCENDED,
    ISSUED,
    SYNCHRONOUS,
    TRANSFERS,
    AsyncPhase,
    concerns_collectives,
    is_tpu_mark,
    may_hold_collectives,
    tpu_marks,
)
from stablehlo_tools.hlo_input.hlo_text import HloText
from stablehlo_tools.hlo_input.instructions import HloInstruction, parse_computations

_EVENT_LIMIT = 1_000_000

type Combined = Mapping[str, tuple[int, ...]]  # ids by instruction name
type Computations = dict[str, list[HloInstruction]]


@dataclass(frozen=True)
class CollectiveEvent:
    """One collective instruction at its place in the schedule.

    `position` counts events from 0 in issue order; loops and branches are entered once. `ids` are
    the program's ops that it represents: none if XLA added the collective, several if XLA merged
    them. `start` is the position that a DONE waits for; None if the text does not state it, because
    the start is in the previous iteration. `partial`: the tag of a collective with several operands
    is lost, and `ids` come from its op_name and may be incomplete.
    """

    position: int
    phase: AsyncPhase
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
        """True if the collective begins here."""
        return self.phase is not AsyncPhase.DONE


@dataclass(frozen=True)
class ScheduledLoop:
    """A `while`: the condition, then body and condition again; `trip_count` if XLA knows it."""

    condition: tuple[Node, ...]
    body: tuple[Node, ...]
    trip_count: int | None = None


@dataclass(frozen=True)
class Conditional:
    """A `conditional`: one of the branches runs."""

    branches: tuple[tuple[Node, ...], ...]


type Node = CollectiveEvent | ScheduledLoop | Conditional


@dataclass(frozen=True)
class HloSchedule:
    """The collective events of a scheduled module, as a tree and in issue order."""

    nodes: tuple[Node, ...]
    events: tuple[CollectiveEvent, ...]

    def done_positions(self) -> dict[int, int]:
        """From the position of a START to the position of its DONE."""
        return {e.start: e.position for e in self.events if e.start is not None}


def parse_schedule(text: str, combined: Combined | None = None) -> HloSchedule:
    """Returns the schedule of a module in scheduled HLO text.

    `combined` has the ids that `tagging` recovered for collectives whose tag XLA dropped. Raises
    ValueError if the text is not a scheduled module.
    """
    if not (text.lstrip().startswith("HloModule") and HloText(text).is_scheduled):
        raise ValueError("not the text of a scheduled HLO module")
    computations, entry = collective_computations(text)
    builder = _EventExpander(computations, combined or {})
    nodes = builder.block(entry, ())
    return HloSchedule(nodes, tuple(builder.events))


def collective_computations(text: str) -> tuple[Computations, str]:
    """The instructions that concern collectives, by computation, and the entry's name.

    Raises ValueError for text without an entry.
    """
    computations, entry = parse_computations(text)
    if not entry:
        raise ValueError("the HLO text has no ENTRY computation")
    return {n: list(filter(concerns_collectives, c)) for n, c in computations.items()}, entry


class Identities:
    """The ops of the program that an instruction represents.

    They are the ids in its tag. If XLA dropped the tag, they come from the dumps (`combined`, by
    instruction name) or the op_name. An id in an op_name counts only if no tag has it, because
    instructions that the partitioner adds around a collective inherit its op_name.
    """

    def __init__(self, computations: Computations, combined: Combined) -> None:
        self.combined = combined
        self.tagged = {
            id_
            for instructions in computations.values()
            for instruction in instructions
            if instruction.opcode not in DESCENDED  # a fusion has the tags of its instructions
            for id_ in instruction.tagged_ids
        }

    def instruction_ids(self, instruction: HloInstruction) -> tuple[tuple[int, ...], bool]:
        """Returns the ids, and True if others may be lost."""
        ids = instruction.tagged_ids or self.combined.get(instruction.name, ())
        if ids:
            return ids, False
        marked = dict.fromkeys(i for i in instruction.marked_ids if i not in self.tagged)
        return tuple(marked), bool(marked) and len(instruction.operands) > 1


@dataclass
class _OpenBlock:
    """A computation during expansion; `started` and `chains` are the positions of open starts."""

    computation: str
    nesting: tuple[str, ...]
    started: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    chains: dict[str, list[int]] = field(default_factory=dict[str, list[int]])


class _EventExpander:
    """Expands computations from the entry on, numbering the events."""

    def __init__(self, computations: Computations, combined: Combined) -> None:
        self.computations = computations
        self.identities = Identities(computations, combined)
        self.events: list[CollectiveEvent] = []
        self.communicating: dict[str, bool] = {}

    def block(self, name: str, nesting: tuple[str, ...]) -> tuple[Node, ...]:
        """The nodes of a computation, expanded at a place of the schedule."""
        state = _OpenBlock(name, nesting)
        return tuple(
            node
            for instruction in self.computations.get(name, ())
            for node in self._expand(instruction, state)
        )

    def _expand(self, instruction: HloInstruction, state: _OpenBlock) -> Iterator[Node]:
        opcode = instruction.opcode
        base, _, suffix = opcode.rpartition("-")
        if opcode == "while":
            called = instruction.callees_by_attribute()
            condition, body = called.get("condition", [""])[0], called.get("body", [""])[0]
            if self._talks(condition) or self._talks(body):
                yield ScheduledLoop(
                    self.block(condition, (*state.nesting, "while condition")),
                    self.block(body, (*state.nesting, "while body")),
                    instruction.trips,
                )
        elif opcode == "conditional":
            names = instruction.branches
            if any(self._talks(name) for name in names):
                nested = ((*state.nesting, f"branch {index}") for index in range(len(names)))
                yield Conditional(tuple(map(self.block, names, nested)))
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
            operand = next(iter(instruction.operands), "")
            if operand in state.started:
                for start in state.started.pop(operand):
                    yield self._finish(instruction, base, start, state)
            elif base in ISSUED:
                yield self._finish(instruction, base, None, state)
        elif opcode in TRANSFERS:
            yield self._begin(instruction, opcode, AsyncPhase.START, state)
        elif not is_tpu_mark(instruction):
            yield self._begin(instruction, opcode, AsyncPhase.SYNC, state)

    def _fusion(self, instruction: HloInstruction, state: _OpenBlock) -> Iterator[Node]:
        for name in self._talking(instruction):
            marks = tpu_marks(self.computations[name])
            for inner in self.computations[name]:
                if inner.opcode not in COLLECTIVES:
                    yield from self._expand(inner, _OpenBlock(name, state.nesting))
                elif inner.name in marks:
                    yield self._chain_event(inner, marks[inner.name][0], state)
                elif inner.chain is None:
                    yield self._begin(inner, inner.opcode, AsyncPhase.SYNC, state)
                # A chained collective without a mark is a step between its start and its done.

    def _chain_event(
        self, inner: HloInstruction, phase: AsyncPhase, state: _OpenBlock
    ) -> CollectiveEvent:
        key = f"{inner.opcode} {inner.marked_ids if inner.chain is None else inner.chain}"
        if phase is AsyncPhase.START:
            event = self._begin(inner, inner.opcode, AsyncPhase.START, state)
            state.chains.setdefault(key, []).append(event.position)
            return event
        opened = state.chains.get(key)
        return self._finish(inner, inner.opcode, opened.pop(0) if opened else None, state)

    def _start(
        self, instruction: HloInstruction, base: str, state: _OpenBlock
    ) -> Iterator[CollectiveEvent]:
        if base in ISSUED:
            event = self._begin(instruction, base, AsyncPhase.START, state)
            state.started[instruction.name] = [event.position]
            yield event
            return
        for name in self._talking(instruction):
            for wrapped in self._collectives_within(name):
                kind = wrapped.opcode.removesuffix("-start")
                own = _OpenBlock(name, state.nesting)
                event = self._begin(wrapped, kind, AsyncPhase.START, own, fallback=instruction)
                state.started.setdefault(instruction.name, []).append(event.position)
                yield event

    def _collectives_within(self, name: str) -> Iterator[HloInstruction]:
        """Yields the collectives that an async computation issues, at any depth of wrappers."""
        for instruction in self.computations.get(name, ()):
            opcode = instruction.opcode
            collective = opcode.removesuffix("-start") in SYNCHRONOUS or opcode in TRANSFERS
            if collective or (opcode == "custom-call" and not is_tpu_mark(instruction)):
                yield instruction
            else:
                for called in self._talking(instruction):
                    yield from self._collectives_within(called)

    def _begin(
        self,
        instruction: HloInstruction,
        kind: str,
        phase: AsyncPhase,
        state: _OpenBlock,
        fallback: HloInstruction | None = None,
    ) -> CollectiveEvent:
        ids, partial = self.identities.instruction_ids(instruction)
        # The async wrapper of a collective may keep the tag that the collective itself has lost.
        if fallback is not None and (partial or not ids):
            outer, outer_partial = self.identities.instruction_ids(fallback)
            if outer and not outer_partial:
                ids, partial = outer, False
        event = self._append(instruction, kind, phase, state, ids, partial, None)
        if kind in TRANSFERS:
            state.started[instruction.name] = [event.position]
        return event

    def _finish(
        self, instruction: HloInstruction, kind: str, start: int | None, state: _OpenBlock
    ) -> CollectiveEvent:
        if start is None:
            ids, partial = self.identities.instruction_ids(instruction)
        else:
            opened = self.events[start]
            kind, ids, partial = opened.kind, opened.ids, opened.partial
        return self._append(instruction, kind, AsyncPhase.DONE, state, ids, partial, start)

    def _append(
        self,
        instruction: HloInstruction,
        kind: str,
        phase: AsyncPhase,
        state: _OpenBlock,
        ids: tuple[int, ...],
        partial: bool,
        start: int | None,
    ) -> CollectiveEvent:
        if len(self.events) >= _EVENT_LIMIT:
            raise ValueError(f"the schedule has more than {_EVENT_LIMIT} collective events")
        event = CollectiveEvent(
            position=len(self.events),
            phase=phase,
            kind=kind,
            ids=ids,
            op_name=instruction.op_name,
            instruction=instruction.name,
            computation=state.computation,
            nesting=state.nesting,
            start=start,
            shape=instruction.shape,
            groups=instruction.groups,
            partial=partial,
        )
        self.events.append(event)
        return event

    def _talking(self, instruction: HloInstruction) -> list[str]:
        """The computations called by an instruction that hold a collective."""
        return [name for name in instruction.calls if self._talks(name)]

    def _talks(self, name: str) -> bool:
        """Returns True if a computation holds a collective, directly or in a callee."""
        if name not in self.communicating:
            self.communicating[name] = False  # a cycle would be malformed HLO
            self.communicating[name] = any(
                not may_hold_collectives(instruction.opcode) or bool(self._talking(instruction))
                for instruction in self.computations.get(name, ())
            )
        return self.communicating[name]
