"""The slices by partition that a collective's result reaches, each with the ops on its way."""

from __future__ import annotations

from dataclasses import dataclass, field

from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.create_reduce_scatter.windows import (
    BROADCAST,
    DYNAMIC_SLICE,
    ELEMENTWISE,
    RESHAPE,
    TRANSPOSE,
    Window,
    sliced_window,
    window_before,
)

_FOLLOWED = ELEMENTWISE | {BROADCAST, DYNAMIC_SLICE, RESHAPE, TRANSPOSE}
_LONGEST = 16  # ops between a collective and a slice
_MOST = 64  # ops looked at for one result


@dataclass(frozen=True)
class Step:
    """An op on the way: where the value enters, and what is taken of the op's result."""

    op: ir.Operation
    operand: int
    window: Window


@dataclass(frozen=True)
class Slice:
    """A dynamic_slice, the steps that lead to it, and the window of the value they start from."""

    op: ir.Operation
    steps: tuple[Step, ...]
    window: Window

    @property
    def touched(self) -> list[ir.Value]:
        """The results of the slice and of the steps: two rewrites must not share one."""
        return [self.op.results[0], *(step.op.results[0] for step in self.steps)]


@dataclass
class Slices:
    """`found`, in program order; `complete`: no use of the value ends in anything else."""

    found: list[Slice] = field(default_factory=list[Slice])
    complete: bool = True


def find_slices(value: ir.Value, values: DeviceValues) -> Slices:
    """Follows a value's uses in its block to slices whose windows are windows of the value."""
    search = _Search(value, values)
    search.follow(value, ())
    return search.slices


class _Search:
    def __init__(self, source: ir.Value, values: DeviceValues) -> None:
        owner = source.owner
        assert not isinstance(owner, ir.Block)
        self.block = owner.operation.block
        self.values = values
        self.slices = Slices()
        self.seen: set[ir.Value] = set()

    def follow(self, value: ir.Value, path: tuple[tuple[ir.Operation, int], ...]) -> None:
        uses = [(use.owner.operation, use.operand_number) for use in value.uses]
        if not uses:
            self.slices.complete = False
        for user, position in reversed(uses):  # MLIR lists the latest first
            if not self._enter(user, path):
                self.slices.complete = False
            elif user.name == DYNAMIC_SLICE:
                self._end(user, position, path)
            else:
                self.follow(user.results[0], (*path, (user, position)))

    def _enter(self, user: ir.Operation, path: tuple[tuple[ir.Operation, int], ...]) -> bool:
        """Whether the search may go on to an op; never twice to the same, as in `x * x`."""
        if len(user.results) != 1 or user.block != self.block:
            return False
        result = user.results[0]
        if result in self.seen or len(self.seen) == _MOST or len(path) == _LONGEST:
            return False
        self.seen.add(result)
        return user.name in _FOLLOWED

    def _end(
        self, user: ir.Operation, position: int, path: tuple[tuple[ir.Operation, int], ...]
    ) -> None:
        window = sliced_window(user, self.values) if position == 0 else None
        steps: list[Step] = []
        for op, operand in reversed(path):
            if window is None:
                break
            steps.append(Step(op, operand, window))
            window = window_before(op, operand, window)
        if window is None:
            self.slices.complete = False
            return
        self.slices.found.append(Slice(user, tuple(reversed(steps)), window))
