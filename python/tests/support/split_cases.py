"""Functions of one device, split along any dimension of any argument: values must stay, whatever
the batch meets.

What mixes samples is put together there, so that the values of every function can be compared; the
pass itself refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from stablehlo_tools.analysis.collectives import Channels
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims, Graph, propagate
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.transforms.parts.all_parts import AllPartsWriter

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """A function and the shapes of its arguments, `i` before those of integers.

    `batch` is the dimension of each argument that carries the batch, None for none. `mixes` is the
    op that mixes samples, None where the batch is independent.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[Any, ...]
    batch: tuple[int | None, ...]
    mixes: str | None = None

    def arguments(self, seed: int = 0) -> list[Array]:
        """Small whole numbers, as floats and as integers, so that sums are exact in any order."""
        random = np.random.default_rng(seed)
        return [_numbers(random, shape) for shape in self.shapes]


def _numbers(random: np.random.Generator, shape: Any) -> Array:
    if shape and shape[0] == "i":
        return random.integers(0, 4, shape[1:]).astype(np.int32)
    return random.integers(-4, 5, shape).astype(np.float32)


def split(
    function: Callable[..., Any],
    arguments: Sequence[Array],
    seeds: dict[int, DimTiling],
    parts: int,
) -> tuple[Callable[..., Any], BatchDims]:
    """The function in parts, and what the analysis says of it."""
    exported = export.export(jax.jit(function))(*arguments)
    program = artifact.from_exported(exported)
    module = program.module
    with module.context, ir.Location.unknown():
        inline_all_calls(module)
        graph = Graph.from_block(Function(entry_function(module)).body)
        numbers = graph.root.arguments
        dims = propagate(graph, {numbers[at]: layout for at, layout in seeds.items()}, parts)
        AllPartsWriter(dims, Channels(module)).run()
        module.operation.verify()
    return program.to_exported().call, dims


def values(function: Callable[..., Any], arguments: Sequence[Array]) -> list[Array]:
    """The results, flat."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(function)(*arguments))]


def _microbatches(x: Any) -> Any:
    return lax.scan(lambda c, row: (c + row.sum(), row * 2), 0.0, x)


def _layers_and_back(x: Any, w: Any) -> Any:
    def loss(w: Any) -> Any:
        h, _ = lax.scan(lambda h, weights: (h @ weights, None), x, w)
        return h.sum()

    return jax.value_and_grad(loss)(w)


def _masked_mean(tokens: Any, x: Any) -> Any:
    mask = (tokens > 0).astype(x.dtype)
    return jax.grad(lambda y: (y * y * mask).sum() / mask.sum())(x)


def _two_steps(x: Any, w: Any) -> Any:
    w = w + x.T @ (x @ w)
    return x @ w


def _by_number(x: Any) -> Any:
    return x[jnp.arange(x.shape[0]), jnp.argmax(x, axis=1)]


def _attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def _convolved(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _conv_gradient(x: Any, w: Any) -> Any:
    return jax.grad(lambda w: (_convolved(x, w) ** 2).sum())(w)


def _pooled(x: Any) -> Any:
    return jax.grad(
        lambda x: (
            lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID") ** 2
        ).sum()
    )(x)


def _written(x: Any, y: Any) -> Any:
    return lax.dynamic_update_slice(x, y, (0, 1))


def _group_norm(x: Any) -> Any:
    rows = x.reshape(x.shape[0], 2, -1)
    return ((rows - rows.mean(-1, keepdims=True)) * 2).reshape(x.shape)


def _rematerialised(x: Any, w: Any) -> Any:
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w)
    return jax.grad(lambda x, w: (layer(x, w) ** 2).sum(), argnums=(0, 1))(x, w)


INDEPENDENT = (
    Case("row_sums", lambda x: x.sum(1), ((4, 6),), (0,)),
    Case("sum", lambda x: x.sum(), ((4, 6),), (0,)),
    Case("maximum", lambda x: x.max(0), ((4, 6),), (0,)),
    Case("matmul", lambda x, w: x @ w, ((4, 6), (6, 3)), (0, None)),
    Case("matmul_weights_first", lambda x, w: w.T @ x.T, ((4, 6), (6, 3)), (0, None)),
    Case("weight_gradient", lambda x, y: x.T @ y, ((4, 6), (4, 3)), (0, 0)),
    Case("other_batch_whole", lambda x, y: x.T @ y, ((4, 6), (4, 3)), (0, None)),
    Case("attention", _attention, ((4, 3, 2, 5),) * 3, (0, 0, 0)),
    Case("attention_keys_whole", _attention, ((4, 3, 2, 5),) * 3, (0, None, None)),
    Case("causal", lambda x: jnp.where(jnp.tri(5, dtype=bool), x, -9), ((4, 5, 5),), (0,)),
    Case("mask_of_batch", lambda x: x * jnp.arange(4)[:, None], ((4, 6),), (0,)),
    Case("merged", lambda x, w: x.reshape(12, 5) @ w, ((4, 3, 5), (5, 2)), (0, None)),
    Case("merged_as_minor", lambda x: (x.reshape(12, 5) * 2).sum(1), ((3, 4, 5),), (1,)),
    Case("merged_and_back", lambda x: (x.reshape(12, 5) + 1).reshape(3, 4, 5), ((3, 4, 5),), (1,)),
    Case("split_up", lambda x: x.reshape(2, 4, 5) * 2, ((8, 5),), (0,)),
    Case("flattened", lambda x: x.reshape(-1) * 3, ((2, 4, 3),), (1,)),
    Case("moved", lambda x: jnp.moveaxis(x, 0, 2)[::-1], ((4, 3, 5),), (0,)),
    Case("sliced", lambda x: x[:, 1:3], ((4, 5),), (0,)),
    Case("padded", lambda x: jnp.pad(x, ((0, 0), (1, 2))), ((4, 5),), (0,)),
    Case("reversed", lambda x: x[:, ::-1], ((4, 5),), (0,)),
    Case("sorted", lambda x: jnp.sort(x, axis=1), ((4, 5),), (0,)),
    Case("argsorted", lambda x: jnp.argsort(x, axis=1), ((4, 5),), (0,)),
    Case("argmax", lambda x: jnp.argmax(x, axis=1), ((4, 5),), (0,)),
    Case("top_k", lambda x: lax.top_k(x, 2), ((4, 5),), (0,)),
    Case("cumsum", lambda x: jnp.cumsum(x, axis=1), ((4, 5),), (0,)),
    Case("embedding", lambda t, w: w[t], (("i", 4, 3), (6, 5)), (0, None)),
    Case("embedding_gradient", lambda i, table: jax.grad(lambda t: (t[i] ** 2).sum())(table),
         (("i", 4, 3), (6, 5)), (0, None)),
    Case("taken", lambda x: jnp.take_along_axis(x, jnp.argmax(x, axis=1)[:, None], axis=1),
         ((4, 5),), (0,)),
    Case("convolution", _convolved, ((4, 5, 5, 2), (3, 3, 2, 3)), (0, None)),
    Case("convolution_gradient", _conv_gradient, ((4, 5, 5, 2), (3, 3, 2, 3)), (0, None)),
    Case("pooling", _pooled, ((4, 6, 6),), (0,)),
    Case("written", _written, ((4, 5), (4, 2)), (0, 0)),
    Case("written_into_whole", _written, ((4, 5), (4, 2)), (None, 0)),
    Case("layers", lambda x, w: lax.scan(lambda h, weights: (h @ weights, h), x, w),
         ((4, 3), (5, 3, 3)), (0, None)),
    Case("layers_and_back", _layers_and_back, ((4, 3), (2, 3, 3)), (0, None)),
    Case("branch", lambda x, n: lax.cond(n[0] > 1, lambda x: x * 2, lambda x: x + 1, x),
         ((4, 3), ("i", 1)), (0, None)),
    Case("noise", lambda x: x + jax.random.normal(jax.random.key(0), x.shape), ((4, 3),), (0,)),
    Case("group_norm", _group_norm, ((4, 6),), (0,)),
    Case("rematerialised", _rematerialised, ((4, 3), (3, 3)), (0, None)),
    Case("masked_mean", _masked_mean, (("i", 4, 3), (4, 3)), (0, 0)),
    Case("top_of_batch_at_the_end", lambda x: jnp.sort(x * 2, axis=0), ((4, 5),), (0,)),
    Case("triangular", lambda x: jnp.linalg.cholesky(x @ x.swapaxes(1, 2) + 90 * jnp.eye(3)),
         ((4, 3, 3),), (0,)),
)  # fmt: skip

MIXING = (
    Case("softmax_over_batch", lambda x, w: jax.nn.softmax(x, axis=0) @ w,
         ((4, 6), (6, 3)), (0, None), "reduce"),
    Case("batch_norm", lambda x: (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1),
         ((4, 6),), (0,), "reduce"),
    Case("cumsum_over_batch", lambda x: jnp.cumsum(x, axis=0) + x, ((4, 6),), (0,),
         "reduce_window"),
    Case("sorted_batch", lambda x: jnp.sort(x, axis=0) + x, ((4, 6),), (0,), "sort"),
    Case("argmax_of_batch", lambda x: jnp.argmax(x, axis=0) + x, ((4, 6),), (0,), "reduce"),
    Case("reversed_batch", lambda x: x[::-1] + x, ((4, 6),), (0,), "reverse"),
    Case("shifted_batch", lambda x: jnp.roll(x, 1, axis=0) + x, ((4, 6),), (0,), "slice"),
    Case("padded_batch", lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:4] + x, ((4, 6),), (0,), "pad"),
    Case("concatenated", lambda x: (jnp.concatenate([x, x]) * 2)[::2] + x, ((4, 6),), (0,),
         "concatenate"),
    Case("outer_product", lambda x: jax.nn.softmax(x @ x.T, axis=1) @ x, ((4, 6),), (0,),
         "dot_general"),
    Case("transposed_onto_itself", lambda x: (x + x.T) * x, ((4, 4),), (0,), "add"),
    Case("squared", lambda x: (x @ x) @ x, ((4, 4),), (0,), "dot_general"),
    Case("microbatches", lambda x: _microbatches(x)[1] + x, ((4, 6),), (0,), "dynamic_slice"),
    Case("row_by_number", lambda x: _by_number(x)[:, None] + x, ((4, 6),), (0,), "gather"),
    Case("two_steps", _two_steps, ((4, 6), (6, 3)), (0, None), "dot_general"),
    Case("until_done", lambda x: lax.while_loop(lambda c: c.sum() < 1000, lambda c: c * c + 1, x),
         ((4, 3),), (0,), "reduce"),
    Case("transposing_loop", lambda x: lax.fori_loop(0, 3, lambda _, c: c.T + 1, x) + x,
         ((4, 4),), (0,), "while"),
    Case("fft_of_batch", lambda x: jnp.fft.fft(x.T).real.T + x, ((4, 6),), (0,), "fft"),
    Case("inverse", lambda x: jnp.linalg.inv(x + 20 * jnp.eye(4)) + x, ((4, 4),), (0,),
         "custom_call"),
    Case("convolved_along_batch", lambda x: jnp.convolve(x, jnp.ones(3), "same") + x, ((8,),), (0,),
         "convolution"),
)  # fmt: skip
