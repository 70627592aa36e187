"""Loops in HLO: the values that iterations carry, and the number of iterations.

The number is read from the loop itself: a counter that starts at a constant, grows by a constant
and is compared with a constant. XLA:TPU's loops over chunks of a product ("windowed dot general")
have this form. Pure Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stablehlo_tools.dialect.frontend_attributes import MEAN_RUNS, parsed_mean_runs
from stablehlo_tools.hlo_input.instructions import HloInstruction
from stablehlo_tools.overlap.bounds import iterations
from stablehlo_tools.overlap.task_graph import TaskGraph
from stablehlo_tools.targets.hlo.hlo_task_graph import (
    ArrayLeaf,
    GraphBuilder,
    Path,
    Value,
    element,
    rebuilt,
    starts_of,
)
from stablehlo_tools.targets.hlo.module import HloComputation, HloModule

_MEAN_RUNS = re.compile(rf'{MEAN_RUNS}="([^"]*)"')
_SAME = frozenset({"bitcast", "convert", "copy", "reshape", "copy-done", "optimization-barrier"})


@dataclass(frozen=True, slots=True)
class _CarriedElement:
    """An element of the loop's tuple, plus a constant offset."""

    index: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class _LoopCondition:
    """The comparison that a condition computes."""

    left: _Scalar
    right: _Scalar
    direction: str


type _Scalar = int | _CarriedElement | _LoopCondition | None
type _Bound = dict[str, _Scalar]


def trip_count(loop: HloInstruction, outer: HloComputation, module: HloModule) -> int | None:
    """Returns the number of iterations of a `while`; None if it is not known."""
    if loop.trips is not None:
        return loop.trips
    condition, body = (module.called_computation(loop, name) for name in ("condition", "body"))
    compared = _ScalarReader(module, condition, {}).scalar(condition.root.name)
    if not isinstance(compared, _LoopCondition):
        return None
    left, right, direction = compared.left, compared.right, compared.direction
    if isinstance(right, _CarriedElement) and not isinstance(left, _CarriedElement):
        left, right, direction = right, left, _MIRRORED.get(direction, direction)
    if not isinstance(left, _CarriedElement):
        return None
    first = _initial(loop, outer, module, left.index)
    step = _step(body, module, left.index)
    limit = right
    if isinstance(right, _CarriedElement):
        kept = _step(body, module, right.index) == 0
        start = _initial(loop, outer, module, right.index) if kept else None
        limit = None if start is None else start + right.offset
    if first is None or step is None or not isinstance(limit, int):
        return None
    return _count(first + left.offset, step, limit, direction)


def mean_runs(instruction: HloInstruction) -> float | None:
    """Returns the mean number of runs of a `while` or a branch; None if it is not stated."""
    runs = _MEAN_RUNS.search(instruction.line, instruction.after_opcode)
    return parsed_mean_runs(runs[1]) if runs else None


_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}


def _count(first: int, step: int, limit: int, direction: str) -> int | None:
    """Returns how many of first, first + step, … satisfy the comparison before the first fails."""
    distance = limit - first
    if direction in ("GT", "GE"):
        distance, step, direction = -distance, -step, {"GT": "LT", "GE": "LE"}[direction]
    if direction == "NE":
        return distance // step if step and distance % step == 0 and distance // step >= 0 else None
    if direction == "LE":
        distance += 1
    elif direction != "LT":
        return None
    if distance <= 0:
        return 0
    return -(-distance // step) if step > 0 else None


def _initial(
    loop: HloInstruction, outer: HloComputation, module: HloModule, index: int
) -> int | None:
    value = _ScalarReader(module, outer, {}).element(loop.operands[0], index)
    return value if isinstance(value, int) else None


def _step(body: HloComputation, module: HloModule, index: int) -> int | None:
    value = _ScalarReader(module, body, {}).element(body.root.name, index)
    return value.offset if isinstance(value, _CarriedElement) and value.index == index else None


class _ScalarReader:
    """Reads integer scalars of one computation; `bound` are the values of its parameters."""

    def __init__(self, module: HloModule, computation: HloComputation, bound: _Bound) -> None:
        self._module = module
        self._computation = computation
        self._known: _Bound = dict(bound)

    def element(self, name: str, index: int) -> _Scalar:
        """An element of a tuple."""
        instruction = self._computation.by_name.get(name)
        while instruction is not None and instruction.opcode in _SAME:
            instruction = self._computation.by_name.get(instruction.operands[0])
        if instruction is None:
            return None
        if instruction.opcode == "tuple" and index < len(instruction.operands):
            return self.scalar(instruction.operands[index])
        if instruction.opcode == "parameter":
            return _CarriedElement(index)
        return None

    def scalar(self, name: str) -> _Scalar:
        """The value of a scalar."""
        if name not in self._known:
            self._known[name] = None  # a cycle would be malformed HLO
            self._known[name] = self._read(name)
        return self._known[name]

    def _read(self, name: str) -> _Scalar:
        instruction = self._computation.by_name.get(name)
        if instruction is None:
            return None
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "constant":
            text = instruction.literal
            return int(text) if text.lstrip("-").isdigit() else None
        if opcode in _SAME:
            return self.scalar(operands[0])
        if opcode == "get-tuple-element":
            return self.element(operands[0], instruction.numbers("index")[0])
        if opcode == "fusion":
            return self._callee_scalar(instruction, "calls")
        if opcode == "call":
            return self._callee_scalar(instruction, "to_apply")
        if opcode in ("add", "subtract"):
            left, right, plus = self.scalar(operands[0]), self.scalar(operands[1]), opcode == "add"
            if isinstance(left, int) and isinstance(right, int):
                return left + right if plus else left - right
            if isinstance(left, _CarriedElement) and isinstance(right, int):
                return _CarriedElement(left.index, left.offset + (right if plus else -right))
            if isinstance(right, _CarriedElement) and isinstance(left, int) and plus:
                return _CarriedElement(right.index, right.offset + left)
        if opcode == "compare":
            direction = instruction.attribute("direction")
            return _LoopCondition(self.scalar(operands[0]), self.scalar(operands[1]), direction)
        return None

    def _callee_scalar(self, instruction: HloInstruction, attribute: str) -> _Scalar:
        called = self._module.called_computation(instruction, attribute)
        bound = {
            parameter.name: self.scalar(operand)
            for parameter, operand in zip(called.parameters, instruction.operands, strict=False)
        }
        return _ScalarReader(self._module, called, bound).scalar(called.root.name)


type Leaves = Mapping[Path, ArrayLeaf]  # of a loop's tuple, by their place in it


def carries(inputs: Leaves, last: Leaves) -> tuple[tuple[int, int], ...]:
    """The tasks of a body that are inputs, each with the one that makes its next value."""
    return tuple(
        (made.task, leaf.task)
        for path, leaf in last.items()
        if (made := inputs.get(path)) is not None
        and made.task is not None
        and leaf.task is not None
        and leaf.task != made.task
    )


def pair_waits(
    loop: HloInstruction, body: GraphBuilder, unpaired: Sequence[tuple[int, Path]], result: Value
) -> frozenset[int]:
    """Pairs the waits for starts of the previous iteration with these starts, and returns them.

    Raises ToolError if the body does not start the awaited value.
    """
    carried: set[int] = set()
    for wait, path in unpaired:
        last = element(result, path)
        starts = starts_of(last) if last is not None else ()
        if not starts:
            name = body.tasks[wait].name
            raise loop.error(f"{name} in its body waits for an op that was not started")
        body.tasks[wait] = replace(body.tasks[wait], start=starts[-1])
        carried.update(starts)
    return frozenset(carried)


def after_loop(value: Value, first: Leaves, inputs: Leaves, last: Leaves) -> Value:
    """Returns the result of a loop.

    Parts that the body only yields unchanged keep their value from before the loop. Parts that the
    last iteration starts are in flight, with the starts from before the loop.
    """

    def after(path: Path, leaf: ArrayLeaf) -> ArrayLeaf:
        before, inside = first.get(path), last.get(path)
        if before is None or inside is None:
            return leaf
        if path in inputs and inside.task == inputs[path].task:
            return before
        return replace(leaf, starts=before.starts if inside.starts else ())

    return rebuilt(value, after)


def length(graph: TaskGraph) -> float:
    """The time of all tasks of a graph, one after the other; a loop of unknown length runs once."""
    return sum(
        task.ns if task.loop is None else length(task.loop.body) * iterations(task.loop)
        for task in graph.tasks
    )
