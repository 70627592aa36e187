"""What is asked for of a value, and what it turns out to be."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stablehlo_tools.analysis.device_arithmetic import Values
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.transforms.parts.fold_pipeline.boxes import Box, Step, View


class UnresolvedError(Exception):
    """Why elements cannot be followed; `rule` is the precondition that this breaks."""

    def __init__(self, message: str, op: ir.Operation, rule: int) -> None:
        super().__init__(message)
        self.op = op
        self.rule = rule

    def error(self) -> ToolError:
        """The refusal."""
        return ToolError(f"fold-pipeline: {self} (P{self.rule})", self.op.location)


@dataclass(frozen=True)
class Outside:
    """A value from outside of the loop; for an argument of a manual computation, what it is a
    shard of along the axis of the stages."""

    value: ir.Value


@dataclass(frozen=True)
class Splat:
    """One number everywhere; `text` is that of the constant, `element` that of its type."""

    text: str
    element: str
    zero: bool


@dataclass(frozen=True)
class Known:
    """Integers that are known."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Computed:
    """What an op computed on a rank in a tick; `tick` is -1 outside of the loop."""

    value: ir.Value
    rank: int
    tick: int


Source = Outside | Splat | Known | Computed


@dataclass(frozen=True)
class Piece:
    """A box of a source, and where it is in what was asked for."""

    source: Source
    box: Box
    view: View


@dataclass(frozen=True)
class Item:
    """A box of a value that is still to be followed."""

    value: ir.Value
    rank: int
    tick: int
    box: Box
    view: View

    def at(self, value: ir.Value, box: Box) -> Item:
        """The same elements in another value."""
        return Item(value, self.rank, self.tick, box, self.view)

    def before(self, value: ir.Value, tick: int) -> Item:
        """The same elements in what a carry was in another tick."""
        return Item(value, self.rank, tick, self.box, self.view)

    def through(self, value: ir.Value, box: Box, step: Step) -> Item:
        """The same elements in the operand of a step."""
        return Item(value, self.rank, self.tick, box, self.view.behind(step))

    def part(self, op: ir.Operation, box: Box) -> Item:
        """A box of this one."""
        if box == self.box:
            return self
        inner = box.moved([-start for start in self.box.starts])
        view = self.view.part(inner)
        if view is None:
            raise UnresolvedError(
                "microbatches leave this op interleaved in a way that is not understood", op, 4
            )
        return replace(self, box=box, view=view)


def known_source(array: Values) -> Known:
    """Integers as a source."""
    return Known(str(array.dtype), array.shape, array.tobytes())


def zeros(element: ir.Type) -> Splat:
    """Zeros of an element type."""
    if isinstance(element, ir.FloatType):
        text = "dense<0.000000e+00>"
    elif isinstance(element, ir.ComplexType):
        text = "dense<(0.000000e+00,0.000000e+00)>"
    else:
        is_bool = isinstance(element, ir.IntegerType) and element.width == 1
        text = "dense<false>" if is_bool else "dense<0>"
    return Splat(text, str(element), True)
