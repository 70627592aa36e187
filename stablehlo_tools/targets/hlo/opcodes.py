"""The opcodes of HLO, by what they cost. Pure Python."""

from __future__ import annotations

from stablehlo_tools.cost.work import WorkKind
from stablehlo_tools.targets.hlo.module import HloInstruction

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
