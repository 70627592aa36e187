"""Matrix products in HLO: dots, convolutions with their windows, and library calls for them.

XLA:TPU writes every dot as a convolution. A batch dimension is then a spatial dimension whose
window covers one element at each position.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stablehlo_tools.cost.kernels import Matmul
from stablehlo_tools.hlo_input.instructions import HloInstruction
from stablehlo_tools.hlo_input.shapes import Array
from stablehlo_tools.targets.hlo.module import HloComputation

_WINDOW = re.compile(r"window=\{([^}]*)\}")


@dataclass(frozen=True)
class ConvolutionWindow:
    """One dimension of a convolution's window."""

    stride: int = 1
    low: int = 0
    lhs_dilation: int = 1
    rhs_dilation: int = 1
    in_size: int = 1
    width: int = 1
    out_size: int = 1


def windows(instruction: HloInstruction, count: int) -> list[ConvolutionWindow]:
    """The window in each of `count` spatial dimensions, sizes not yet known."""
    window = _WINDOW.search(instruction.line, instruction.after_opcode)
    fields = dict(part.split("=") for part in window.group(1).split()) if window else {}
    parts = {name: text.split("x") for name, text in fields.items()}

    def entries(name: str, absent: str) -> Sequence[str]:
        return parts.get(name, [absent] * count)

    return [
        ConvolutionWindow(int(stride), int(pad.split("_")[0]), int(lhs), int(rhs))
        for stride, pad, lhs, rhs in zip(
            entries("stride", "1"),
            entries("pad", "0_0"),
            entries("lhs_dilate", "1"),
            entries("rhs_dilate", "1"),
            strict=True,
        )
    ]


@functools.cache
def met(window: ConvolutionWindow) -> int:
    """Returns how often window positions cover an element, not padding or a dilation gap.

    Source: `HloCostAnalysis::GetConvolutionFlops` counts the same.
    """
    total = 0
    last = (window.in_size - 1) * window.lhs_dilation
    for position in range(window.out_size):
        first = position * window.stride - window.low
        if window.lhs_dilation == 1 or window.rhs_dilation == 1:
            total += _meetings(first, last, window)
        else:
            reached = range(first, first + window.width * window.rhs_dilation, window.rhs_dilation)
            total += sum(0 <= at <= last and at % window.lhs_dilation == 0 for at in reached)
    return total


def _meetings(first: int, last: int, window: ConvolutionWindow) -> int:
    """Returns the count for one position of the output, if one of the dilations is 1."""
    if window.lhs_dilation == 1:
        step = window.rhs_dilation
        low = max(0, -(first // step))  # the first element of the window that is not below 0
        high = min(window.width - 1, (last - first) // step)
        return max(0, high - low + 1)
    step = window.lhs_dilation
    low = max(0, first)
    high = min(last, first + window.width - 1)
    return max(0, high // step - (low - 1) // step) if high >= low else 0


GEMM_TARGETS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$groupedMatmul")
CONVOLUTION_TARGETS = (
    "__cudnn$convForward",
    "__cudnn$convBiasActivationForward",
    "__cudnn$convForwardGraph",
    "__cudnn$convBackwardInput",
    "__cudnn$convBackwardFilter",
)

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_GROUPS = re.compile(r"(feature|batch)_group_count=(\d+)")
_PRECISION = re.compile(r'operand_precision"?[=:][{\[]"?(highest|high)\b', re.IGNORECASE)
_GEMM_DIMS = re.compile(
    r'"(lhs|rhs)_(contracting|batch)_dimensions":\[([^\]]*)\]'  # of dot_dimension_numbers
)


def matmul(instruction: HloInstruction, computation: HloComputation) -> Matmul | None:
    """Returns the product that an instruction computes; None if it computes none.

    Raises ToolError for a convolution or a library call in an unknown form.
    """
    opcode, target = instruction.opcode, instruction.target
    if opcode == "dot":
        dims = {
            (side, role): instruction.numbers(f"{side}_{role}_dims")
            for side in ("lhs", "rhs")
            for role in ("contracting", "batch")
        }
        return _dot(instruction, computation, dims)
    if opcode == "convolution":
        return _convolution(instruction, *_operands(instruction, computation))
    if opcode != "custom-call":
        return None
    if target.startswith(GEMM_TARGETS):
        dims = {
            (side, role): tuple(map(int, re.findall(r"\d+", numbers)))
            for side, role, numbers in _GEMM_DIMS.findall(instruction.line)
        }
        if ("lhs", "contracting") not in dims:
            raise instruction.error("a library product without dot_dimension_numbers")
        return _dot(instruction, computation, dims)
    if target.startswith(CONVOLUTION_TARGETS):
        return _library_convolution(instruction, computation)
    return None


def matmul_type(instruction: HloInstruction, computation: HloComputation) -> str:
    """The element type of a product's operands, in HLO's spelling."""
    return _operands(instruction, computation)[0].element_type


def precision(instruction: HloInstruction) -> str:
    """Returns the suffix for f32 of a product's precision (`_high`, `_highest`); "" by default."""
    asked = _PRECISION.search(instruction.line)
    return f"_{asked.group(1).lower()}" if asked else ""


def is_product(instruction: HloInstruction) -> bool:
    """Returns True if an instruction is a matrix product or a convolution."""
    return instruction.opcode in ("dot", "convolution") or (
        instruction.opcode == "custom-call"
        and instruction.target.startswith((*GEMM_TARGETS, *CONVOLUTION_TARGETS))
    )


def _operands(instruction: HloInstruction, computation: HloComputation) -> tuple[Array, Array]:
    if len(instruction.operands) < 2:
        raise instruction.error("a product of fewer than two operands")
    lhs, rhs = (computation.by_name[name].results[0] for name in instruction.operands[:2])
    return lhs, rhs


type _DotDims = dict[tuple[str, str], tuple[int, ...]]  # by (lhs or rhs, contracting or batch)


def _dot(instruction: HloInstruction, computation: HloComputation, dims: _DotDims) -> Matmul:
    lhs, rhs = _operands(instruction, computation)

    def extent(array: Array, side: str, role: str) -> int:
        return math.prod(array.dims[d] for d in dims.get((side, role), ()))

    batch, depth = extent(lhs, "lhs", "batch"), extent(lhs, "lhs", "contracting")
    rows = lhs.elements // max(1, batch * depth)
    columns = rhs.elements // max(1, batch * extent(rhs, "rhs", "contracting"))
    return Matmul(batch, rows, columns, depth)


def _labels(instruction: HloInstruction) -> tuple[str, str, str]:
    """Returns the orders of dimensions of a convolution's operands and result: `b01f_01io->b01f`.

    Raises ToolError if it has no dim_labels.
    """
    labels = _LABELS.search(instruction.line, instruction.after_opcode)
    if labels is None:
        raise instruction.error("a convolution without dim_labels")
    of_lhs, of_rhs, of_out = labels.groups()
    return of_lhs, of_rhs, of_out


def _convolution(instruction: HloInstruction, lhs: Array, rhs: Array) -> Matmul:
    of_lhs, of_rhs, of_out = _labels(instruction)
    result = instruction.results[0]
    groups = {name: int(n) for name, n in _GROUPS.findall(instruction.line)}
    features, batches = groups.get("feature", 1), groups.get("batch", 1)
    batch = features * batches
    m = result.dims[of_out.index("b")]
    n = result.dims[of_out.index("f")] // batch
    k = rhs.dims[of_rhs.index("i")]
    products = 1.0
    spatial = sorted(label for label in of_out if label.isdigit())
    for label, window in zip(spatial, windows(instruction, len(spatial)), strict=True):
        size = result.dims[of_out.index(label)]
        width = rhs.dims[of_rhs.index(label)]
        reach = lhs.dims[of_lhs.index(label)]
        hits = met(replace(window, in_size=reach, width=width, out_size=size))
        if width == 1 or hits != size or size == 1:
            m *= size
            products *= hits / size
        elif reach == 1:
            n *= size  # the whole kernel with a single element: columns
        else:
            batch *= size  # each position covers a different element
    return Matmul(batch, m, n, max(1, round(k * products)))


def _library_convolution(instruction: HloInstruction, computation: HloComputation) -> Matmul:
    """Returns cuDNN's product. Its labels are always those of the forward convolution."""
    of_lhs, of_rhs, of_out = _labels(instruction)
    first, second = _operands(instruction, computation)
    result = instruction.results[0]
    target = instruction.target
    kernel = result if "BackwardFilter" in target else second
    image = result if "BackwardInput" in target else first
    out = first if "BackwardInput" in target else second if "Filter" in target else result
    groups = {name: int(n) for name, n in _GROUPS.findall(instruction.line)}.get("feature", 1)
    positions = math.prod(d for d, label in zip(out.dims, of_out, strict=True) if label not in "f")
    columns = out.dims[of_out.index("f")] // groups
    depth = kernel.elements // max(1, kernel.dims[of_rhs.index("o")])
    if "BackwardFilter" in target:
        return Matmul(groups, depth, columns, positions)
    if "BackwardInput" in target:
        rows = math.prod(d for d, label in zip(image.dims, of_lhs, strict=True) if label not in "f")
        inner = image.dims[of_lhs.index("f")] // groups
        return Matmul(
            groups, rows, inner, max(1, round(positions * columns * depth / (rows * inner)))
        )
    return Matmul(groups, positions, columns, depth)
