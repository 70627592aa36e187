"""Points in time of a scheduled block that a barrier can hold on to.

XLA does not fuse across a barrier, so it stands where a kernel begins or ends in any case: before
a matrix product, a convolution, a kernel call or a loop, on the operand that is ready last; or
behind a reduction to something small, on its result. Should XLA have fused what makes the operand
into the op after all, the operand has to be written and read: where that takes long beside the op,
as the attention scores do that a product with the values reads, there is no anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import is_future
from stablehlo_tools.ir.values import key_of, producer
from stablehlo_tools.transforms.parts.schedule_overlap.block_plan import BlockPlan, Places

_BEFORE = frozenset({"stablehlo.convolution", "stablehlo.custom_call", "stablehlo.while"})
_DOT = "stablehlo.dot_general"
_REDUCE = "stablehlo.reduce"
_SMALLER = 16  # times: what a reduction to something small makes of its operand
_SHARE = 0.15  # of an op's time
_LEAST_NS = 20_000.0  # of a reduction: a shorter one is as good as a moment


@dataclass(frozen=True, slots=True)
class Anchor:
    """A moment: before an op, on its operands of these numbers, or behind it, on its result."""

    task: int
    op: ir.Operation
    place: int  # of the op in the block
    operands: tuple[int, ...]  # none: behind it
    time: float  # ns

    @property
    def served_from(self) -> int:
        """The place of the first op that can read what goes through a barrier here."""
        return self.place if self.operands else self.place + 1


def find_anchors(
    plan: BlockPlan,
    order: Sequence[int],
    begin: Sequence[float],
    ns: Sequence[float],
    copy_rate: float,
) -> list[Anchor]:
    """The anchors of a block in their order; `begin` and `ns` are those of the tasks.

    `copy_rate` is how many bytes memory reads or writes in a ns.
    """
    places = {key_of(op): place for place, op in enumerate(plan.order)}
    task_of = _tasks(plan, order)
    levels: dict[ir.Value | ir.Operation, int] = {}
    found: list[Anchor] = []
    for place, op in enumerate(plan.order):
        level = max((_level(operand, levels) for operand in op.operands), default=0)
        task = task_of.get(key_of(op))
        if task is not None and (op.name == _DOT or op.name in _BEFORE):
            numbers = [
                number
                for number in _ready_last(op, levels, places)
                if not _costs(op.operands[number], ns[task], copy_rate)
            ]
            if numbers and _ready_last(op, levels, places)[-1] in numbers:
                found.append(Anchor(task, op, place, tuple(numbers), begin[task]))
            level += 1
        elif task is not None and _is_behind(op) and ns[task] >= _LEAST_NS:
            found.append(Anchor(task, op, place, (), begin[task] + ns[task]))
        levels[key_of(op)] = level
    return found


def _tasks(plan: BlockPlan, order: Sequence[int]) -> Places:
    """The task that each op of the block stands in."""
    return {key_of(op): task for task in order for op in plan.ops[task]}


def _is_behind(op: ir.Operation) -> bool:
    if op.name != _REDUCE or len(op.results) != 1:
        return False
    return bytes_of(op.results[0]) * _SMALLER <= bytes_of(op.operands[0])


def _costs(value: ir.Value, ns: float, copy_rate: float) -> bool:
    """Whether to write and read a value, should a barrier make that necessary, takes long."""
    return 2 * bytes_of(value) / copy_rate > _SHARE * ns


def _level(value: ir.Value, levels: Places) -> int:
    """How many anchors in a row lead to a value."""
    maker = producer(value)
    return 0 if maker is None else levels.get(key_of(maker), 0)


def _ready_last(op: ir.Operation, levels: Places, places: Places) -> list[int]:
    """The numbers of the tensor operands that other anchors lead to, the last ready one last."""
    ranked = sorted(
        (_level(operand, levels), _place(operand, places), number)
        for number, operand in enumerate(op.operands)
        if isinstance(operand.type, ir.RankedTensorType) and not is_future(operand)
    )
    return [number for level, _, number in ranked if level] or [n for _, _, n in ranked[-1:]]


def _place(value: ir.Value, places: Places) -> int:
    maker = producer(value)
    return -1 if maker is None else places.get(key_of(maker), -1)
