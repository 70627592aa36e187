"""How long an op takes on one device, divided by a choice.

Coarser than `cost/`, which times kernels as compilers make them: a search asks for the time of each
op divided in thousands of ways, and what counts is the difference between two of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from stablehlo_tools.analysis.tasks.op_work import op_work, short_name
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.dialect.dimension_numbers import conv_numbers, scatter_numbers
from stablehlo_tools.dialect.names import CONVOLUTION, DOT_GENERAL, SCATTER
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.transforms.parts.partition.choosing.layouts import Atoms, Choice, Layout
from stablehlo_tools.transforms.parts.partition.op_rules import element_bytes

# Of the bytes that an op writes, as many go to memory where it becomes part of a kernel.
_FUSED = 0.5
# Times as long take kernels on padded parts: masks, sizes that fit no tile (17 % of a ViT's step).
_PADDED = 1.15
# Images of a convolution that a TPU keeps side by side, also where there are fewer.
_TILE = 8
# ns of a row of a scatter where XLA:TPU runs the rows one by one, in a loop of five kernels.
_ROW_NS = 5e3
# Of that, what counts where hardware is not told: a GPU's kernel takes no longer for many rows.
_ROW_SHARE = 0.1

_Sizes = tuple[tuple[int, int], ...]  # dimensions, with how long they are


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware, and what its compiler makes of some ops: the images of a convolution are filled up
    to `tile`, and each row of a scatter takes `row_ns`. `is_any`: it stands for all kinds."""

    hardware: Hardware
    is_any: bool
    tile: int
    row_ns: float

    @classmethod
    def of(cls, hardware: Hardware, *, is_any: bool) -> Self:
        """What is known of XLA for this hardware; of any, what XLA:TPU is slow at counts, too."""
        if hardware.is_torus:
            return cls(hardware, is_any, _TILE, _ROW_NS)
        if is_any:
            return cls(hardware, is_any, _TILE, _ROW_SHARE * _ROW_NS)
        return cls(hardware, is_any, 1, 0.0)


@dataclass(frozen=True, slots=True)
class OpTime:
    """What decides how long an op takes: the bytes of its tensors, operands first, and what it
    multiplies, of which type.

    `tiled` are the dimensions of the first operand that lie in tiles, `rows` those of the last one
    that count the windows of a scatter.
    """

    sizes: tuple[float, ...]
    operands: int
    written: float
    matrix_flops: float = 0.0
    dtype: str = ""
    tiled: _Sizes = ()
    rows: _Sizes = ()

    @classmethod
    def of(cls, op: ir.Operation) -> Self | None:
        """None of a product that nobody can time."""
        sizes, operands = tuple(map(bytes_of, (*op.operands, *op.results))), len(op.operands)
        written = sum(sizes[operands:])
        if op.name not in (DOT_GENERAL, CONVOLUTION):
            return cls(sizes, operands, written, rows=_rows(op))
        product = op_work(op, short_name(op)).matmul
        if product is None:
            return None
        dtype = str(element_of(op.operands[0]))
        return cls(sizes, operands, written, product.flops, dtype, tiled=_tiled(op))

    def ns(self, choice: Choice, atoms: Atoms, machine: Machine) -> float:
        """Of one run on one device."""
        padded = 1.0 if choice.is_even else _PADDED
        hardware = machine.hardware
        written = _FUSED * self.written / choice.parts / hardware.memory_rate
        if self.rows:
            rows = _held(self.rows, atoms, atoms.layouts[choice.layouts[self.operands - 1]])
            return padded * max(written, machine.row_ns * math.prod(rows))
        if not self.matrix_flops:
            return padded * written
        peak = hardware.peak(self.dtype) * hardware.matmul_model.efficiency
        multiplied = self.matrix_flops / choice.parts / peak
        if not self.tiled:  # a product of few rows takes as long as its weights are read
            parts = (atoms.held_parts[number] for number in choice.layouts)
            moved = sum(size / part for size, part in zip(self.sizes, parts, strict=True))
            return padded * max(multiplied, moved / hardware.memory_rate)
        for held in _held(self.tiled, atoms, atoms.layouts[choice.layouts[0]]):
            multiplied *= -(-held // machine.tile) * machine.tile / held
        return padded * max(written, multiplied)


def _held(sizes: _Sizes, atoms: Atoms, layout: Layout) -> list[int]:
    """How long dimensions are on one device."""
    return [max(1, -(-size // atoms.size(layout[dim]))) for dim, size in sizes]


def _tiled(op: ir.Operation) -> _Sizes:
    """Of an image its batch, and what is the batch where the gradient of a kernel is a
    convolution."""
    if op.name != CONVOLUTION:
        return ()
    numbers, shape = conv_numbers(op), shape_of(op.operands[0])
    return tuple((dim, shape[dim]) for dim in (numbers.input_batch, numbers.input_feature))


def _rows(op: ir.Operation) -> _Sizes:
    """Of a scatter that XLA:TPU makes a loop of: one whose windows have an indexed dimension (seen
    with libtpu 0.0.51: of 22 forms these five, of whatever type, reducer and number of indices)."""
    if op.name != SCATTER:
        return ()
    numbers = scatter_numbers(op)
    if set(numbers.index_map) <= set(numbers.inserted):
        return ()
    shape = shape_of(op.operands[len(op.operands) - 1])
    return tuple((dim, shape[dim]) for dim in numbers.batch_dims(len(shape)))


def bytes_of(value: ir.Value) -> float:
    """Of a whole value; 0 of what is no tensor."""
    if not isinstance(value.type, ir.RankedTensorType):
        return 0.0
    return math.prod(shape_of(value)) * element_bytes(value)
