"""Training steps of public MaxText recipes: decoders like Llama and Mixtral.

The steps are written as MaxText writes them: a scan over layers whose weights are stacked, f32 or
bf16 weights that are cast to bf16 before use, an embedding by a one-hot product, flash attention,
cross-entropy of f32 logits, clipping of the gradients by their global norm, and AdamW. Layouts are
left to XLA's partitioner, given the shardings of arguments and of activations.

    axis      divides
    data      the batch
    fsdp      the batch, and one dimension of each weight
    tensor    heads, the inner dimension of the feed-forward network, the vocabulary

Attention is a kernel of the platform: cuDNN's for "cuda", the Pallas splash kernel for "tpu".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from models.layers import rotated, rotation

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
BATCH = (DATA, FSDP)
Tree = Any  # a pytree of arrays, of shapes or of specs

_CUDNN = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
_COMPUTE = jnp.bfloat16


@dataclass(frozen=True)
class PublishedModel:
    """Sizes of a decoder; with experts, each token is sent to `active` of them."""

    layers: int
    width: int
    heads: int
    key_value_heads: int
    feed_forward: int
    vocabulary: int
    head_size: int = 128
    experts: int = 1
    active: int = 2
    capacity_factor: float = 1.25

    def training_flops(self, tokens: int, sequence: int, *, is_causal: bool) -> float:
        """Returns the model's FLOPs for so many tokens, as MaxText counts them.

        Its releases before PR 1988 count the masked half of causal attention, too.
        """
        heads = (2 * self.heads + 2 * self.key_value_heads) * self.head_size
        layer = self.width * (
            heads + 3 * self.feed_forward * (self.active if self._is_mixed else 1)
        )
        attention = 2 * sequence * self.heads * self.head_size * (0.5 if is_causal else 1)
        total = self.layers * (layer + attention) + self.width * self.vocabulary
        return 6.0 * tokens * total

    @property
    def _is_mixed(self) -> bool:
        return self.experts > 1


@dataclass(frozen=True)
class PublishedStep:
    """A training step of a model on a mesh.

    `batch` counts sequences of a device. `saved` and `offloaded` name the values that a layer keeps
    for its backward pass, on the device and on the host; all others are recomputed.
    """

    model: PublishedModel
    axes: Mapping[str, int]
    batch: float
    sequence: int
    platform: Literal["cuda", "tpu"]
    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    weight_dtype: str = "float32"
    transposed: bool = False  # `fsdp` divides the feed-forward network's inner dimension
    block: int = 512  # of the splash kernel
    block_dq: int | None = None  # None: the backward pass is one fused kernel
    options: Mapping[str, Any] = field(default_factory=dict)  # of the compiler

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(self.axes.values())

    @property
    def tokens(self) -> int:
        """The tokens of a step on all devices."""
        return int(self.batch * self.devices) * self.sequence

    def mesh(self) -> AbstractMesh:
        """Returns the mesh, with all axes."""
        sizes = {DATA: 1, FSDP: 1, TENSOR: 1} | dict(self.axes)
        return AbstractMesh(
            tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
        )


def export_published_step(step: PublishedStep) -> export.Exported:
    """Exports `train_step(state, tokens) -> (state, loss)`, whose state is donated."""
    specs = _state_specs(step)
    shardings = _shardings(step, (specs, P(BATCH)))
    function = jax.jit(
        partial(_train_step, step),
        in_shardings=shardings,
        out_shardings=(shardings[0], NamedSharding(step.mesh(), P())),
        donate_argnums=0,
    )
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in _CUDNN]
    return export.export(function, platforms=(step.platform,), disabled_checks=checks)(
        *_argument_shapes(step)
    )


def _train_step(step: PublishedStep, state: Tree, tokens: jax.Array) -> tuple[Tree, jax.Array]:
    value, gradients = jax.value_and_grad(partial(_loss, step))(state["parameters"], tokens)
    squares = [jnp.square(g.astype(jnp.float32)).sum() for g in jax.tree.leaves(gradients)]
    scale = jnp.minimum(1.0, lax.rsqrt(sum(squares) + 1e-12))
    gradients = jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradients)
    return _adamw(state, gradients), value


def _loss(step: PublishedStep, parameters: Tree, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token, with the normalizer's square (z-loss) as in MaxText."""
    vocabulary = step.model.vocabulary
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    hidden = jax.nn.one_hot(inputs, vocabulary, dtype=_COMPUTE) @ _cast(parameters["embedding"])
    hidden = _constrained(step, hidden, P(BATCH, None, TENSOR))
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(step.saved),
        names_which_can_be_offloaded=list(step.offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )
    angles = rotation(step.sequence, step.model.head_size, 10_000.0)
    layer = jax.checkpoint(partial(_layer, step, angles), policy=policy, prevent_cse=False)
    hidden, _ = lax.scan(lambda x, w: (layer(x, w), None), hidden, parameters["layers"])
    hidden = _rms_norm(hidden, parameters["final_norm"])
    logits = _constrained(
        step, hidden @ _cast(parameters["unembedding"]), P(BATCH, None, TENSOR)
    ).astype(jnp.float32)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    hit = (logits * jax.nn.one_hot(targets, vocabulary, dtype=jnp.float32)).sum(-1)
    return (normalizer - hit + 1e-4 * jnp.square(normalizer)).mean()


def _layer(step: PublishedStep, angles: Tree, hidden: jax.Array, weights: Tree) -> jax.Array:
    hidden = checkpoint_name(
        _constrained(step, hidden, P(BATCH, None, TENSOR)), "decoder_layer_input"
    )
    normed = _rms_norm(hidden, weights["attention_norm"])
    hidden = hidden + _constrained(
        step, _attention(step, angles, normed, weights), P(BATCH, None, TENSOR)
    )
    feed_forward = _mixture if step.model.experts > 1 else _feed_forward
    output = feed_forward(step, _rms_norm(hidden, weights["feed_forward_norm"]), weights)
    return hidden + _constrained(step, output, P(BATCH, None, TENSOR))


def _attention(step: PublishedStep, angles: Tree, hidden: jax.Array, weights: Tree) -> jax.Array:
    projected = {
        name: jnp.einsum("bsd,dhk->bshk", hidden, _cast(weights[name]))
        for name in ("query", "key", "value")
    }
    query = checkpoint_name(rotated(projected["query"], angles), "query_proj")
    key = checkpoint_name(rotated(projected["key"], angles), "key_proj")
    value = checkpoint_name(projected["value"], "value_proj")
    kernel = _cudnn_attention if step.platform == "cuda" else partial(_splash_attention, step)
    heads = P(BATCH, None, TENSOR)
    context = jax.shard_map(
        kernel, mesh=step.mesh(), in_specs=(heads,) * 3, out_specs=heads, check_vma=False
    )(query, key, value)
    output = jnp.einsum("bshk,hkd->bsd", context, _cast(weights["output"]))
    return checkpoint_name(output, "out_proj")


def _feed_forward(step: PublishedStep, hidden: jax.Array, weights: Tree) -> jax.Array:
    gate = checkpoint_name(hidden @ _cast(weights["gate"]), "mlpwi_0")
    up = checkpoint_name(hidden @ _cast(weights["up"]), "mlpwi_1")
    inner = _constrained(step, jax.nn.silu(gate) * up, P(BATCH, None, TENSOR))
    return checkpoint_name(inner @ _cast(weights["down"]), "mlpwo")


def _mixture(step: PublishedStep, hidden: jax.Array, weights: Tree) -> jax.Array:
    """Sends tokens to experts of fixed capacity by one-hot products, as MaxText's `dropped`."""
    model = step.model
    capacity = int(step.sequence * model.active / model.experts * model.capacity_factor)
    scores = jax.nn.softmax((hidden @ _cast(weights["router"])).astype(jnp.float32))
    top, chosen = lax.top_k(scores, model.active)
    one_hot = jax.nn.one_hot(chosen, model.experts, dtype=jnp.int32)  # [b, s, active, e]
    flat = one_hot.swapaxes(1, 2).reshape(hidden.shape[0], -1, model.experts)
    position = (jnp.cumsum(flat, axis=1) * flat - 1).reshape(
        hidden.shape[0], model.active, -1, model.experts
    )
    slots = jax.nn.one_hot(position.swapaxes(1, 2), capacity, dtype=_COMPUTE)
    dispatch = slots.sum(2)  # [b, s, e, c]
    combine = (slots * top.astype(_COMPUTE)[..., None, None]).sum(2)
    sent = jnp.einsum("bsm,bsec->ebcm", hidden, dispatch)
    gate = checkpoint_name(jnp.einsum("ebcm,emh->ebch", sent, _cast(weights["gate"])), "mlpwi_0")
    up = checkpoint_name(jnp.einsum("ebcm,emh->ebch", sent, _cast(weights["up"])), "mlpwi_1")
    inner = jax.nn.silu(gate) * up
    output = jnp.einsum("ebch,ehm->ebcm", inner, _cast(weights["down"]))
    return jnp.einsum("ebcm,bsec->bsm", checkpoint_name(output, "mlpwo"), combine)


# --- attention kernels ----------------------------------------------------------------------------


def _splash_attention(
    step: PublishedStep, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    length, block, dq = step.sequence, step.block, step.block_dq
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block if dq is None else 512,
        block_q_dkv=block,
        block_kv_dkv=block if dq is None else 512,
        block_q_dq=dq,
        block_kv_dq=None if dq is None else 512,
        use_fused_bwd_kernel=dq is None,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * query.shape[2])
    kernel: Any = splash.make_splash_mha(
        mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes
    )
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    query = query * step.model.head_size**-0.5
    return cast("jax.Array", jax.vmap(kernel)(query, key, value)).swapaxes(1, 2)


@jax.custom_vjp
def _cudnn_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention by cuDNN's kernel, [batch, sequence, heads, size].

    jax's own function asks the GPU for its version, so only the calls are made here.
    """
    return _cudnn_forward(query, key, value)[0]


def _cudnn_forward(
    query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    batch, length, heads, size = query.shape
    kinds = (
        jax.ShapeDtypeStruct((batch, heads, length, size), query.dtype),
        jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        jax.ShapeDtypeStruct((0,), jnp.uint8),
    )
    output, statistics, _ = _cudnn_call(_CUDNN[0], kinds, query, key, value)
    output = checkpoint_name(output, "context")
    statistics = checkpoint_name(statistics, "context")
    return output.swapaxes(1, 2), (query, key, value, statistics, output)


def _cudnn_backward(residuals: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, ...]:
    query, key, value, statistics, output = residuals
    kinds = tuple(
        jax.ShapeDtypeStruct(x.swapaxes(1, 2).shape, x.dtype) for x in (query, key, value)
    )
    *gradients, _ = _cudnn_call(
        _CUDNN[1],
        (*kinds, jax.ShapeDtypeStruct((0,), jnp.uint8)),
        query,
        key,
        value,
        statistics,
        gradient,
        output.swapaxes(1, 2),
    )
    return tuple(x.swapaxes(1, 2) for x in gradients)


_cudnn_attention.defvjp(_cudnn_forward, _cudnn_backward)


def _cudnn_call(
    name: str, kinds: tuple[jax.ShapeDtypeStruct, ...], *operands: jax.Array
) -> tuple[jax.Array, ...]:
    """Calls a kernel of cuDNN, whose results are [batch, heads, sequence, size] transposed."""
    (batch, length, heads, size), keys = operands[0].shape, operands[1].shape[1]
    by_heads = (0, 2, 1, 3)  # of results, from the minor dimension: those of the operands
    default = tuple(range(4))
    scores = [str(n) for n in (batch, heads, length, keys)]
    attention: dict[str, Any] = {
        "fmha_scale": size**-0.5,
        "dropout_rate": 0.0,
        "seed": "42",
        "sliding_window_length": 0,
        "is_flash_attention": True,
        "mask_type": "CAUSAL",
        "max_seg_per_batch": "1",
        "intermediate_tensor_shape": {"element_type": "BF16", "dimensions": scores},
        **{name: _dimension_numbers(*numbers) for name, numbers in _PRODUCTS.items()},
    }
    call = jax.ffi.ffi_call(
        name,
        kinds,
        output_layouts=[by_heads if len(k.shape) == 4 else default[: len(k.shape)] for k in kinds],
        custom_call_api_version=2,
        legacy_backend_config=json.dumps({"cudnn_fmha_backend_config": attention}),
    )
    return tuple(call(*operands))


# Contracted dimensions of both operands, then their batch dimensions, of arrays of
# [batch, sequence, heads, size] and of scores of [batch, heads, queries, keys].
_PRODUCTS = {
    "bmm1_dot_dimension_numbers": (3, 3, (0, 2), (0, 2)),
    "bmm2_dot_dimension_numbers": (3, 1, (0, 1), (0, 2)),
    "bmm1_grad_gemm1_dot_dimension_numbers": (2, 1, (0, 1), (0, 2)),
    "bmm1_grad_gemm2_dot_dimension_numbers": (3, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm1_dot_dimension_numbers": (2, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm2_dot_dimension_numbers": (3, 3, (0, 2), (0, 2)),
}


def _dimension_numbers(
    left: int, right: int, left_batch: tuple[int, ...], right_batch: tuple[int, ...]
) -> dict[str, list[str]]:
    return {
        "lhs_contracting_dimensions": [str(left)],
        "rhs_contracting_dimensions": [str(right)],
        "lhs_batch_dimensions": [str(d) for d in left_batch],
        "rhs_batch_dimensions": [str(d) for d in right_batch],
    }


# --- parts ----------------------------------------------------------------------------------------


def _cast(weight: jax.Array) -> jax.Array:
    return weight.astype(_COMPUTE)


def _constrained(step: PublishedStep, array: jax.Array, spec: P) -> jax.Array:
    return lax.with_sharding_constraint(array, NamedSharding(step.mesh(), spec))


def _rms_norm(hidden: jax.Array, scale: jax.Array) -> jax.Array:
    wide = hidden.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
    return normed.astype(_COMPUTE) * _cast(scale)


def _adamw(state: Tree, gradients: Tree, rate: float = 3e-5, decay: float = 0.1) -> Tree:
    count = state["count"] + 1
    steps = count.astype(jnp.float32)

    def moment(share: float, power: int, old: jax.Array, gradient: jax.Array) -> jax.Array:
        return (share * old + (1 - share) * gradient**power).astype(old.dtype)

    first = jax.tree.map(partial(moment, 0.9, 1), state["first"], gradients)
    second = jax.tree.map(partial(moment, 0.95, 2), state["second"], gradients)

    def update(weight: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
        mean = mean / (1 - 0.9**steps)
        square = square / (1 - 0.95**steps)
        change = mean / (jnp.sqrt(square) + 1e-8) + decay * weight
        return (weight - rate * change).astype(weight.dtype)

    parameters = jax.tree.map(update, state["parameters"], first, second)
    return {"parameters": parameters, "first": first, "second": second, "count": count}


# --- shapes and shardings -------------------------------------------------------------------------


def _parameters(step: PublishedStep) -> Tree:
    """Returns (global shape, spec) of each weight; those of layers are stacked."""
    model = step.model
    width, inner, size = model.width, model.feed_forward, model.head_size
    column = P(None, (FSDP, TENSOR)) if step.transposed else P(FSDP, TENSOR)
    row = P((FSDP, TENSOR), None) if step.transposed else P(TENSOR, FSDP)
    layer: dict[str, tuple[tuple[int, ...], P]] = {
        "attention_norm": ((width,), P()),
        "query": ((width, model.heads, size), P(FSDP, TENSOR)),
        "key": ((width, model.key_value_heads, size), P(FSDP, TENSOR)),
        "value": ((width, model.key_value_heads, size), P(FSDP, TENSOR)),
        "output": ((model.heads, size, width), P(TENSOR, None, FSDP)),
        "feed_forward_norm": ((width,), P()),
        "gate": ((width, inner), column),
        "up": ((width, inner), column),
        "down": ((inner, width), row),
    }
    if model.experts > 1:
        for name in ("gate", "up", "down"):
            shape, spec = layer[name]
            layer[name] = ((model.experts, *shape), P(None, *spec))
        layer["router"] = ((width, model.experts), P(FSDP))
    return {
        "embedding": ((model.vocabulary, width), P(TENSOR, FSDP)),
        "layers": {
            name: ((model.layers, *shape), P(None, *spec)) for name, (shape, spec) in layer.items()
        },
        "final_norm": ((width,), P()),
        "unembedding": ((width, model.vocabulary), P(FSDP, TENSOR)),
    }


def _is_entry(node: object) -> bool:
    return isinstance(node, tuple) and isinstance(node[-1], P)


def _state_specs(step: PublishedStep) -> Tree:
    parameters = jax.tree.map(lambda entry: entry[1], _parameters(step), is_leaf=_is_entry)
    return {"parameters": parameters, "first": parameters, "second": parameters, "count": P()}


def _argument_shapes(step: PublishedStep) -> tuple[Tree, jax.ShapeDtypeStruct]:
    parameters = jax.tree.map(
        lambda entry: jax.ShapeDtypeStruct(entry[0], step.weight_dtype),
        _parameters(step),
        is_leaf=_is_entry,
    )
    state = {"parameters": parameters, "first": parameters, "second": parameters}
    state |= {"count": jax.ShapeDtypeStruct((), jnp.int32)}
    sequences = int(step.batch * step.devices)
    return state, jax.ShapeDtypeStruct((sequences, step.sequence + 1), jnp.int32)


def _shardings(step: PublishedStep, specs: Tree) -> Tree:
    mesh = step.mesh()
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, P)
    )
