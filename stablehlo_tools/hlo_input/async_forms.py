"""The asynchronous forms of collectives in HLO, all read as one start and one done:

    all-gather(…)                                    XLA:CPU; XLA:GPU if it chose to wait
    all-gather-start(…) … all-gather-done(…)         also reduce-scatter, all-to-all, …
    async-start(…), calls=%c … async-done(…)         %c holds the collective
    send(…) … send-done(…), recv(…) … recv-done(…)
    fusion(…), calls=%c                              XLA:TPU; %c holds the collective

XLA:TPU splits a collective over fusions with the same `chain_id`. The first starts it: the
collective is an operand of AsyncCollectiveStart. Any number of fusions compute while it runs, and
the last finishes it (AsyncCollectiveDone). A collective in a fusion without either mark is
synchronous. Pure Python.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from stablehlo_tools.dialect.communication_kinds import RAGGED_ALL_TO_ALL
from stablehlo_tools.dialect.traits import COLLECTIVES as DIALECT_COLLECTIVES
from stablehlo_tools.dialect.traits import short_names
from stablehlo_tools.hlo_input.instructions import TAG, HloInstruction
from stablehlo_tools.hlo_input.shapes import Shape, TupleShape

COLLECTIVES = frozenset(
    name.replace("_", "-") for name in (*short_names(DIALECT_COLLECTIVES), RAGGED_ALL_TO_ALL)
)
TRANSFERS = frozenset({"send", "recv"})
ISSUED = COLLECTIVES | TRANSFERS
SYNCHRONOUS = COLLECTIVES | {"infeed", "outfeed"}
DESCENDED = frozenset({"while", "conditional", "call", "fusion"})
_WRAPPERS = frozenset({"async", "call", "fusion", "custom-call"})
_SUFFIXES = ("start", "update", "done")
TPU_START, TPU_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"


class AsyncPhase(enum.Enum):
    """The role of an event in its collective."""

    START = "start"
    DONE = "done"
    SYNC = "sync"  # issued and waited for in one instruction


def is_issued(instruction: HloInstruction) -> bool:
    """Returns True for a collective, the start of one, a send or a recv."""
    return instruction.opcode.removesuffix("-start") in ISSUED


def wraps_collective(instruction: HloInstruction) -> bool:
    """Returns True if an instruction of an async computation may call a collective."""
    opcode = instruction.opcode
    starts = opcode.endswith("-start") and not is_issued(instruction)
    return starts or opcode in ("fusion", "call")


def is_tpu_mark(instruction: HloInstruction) -> bool:
    """Returns True for the custom calls with which XLA:TPU marks asynchronous collectives."""
    return instruction.target.startswith("AsyncCollective")


def may_hold_collectives(opcode: str) -> bool:
    """Returns True if an opcode may call a computation that holds a collective."""
    base, _, suffix = opcode.rpartition("-")
    return opcode in DESCENDED or (suffix in _SUFFIXES and base in _WRAPPERS)


def concerns_collectives(instruction: HloInstruction) -> bool:
    """Returns True if an instruction is a collective, finishes one, or may hold one."""
    opcode = instruction.opcode
    if opcode == "custom-call":
        effect = TAG in instruction.line or "has_side_effect=true" in instruction.line
        return effect or is_tpu_mark(instruction)
    base, _, suffix = opcode.rpartition("-")
    ends = suffix in _SUFFIXES and base in ISSUED
    return opcode in SYNCHRONOUS or opcode in TRANSFERS or ends or may_hold_collectives(opcode)


def tpu_marks(
    instructions: Iterable[HloInstruction],
) -> dict[str, tuple[AsyncPhase, HloInstruction]]:
    """Returns the collectives that a fusion of XLA:TPU starts or finishes, by name, with marks."""
    phases = {TPU_START: AsyncPhase.START, TPU_DONE: AsyncPhase.DONE}
    return {
        name: (phases[mark.target], mark)
        for mark in instructions
        if mark.target in phases
        for name in mark.operands
    }


def result_path(opcode: str, shape: Shape) -> tuple[int, ...]:
    """Returns the tuple indices of the result in the shape of a start, or of a collective itself.

    A start returns `((operands), results, contexts …)`; of a single all-gather or permute,
    `(operand, result, contexts …)`. An all-reduce-start returns its results, a copy-start
    `(result, operand, context)`, a send or recv `(data, context, token)`.
    """
    if not isinstance(shape, TupleShape) or not shape.elements:
        return ()
    if opcode in ("copy-start", "send", "recv"):
        return (0,)
    if not opcode.endswith("-start") or len(shape.elements) < 2:
        return ()
    tupled = isinstance(shape.elements[0], TupleShape)
    single = opcode in ("all-gather-start", "collective-permute-start", "slice-start")
    return (1,) if tupled or single else ()


def result_shape(start: HloInstruction) -> Shape:
    """Returns the shape of the result: that of the done of a start, or of a collective itself."""
    shape = start.result
    for index in result_path(start.opcode, shape):
        assert isinstance(shape, TupleShape), "a path leads through tuples"
        shape = shape.elements[index]
    return shape
