"""Attention by cuDNN: `__cudnn$fmhaSoftmax` and its variants.

XLA calls the library with a configuration that names the layout and the sizes. Operands are
queries, keys and values, [batch, length, heads, features] or [batch, heads, length, features], an
optional bias, and lengths of sequences; the backward also has row statistics, the result and its
cotangent. Results have heads before lengths in either layout. (`jax/_src/cudnn/
fused_attention_stablehlo.py` of jax 0.12.)

Samples are independent, and heads if keys have as many as queries. Dropout is not: the library
draws its bits by the position in the batch. Nor are a bias that all samples share, if its gradient
is a result, and packed or paged sequences.
"""

from __future__ import annotations

import json
import re
from typing import Any

from stablehlo_tools.dialect.factors import Along, Factor, FactorRole, Shapes

TARGET = re.compile(r"__cudnn\$fmha\w*")
_CONFIG = "cudnn_fmha_backend_config"
_SIZES = "intermediate_tensor_shape"
_BATCH, _HEADS = 0, 1  # in the sizes of the scores: [batch, heads, queries, keys]
_RANK = 4


def cudnn_factors(config: str, operands: Shapes, results: Shapes) -> list[Factor]:
    """Returns the independent factors of a call: the batch and, unless heads share keys, heads."""
    try:
        read: Any = json.loads(config)[_CONFIG]
        sizes = [int(size) for size in read[_SIZES]["dimensions"]]
        numbers = (
            read.get("bmm1_dot_dimension_numbers") or read["bmm2_grad_gemm2_dot_dimension_numbers"]
        )
        heads_dim = int(numbers["lhs_batch_dimensions"][1])
        drops = float(read.get("dropout_rate") or 0)
        packed = int(read.get("max_seg_per_batch") or 1) > 1 or read.get("is_paged_attention")
    except (TypeError, KeyError, ValueError, IndexError, RecursionError):
        return []
    # Segments of a packed batch and pages are indexed across samples.
    if drops or packed or len(sizes) != _RANK:
        return []
    # The operands of rank 4, in order: q, k, v, [bias], or q, k, v, dO, [bias], O.
    ranked = [i for i, shape in enumerate(operands) if len(shape) == _RANK]
    is_backward = "bmm1_dot_dimension_numbers" not in read
    plain = 5 if is_backward else 3
    bias = ranked[plain - is_backward] if len(ranked) > plain else None
    # Query heads that share the keys of one head have to stay together.
    keys = operands[ranked[1]][heads_dim]
    factors = [_factor(sizes[_BATCH], _BATCH, _BATCH, _BATCH, operands, results)]
    if keys == sizes[_HEADS]:
        along = _factor(keys, heads_dim, _HEADS, _HEADS, operands, results, bias)
        factors.append(along)
    # A gradient that sums over a dimension is not in parts along it.
    return [
        each
        for each in factors
        if {a.tensor for a in each.results}
        == {i for i, shape in enumerate(results) if 0 not in shape}
    ]


def _factor(
    size: int,
    dim: int,
    of_bias: int,
    of_results: int,
    operands: Shapes,
    results: Shapes,
    bias: int | None = None,
) -> Factor:
    """Returns the factor that is dimension `dim` of operands of rank 4, `of_bias` of a bias and of
    row statistics, and `of_results` of results."""

    def place(number: int, shape: tuple[int, ...]) -> int:
        return dim if len(shape) == _RANK and number != bias else of_bias

    taken = [(i, place(i, shape)) for i, shape in enumerate(operands)]
    return Factor(
        size,
        FactorRole.KEPT,
        tuple(Along(i, at) for i, at in taken if at < len(operands[i]) and operands[i][at] == size),
        tuple(
            Along(i, of_results)
            for i, shape in enumerate(results)
            if of_results < len(shape) and shape[of_results] == size
        ),
    )


def resized_cudnn(config: str, factor: Factor, size: int) -> str:
    """Returns the configuration of a call with another size of a factor."""
    # Scores are [batch, heads, …], as results are, whatever the layout of the operands.
    read = json.loads(config)
    at = factor.results[0].dim
    read[_CONFIG][_SIZES]["dimensions"][at] = str(size)
    return json.dumps(read)
