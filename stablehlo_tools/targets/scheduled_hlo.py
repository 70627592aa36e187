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
    fusion(…), calls=%c                              XLA:TPU; %c holds the collective and may pass it
                                                     to an AsyncCollectiveStart or -Done custom call
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

TAG = "stablehlo_tools_id"  # the frontend attribute that carries the ids of the program's ops
TAG_MARK = "#id"  # what precedes an id in an op_name; the second carrier of the identity

COLLECTIVES = frozenset(
    {
        "all-gather",
        "all-reduce",
        "reduce-scatter",
        "all-to-all",
        "ragged-all-to-all",
        "collective-permute",
        "collective-broadcast",
    }
)
_TRANSFERS = frozenset({"send", "recv"})
_SYNCHRONOUS = COLLECTIVES | {"infeed", "outfeed"}
_WRAPPERS = frozenset({"async", "call", "fusion", "custom-call"})
_DESCENDED = frozenset({"while", "conditional", "call", "fusion"})

_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) ?\(.*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([^\s=]+) = ")
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")
_OPERAND = re.compile(r"%([^\s,()#]+)")
_CALLED = re.compile(
    r"[ {](calls|to_apply|body|condition|true_computation|false_computation)=%?([^\s,{}]+)"
)
_BRANCHES = re.compile(r" (?:branch_computations|called_computations)=\{([^}]*)\}")
_IDS = re.compile(TAG + r'="([\d,]*)"')
_OP_NAME = re.compile(r' ?op_name="((?:[^"\\]|\\.)*)"')
_MARKED_ID = re.compile(TAG_MARK + r"(\d+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CHAIN = re.compile(r'chain_id="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=([^,]*(?:\{.*?\}\}|\[[^\]]*\])?)")
_EVENT_LIMIT = 1_000_000


type Combined = Mapping[str, tuple[int, ...]]  # ids by instruction name
type Computations = dict[str, list[Instruction]]


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


@dataclass(frozen=True)
class Instruction:
    """One instruction that is a collective, finishes one, or may contain one."""

    name: str
    opcode: str
    line: str
    after_opcode: int  # where the operands begin in the line

    @property
    def operands(self) -> list[str]:
        """The names of the operands."""
        return _OPERAND.findall(self.line, self.after_opcode, self._end_of_operands())

    def _end_of_operands(self) -> int:
        depth = 0
        for index in range(self.after_opcode - 1, len(self.line)):
            depth += {"(": 1, ")": -1}.get(self.line[index], 0)
            if depth == 0:
                return index
        return len(self.line)

    def called(self) -> dict[str, list[str]]:
        """The computations that it calls, by the attribute that names them."""
        found: dict[str, list[str]] = {}
        for key, name in _CALLED.findall(self.line, self.after_opcode):
            found.setdefault(key, []).append(name)
        for names in _BRANCHES.findall(self.line, self.after_opcode):
            found["branches"] = [name.strip().lstrip("%") for name in names.split(",")]
        return found

    def tagged_ids(self) -> tuple[int, ...]:
        """The ids in its tag."""
        tags = _IDS.search(self.line, self.after_opcode)
        return tuple(int(i) for i in tags.group(1).split(",") if i) if tags else ()

    def marked_ids(self) -> tuple[int, ...]:
        """The ids marked in its op_name."""
        name = _OP_NAME.search(self.line, self.after_opcode)
        return tuple(map(int, _MARKED_ID.findall(name.group(1)))) if name else ()

    def op_name(self) -> str:
        """The op_name of the metadata, without the marks of the tagging."""
        found = _OP_NAME.search(self.line, self.after_opcode)
        name = _MARKED_ID.sub("", found.group(1)) if found else ""
        return name if re.search(r"\w", name) else ""

    def shape(self) -> str:
        """The result's shape, as printed."""
        start = self.line.index(" = ") + 3
        return self.line[start : self.after_opcode - len(self.opcode) - 2]

    def groups(self) -> str:
        """The replica groups or the source-target pairs, as printed."""
        found = _GROUPS.search(self.line, self.after_opcode)
        return found.group(1) if found else ""


class Identities:
    """Which ops of the program an instruction stands for.

    Its tag says so; where XLA dropped the tag, the dumps may (`combined`, by instruction name), or
    the op_name. The latter counts only for ids that no tag has: what the partitioner adds around
    a collective inherits that one's op_name.
    """

    def __init__(self, computations: Computations, combined: Combined) -> None:
        self.combined = combined
        self.tagged = {
            id_
            for instructions in computations.values()
            for instruction in instructions
            if instruction.opcode not in _DESCENDED  # a fusion has the tags of what it absorbed
            for id_ in instruction.tagged_ids()
        }

    def of(self, instruction: Instruction) -> tuple[tuple[int, ...], bool]:
        """The ids, and whether there may be others that are lost."""
        ids = instruction.tagged_ids() or self.combined.get(instruction.name, ())
        if ids:
            return ids, False
        marked = dict.fromkeys(i for i in instruction.marked_ids() if i not in self.tagged)
        return tuple(marked), bool(marked) and len(instruction.operands) > 1


def parse_schedule(text: str, combined: Combined | None = None) -> Schedule:
    """The schedule of a module in scheduled HLO text.

    `combined` is what `targets.combined` recovered for collectives whose tag XLA dropped. Raises ValueError for text that is no scheduled module.
    """
    header = text.lstrip()[:4096].partition("\n")[0]
    if not header.startswith("HloModule") or "is_scheduled=true" not in header:
        raise ValueError("not the text of a scheduled HLO module")
    computations, entry = parse_computations(text)
    builder = _Builder(computations, combined or {})
    nodes = builder.block(entry, ())
    return Schedule(nodes, tuple(builder.events))


def parse_computations(text: str) -> tuple[Computations, str]:
    """The instructions that matter here, by computation, and the entry computation's name."""
    computations: Computations = {}
    current: list[Instruction] | None = None
    entry = ""
    for line in text.splitlines():
        if not line or line[0] == "}":
            current = None
        elif line[0] not in " \t":
            header = _COMPUTATION.match(line)
            if header:
                current = computations.setdefault(header.group(2), [])
                entry = header.group(2) if header.group(1) else entry
        elif current is not None:
            instruction = _parse_instruction(line)
            if instruction is not None:
                current.append(instruction)
    if not entry:
        raise ValueError("the HLO text has no ENTRY computation")
    return computations, entry


def _parse_instruction(line: str) -> Instruction | None:
    name = _INSTRUCTION.match(line)
    opcode = _OPCODE.search(line, name.end() - 1) if name else None
    if name is None or opcode is None or not _matters(opcode.group(1), line):
        return None
    return Instruction(name.group(1), opcode.group(1), line, opcode.end())


def _matters(opcode: str, line: str) -> bool:
    if opcode in _SYNCHRONOUS or opcode in _TRANSFERS or opcode in _DESCENDED:
        return True
    if opcode == "custom-call":
        return TAG in line or "has_side_effect=true" in line or '"AsyncCollective' in line
    base, _, suffix = opcode.rpartition("-")
    if suffix not in ("start", "update", "done"):
        return False
    return base in COLLECTIVES or base in _TRANSFERS or base in _WRAPPERS


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
            self._continue(instruction, state)
        elif suffix == "done":
            yield from self._done(instruction, base, state)
        elif opcode in _TRANSFERS:
            yield self._begin(instruction, opcode, Phase.START, state)
        elif '"AsyncCollective' not in instruction.line:
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
        called = instruction.called()
        names = called.get("branches") or [
            *called.get("true_computation", []),
            *called.get("false_computation", []),
        ]
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
        if base in COLLECTIVES or base in _TRANSFERS:
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
            if opcode.removesuffix("-start") in _SYNCHRONOUS or opcode in _TRANSFERS:
                yield instruction
            elif opcode == "custom-call" and '"AsyncCollective' not in instruction.line:
                yield instruction
            else:
                for called in self._talking(instruction):
                    yield from self._collectives_within(called)

    def _continue(self, instruction: Instruction, state: _Block) -> None:
        for operand in instruction.operands[:1]:
            if operand in state.started:
                state.started[instruction.name] = state.started.pop(operand)

    def _done(self, instruction: Instruction, base: str, state: _Block) -> Iterator[Event]:
        for operand in instruction.operands[:1]:
            if operand in state.started:
                for start in state.started.pop(operand):
                    yield self._finish(instruction, base, start, state)
                return
        if base in COLLECTIVES or base in _TRANSFERS:
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
        if fallback is not None and (partial or not ids):
            outer, outer_partial = self.identities.of(fallback)
            if outer and not outer_partial:
                ids, partial = outer, False
        event = self._append(instruction, kind, phase, state, ids, partial, None)
        if kind in _TRANSFERS:
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
                instruction.opcode not in _DESCENDED
                and not _is_wrapper(instruction.opcode)
                or bool(self._talking(instruction))
                for instruction in self.computations.get(name, ())
            )
        return self.communicating[name]


def _is_wrapper(opcode: str) -> bool:
    base, _, suffix = opcode.rpartition("-")
    return suffix in ("start", "update", "done") and base in _WRAPPERS
