"""What one HLO instruction has a device do: `Work` of the kernel that it becomes.

A fusion is one kernel. It reads its operands and writes its results, what is between them stays on
the chip; the products inside it are its matrix work, its other instructions vector work. Of an
operand that it only slices or gathers from, it reads what it takes; of a result that it updates in
place, it writes the update.

    bytes         of operands and results: `traffic`
    vector_flops  an operation for each element of each instruction, more where `OPERATIONS` says so
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from stablehlo_tools.cost.kernels import Matmul, Work, WorkKind
from stablehlo_tools.targets.hlo.matmul import is_product, matmul, matmul_type, precision
from stablehlo_tools.targets.hlo.module import Computation, HloInstruction, HloModule
from stablehlo_tools.targets.hlo.shapes import stablehlo_type
from stablehlo_tools.targets.hlo.traffic import bytes_alone, fusion_bytes
from stablehlo_tools.targets.hlo_text import COLLECTIVES

_NO_KERNEL = """
    parameter constant bitcast tuple get-tuple-element after-all create-token add-dependency domain
    opt-barrier optimization-barrier partition-id replica-id get-dimension-size set-dimension-size
"""
_ELEMENTWISE = """
    abs acos acosh add and asin asinh atan2 atanh bitcast-convert broadcast cbrt ceil clamp compare
    complex convert cosine cosh count-leading-zeros divide erf exponential exponential-minus-one
    floor imag iota is-finite log log-plus-one logistic map maximum minimum multiply negate not or
    popcnt power real reduce-precision remainder rng rng-bit-generator rng-get-and-update-state
    round-nearest-afz round-nearest-even rsqrt select shift-left shift-right-arithmetic
    shift-right-logical sign sine sinh sqrt stochastic-convert subtract tan tanh xor
"""
_COPIES = """
    concatenate copy dynamic-reshape dynamic-slice dynamic-update-slice pad reshape reverse slice
    transpose
"""

REDUCTIONS = frozenset({"reduce", "reduce-window", "scan", "select-and-scatter"})

# What bounds an instruction that is a kernel.
KINDS: dict[str, WorkKind] = {
    **dict.fromkeys(_ELEMENTWISE.split(), WorkKind.ELEMENTWISE),
    **dict.fromkeys(_COPIES.split(), WorkKind.COPY),
    **dict.fromkeys(REDUCTIONS, WorkKind.REDUCTION),
    **dict.fromkeys(("gather", "scatter"), WorkKind.GATHER),
    "sort": WorkKind.SORT,
    "topk": WorkKind.SORT,
    "dot": WorkKind.MATMUL,
    "convolution": WorkKind.CONVOLUTION,
    **dict.fromkeys(("cholesky", "custom-call", "fft", "triangular-solve"), WorkKind.OTHER),
}

# Operations for an element, where it is more than one: polynomials of about these lengths.
# This is a measure of costs, not of meanings, and so stands here.
OPERATIONS: dict[str, int] = {
    **dict.fromkeys(("divide", "sqrt", "rsqrt", "remainder"), 4),
    **dict.fromkeys(("exponential", "exponential-minus-one", "log", "log-plus-one", "cbrt"), 8),
    **dict.fromkeys(("logistic", "tanh", "erf", "sine", "cosine", "tan"), 12),
    **dict.fromkeys(("power", "atan2"), 16),
    **dict.fromkeys(("rng", "rng-bit-generator"), 32),
}

_WITHOUT_KERNEL = frozenset(_NO_KERNEL.split())
_TARGETS_WITHOUT_KERNEL = (
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "AsyncCollective",
    "ConcatBitcast",
    "CreateBuffer",
    "Pin",
    "SPMD",
    "Sharding",
    "Unpin",
    "annotate_device_placement",
    "xla.sdy",
)


def is_free(instruction: HloInstruction) -> bool:
    """Whether an instruction is no kernel: a view, a marker, a buffer that is set aside."""
    if instruction.opcode == "custom-call":
        return instruction.target.startswith(_TARGETS_WITHOUT_KERNEL)
    return instruction.opcode in _WITHOUT_KERNEL


# Operations an element of a reduction in XLA:TPU's tiled arrays, which goes across the rows and
# lanes of registers; fitted to libtpu 0.0.51's estimated_cycles (benchmarks/tpu_validity.py).
_TILED_REDUCTION = 36

FREE = Work(WorkKind.FREE)

_NESTED = frozenset({"fusion", "call"})

# The kind of a fusion is the first of these that it holds.
_TELLING = (
    WorkKind.CONVOLUTION,
    WorkKind.MATMUL,
    WorkKind.SORT,
    WorkKind.GATHER,
    WorkKind.REDUCTION,
    WorkKind.ELEMENTWISE,
    WorkKind.COPY,
)


def work(instruction: HloInstruction, computation: Computation, module: HloModule) -> Work:
    """The work of one instruction of a schedule that is a kernel of its own, or FREE.

    Raises ToolError for an opcode that is not known.
    """
    opcode = instruction.opcode
    if is_free(instruction) or _is_scalar(instruction, computation):
        return FREE
    if opcode in ("fusion", "fusion-start"):
        return _of_fusion(instruction, computation, module)
    if opcode not in KINDS:
        raise instruction.error("no time is known for this opcode")
    product = matmul(instruction, computation)
    moved = bytes_alone(instruction, computation)
    if product is not None:
        kind = WorkKind.MATMUL if opcode != "convolution" else _product_kind(instruction)
        dtype = _product_type(instruction, computation)
        return Work(kind, moved, 0.0, (product,), dtype)
    return Work(
        KINDS[opcode],
        moved,
        _operations(instruction, computation),
        (),
        _result_type(instruction),
    )


def _is_scalar(instruction: HloInstruction, computation: Computation) -> bool:
    """Whether XLA:TPU leaves an instruction to the scalar core, beside which its kernels run."""
    operands = [a for name in instruction.operands for a in computation.by_name[name].results]
    return (
        instruction.opcode in ("fusion", *KINDS)
        and all(array.elements == 1 and array.tiles for array in instruction.results)
        and all(array.elements == 1 for array in operands)
    )


def _operations(instruction: HloInstruction, computation: Computation) -> float:
    """The vector operations of an instruction that is no product."""
    opcode = instruction.opcode
    if opcode in REDUCTIONS or opcode == "sort":
        array = computation.by_name[instruction.operands[0]].results[0]
        per_element = 1.0
        if opcode != "reduce":
            array = max((array, instruction.results[0]), key=lambda a: a.elements)
            per_element = _window_size(instruction)
        if opcode == "sort":
            depth = math.log2(max(2, max(array.dims, default=1)))
            per_element = depth * (depth + 1) / 2
        if opcode == "reduce" and array.tiles:
            per_element = _TILED_REDUCTION
        return math.prod(array.padded) * per_element * max(1, len(instruction.operands) // 2)
    each = OPERATIONS.get(opcode, 1)
    return each * sum(math.prod(array.padded) for array in instruction.results)


def _window_size(instruction: HloInstruction) -> float:
    size = instruction.attribute("window").partition("size=")[2].split(" ")[0].strip("}")
    return math.prod(int(part) for part in size.split("x")) if size else 1


def _result_type(instruction: HloInstruction) -> str:
    results = instruction.results
    return stablehlo_type(results[0].element_type) if results else "f32"


def _product_kind(instruction: HloInstruction) -> WorkKind:
    """A convolution whose window is wider than a batch dimension of XLA:TPU's dots makes it."""
    spatial = instruction.attribute("window").count("x")
    labels = instruction.attribute("dim_labels")
    image = labels.startswith(("b01f", "b0f", "b012f")) and spatial >= 1
    return WorkKind.CONVOLUTION if image else WorkKind.MATMUL


def fused(
    instruction: HloInstruction, module: HloModule
) -> Iterator[tuple[HloInstruction, Computation]]:
    """The instructions inside a fusion, nested fusions opened, each with its computation."""
    for name in instruction.calls:
        computation = module.computation(name, instruction)
        for inner in computation.instructions:
            if inner.opcode in _NESTED:
                yield from fused(inner, module)
            else:
                yield inner, computation


def _of_fusion(instruction: HloInstruction, outer: Computation, module: HloModule) -> Work:
    inside = list(fused(instruction, module))
    products: list[Matmul] = []
    dtype = ""
    vector = 0.0
    kinds: set[WorkKind] = set()
    for inner, computation in inside:
        if is_product(inner):
            product = matmul(inner, computation)
            assert product is not None
            products.append(product)
            dtype = dtype or _product_type(inner, computation)
            kinds.add(_product_kind(inner) if inner.opcode == "convolution" else WorkKind.MATMUL)
        elif inner.opcode in KINDS and not is_free(inner):
            vector += _operations(inner, computation)
            kinds.add(KINDS[inner.opcode])
        elif not is_free(inner) and inner.opcode not in COLLECTIVES:
            raise inner.error(f"no time is known for this opcode, in fusion {instruction.name}")
    moved = fusion_bytes(instruction, outer, module)
    kind = next((kind for kind in _TELLING if kind in kinds), WorkKind.COPY)
    return Work(kind, moved, vector, tuple(products), dtype or _result_type(instruction))


def _product_type(instruction: HloInstruction, computation: Computation) -> str:
    """The element type that a product is computed in, with its precision."""
    dtype = stablehlo_type(matmul_type(instruction, computation))
    return dtype + precision(instruction) if dtype == "f32" else dtype
