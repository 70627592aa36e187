"""Detects softmax attention that is spelled out, although a fused kernel would compute it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod

from stablehlo_tools.advice.advised_program import AdvisedProgram
from stablehlo_tools.advice.devices import kernels_of
from stablehlo_tools.analysis.tasks.op_work import bytes_of, op_work, short_name
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import duration, size
from stablehlo_tools.dialect.names import BROADCAST, DOT_GENERAL, RESHAPE, TRANSPOSE
from stablehlo_tools.dialect.traits import ELEMENTWISE
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import ops_named
from stablehlo_tools.report.document import Advice
from stablehlo_tools.report.schedule_table import count_text

_FOLLOWED = ELEMENTWISE | {BROADCAST, RESHAPE, TRANSPOSE}
_MOST_FOLLOWED = 64  # ops between the exponential and a product
_LEAST_DIMS = 3  # of scores: a batch or heads, queries, keys
_ON_GPU = (
    'jax.nn.dot_product_attention(query, key, value, ..., implementation="cudnn") computes it in '
    "one kernel (bfloat16 or float16)"
)
_ON_TPU = (
    "jax.experimental.pallas.ops.tpu.flash_attention.flash_attention(query, key, value, ...) "
    "computes it in one kernel"
)


def spelled_out_attention(program: AdvisedProgram) -> Iterator[Advice]:
    """Detects attention whose scores are written to memory.

    The gain is the time of all kernels on scores except products. In a training step, a fused
    kernel computes the scores once more, which is subtracted.
    """
    softmaxes: dict[tuple[int, ...], ir.Operation] = {}
    for op in ops_named(program.explicit.module.operation, {"stablehlo.exponential"}):
        shape = _dims(op.results[0])
        if shape and _is_between_products(op):
            softmaxes.setdefault(shape, op)
    kernels = list(kernels_of(program.traced))
    for shape, softmax in softmaxes.items():
        own = [k for k in kernels if shape in map(_dims, (*k.op.operands, *k.op.results))]
        others = [k for k in own if not k.is_product]
        made = [k for k in own if k.is_product and _dims(k.op.results[0]) == shape]
        count = sum(k.times for k in made)
        used = sum(k.times for k in own if k.is_product) - count
        # A layer makes scores and uses them once. A backward makes one more product of this shape
        # and uses three, and one more with recomputation.
        parts = 1 if used <= count else 2 if used >= 2 * count else 3
        again = sum(k.ns for k in made) / parts if parts > 1 else 0.0
        gain = program.total_ns - program.retimed_ns({k.place: 0.0 for k in others}) - again
        if not count or not program.is_worth(gain):
            continue
        scores = bytes_of(softmax.results[0])
        layers = max(count // parts, used // 4 if parts > 1 else used)  # products may be merged
        yield program.advice(
            "spelled-out-attention",
            gain,
            f"{count_text(len(others), 'kernel')} of attention, "
            f"{duration(sum(k.ns for k in others))} in all, write and read scores of "
            f"{size(scores)} in each of {count_text(layers, 'layer')}",
            program.place(softmax),
            _ON_TPU if program.clock.hardware.is_torus else _ON_GPU,
            gain_bytes=scores * (layers if parts == 2 else 1),
        )


def _dims(value: ir.Value) -> tuple[int, ...]:
    """Returns the two largest sizes of a tensor and the product of the others, which a reshape may
    merge; () if it has fewer dimensions."""
    if not isinstance(value.type, ir.RankedTensorType):
        return ()
    sizes = sorted(size for size in shape_of(value) if size > 1)
    return (*sizes[-2:], prod(sizes[:-2])) if len(sizes) >= _LEAST_DIMS else ()


def _is_between_products(exponential: ir.Operation) -> bool:
    """Returns True if an exponential is of a product with a batch, and a product reads it."""

    def makers(op: ir.Operation) -> Iterable[ir.Operation]:
        return filter(None, map(producer, op.operands))

    def users(op: ir.Operation) -> Iterable[ir.Operation]:
        return (use.owner.operation for result in op.results for use in result.uses)

    def reaches(after: Callable[[ir.Operation], Iterable[ir.Operation]]) -> bool:
        found = [exponential]
        for op in found:  # grows during the loop
            for other in after(op):
                if other.name == DOT_GENERAL:
                    # The logits of a loss have no batch of matrices.
                    matmul = op_work(other, short_name(other)).matmul
                    return matmul is not None and matmul.batch > 1
                if other.name in _FOLLOWED and other not in found and len(found) < _MOST_FOLLOWED:
                    found.append(other)
        return False

    return reaches(makers) and reaches(users)
