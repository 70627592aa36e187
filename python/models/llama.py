"""A small Llama-style training step, sharded FSDP × tensor parallel by `shard_map`.

RMSNorm, rotary positions, causal attention with grouped key and value heads, SwiGLU, a loss over a
sharded vocabulary, AdamW or SGD. What each device does is written out:

    weights      all_gather over `fsdp` before use; its transpose reduce_scatters their gradients
    activations  psum over `model` behind the two row-parallel matmuls and in the loss; its
                 transpose sums their gradients in front of the column-parallel ones

The gradient is taken of the shard_mapped loss, so the export holds two `sdy.manual_computation`,
forward and backward, and the residuals cross between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from models.devices import mesh as device_mesh  # first: sets up the devices

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.layers import rotated

FSDP, MODEL = "fsdp", "model"
Tree = Any  # a pytree of arrays, of shapes or of specs


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model, of the batch and of the mesh. The defaults are tiny and complete.

    `remat` recomputes each layer in the backward pass, which gathers its weights a second time.
    """

    layers: int = 2
    d_model: int = 64
    heads: int = 4
    key_value_heads: int = 2
    d_feed_forward: int = 128
    vocabulary: int = 128
    batch: int = 8
    sequence: int = 32
    dtype: str = "float32"
    optimizer: Literal["sgd", "adamw"] = "adamw"
    scan_layers: bool = False
    remat: bool = False
    fsdp: int = 4
    model: int = 2
    platforms: tuple[str, ...] = ("cpu",)

    def __post_init__(self) -> None:
        if self.optimizer not in ("sgd", "adamw"):
            raise ValueError(f"the optimizer is sgd or adamw, not {self.optimizer!r}")

    def mesh(self) -> Mesh:
        """The virtual devices, (fsdp, model)."""
        return device_mesh(fsdp=self.fsdp, model=self.model)

    @property
    def head_size(self) -> int:
        """Elements of one attention head."""
        return self.d_model // self.heads


def export_train_step(config: LlamaConfig) -> export.Exported:
    """Exports `train_step(state, tokens) -> (state, loss)` for the config's platforms."""
    step = jax.jit(
        partial(train_step, config),
        in_shardings=_shardings(config, argument_specs(config)),
        out_shardings=_shardings(config, (argument_specs(config)[0], P())),
    )
    return export.export(step, platforms=config.platforms)(*_argument_shapes(config))


def example_arguments(config: LlamaConfig, seed: int = 0) -> tuple[Tree, jax.Array]:
    """A state and a batch of tokens for the step, on the mesh; the same for the same seed."""
    random = np.random.default_rng(seed)

    def leaf(path: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray[Any, Any]:
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return random.integers(0, config.vocabulary, shape.shape).astype(shape.dtype)
        names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        if names[0] != "parameters":
            return np.zeros(shape.shape, shape.dtype)
        if names[-1].endswith("norm"):
            return np.ones(shape.shape, shape.dtype)
        return (random.normal(size=shape.shape) * shape.shape[-2] ** -0.5).astype(shape.dtype)

    state, tokens = _argument_shapes(config)
    arrays = (jax.tree_util.tree_map_with_path(leaf, state), leaf((), tokens))
    return jax.device_put(arrays, _shardings(config, argument_specs(config)))


def input_numbers(exported: export.Exported, part: str) -> list[int]:
    """The numbers of an exported step's inputs that are a part of the state, such as `second`."""
    (state, _), _ = jax.tree.unflatten(exported.in_tree, range(len(exported.in_avals)))
    return jax.tree.leaves(state[part])


def train_step(config: LlamaConfig, state: Tree, tokens: jax.Array) -> tuple[Tree, jax.Array]:
    """One step: loss and gradients by `shard_map`, then the update, element by element."""
    specs, token_spec = argument_specs(config)
    sharded_loss = jax.shard_map(
        partial(loss, config),
        mesh=config.mesh(),
        in_specs=(specs["parameters"], token_spec),
        out_specs=P(),
    )
    value, gradients = jax.value_and_grad(sharded_loss)(state["parameters"], tokens)
    update = _adamw if config.optimizer == "adamw" else _sgd
    return update(state, gradients), value


# --- what one device computes ---------------------------------------------------------------------


def loss(config: LlamaConfig, parameters: Tree, tokens: jax.Array) -> jax.Array:
    """Mean next-token cross-entropy over the global batch, float32; the same on every device."""
    hidden = jnp.take(_gathered(parameters["embedding"], 0), tokens[:, :-1], axis=0, mode="clip")
    layer = partial(_layer, config, _rotation(config))
    if config.remat:
        layer = jax.checkpoint(layer)
    if config.scan_layers:
        hidden, _ = lax.scan(lambda x, w: (layer(x, w), None), hidden, parameters["layers"])
    else:
        for weights in parameters["layers"]:
            hidden = layer(hidden, weights)
    hidden = _rms_norm(hidden, parameters["final_norm"])
    logits = hidden @ _gathered(parameters["unembedding"], 0)
    return _cross_entropy(config, logits.astype(jnp.float32), tokens[:, 1:])


def _layer(config: LlamaConfig, rotation: Tree, hidden: jax.Array, weights: Tree) -> jax.Array:
    normed = _rms_norm(hidden, weights["attention_norm"])
    hidden = hidden + _attention(config, rotation, normed, weights)
    return hidden + _feed_forward(_rms_norm(hidden, weights["feed_forward_norm"]), weights)


def _attention(config: LlamaConfig, rotation: Tree, hidden: jax.Array, weights: Tree) -> jax.Array:
    """This device's share of the heads; the sum over `model` brings the shares together."""
    batch, length, _ = hidden.shape

    def heads(name: str) -> jax.Array:
        projected = hidden @ _gathered(weights[name], 0)
        return projected.reshape(batch, length, -1, config.head_size)

    query, key, value = rotated(heads("query"), rotation), heads("key"), heads("value")
    key = rotated(key, rotation)
    query = query.reshape(batch, length, key.shape[2], -1, config.head_size)
    scores = jnp.einsum("bqkgh,bskh->bkgqs", query, key) * config.head_size**-0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(causal, scores.astype(jnp.float32), -1e30)
    weighted = jnp.einsum("bkgqs,bskh->bqkgh", jax.nn.softmax(scores).astype(hidden.dtype), value)
    return lax.psum(weighted.reshape(batch, length, -1) @ _gathered(weights["output"], 1), MODEL)


def _feed_forward(hidden: jax.Array, weights: Tree) -> jax.Array:
    gate = jax.nn.silu(hidden @ _gathered(weights["gate"], 0))
    up = hidden @ _gathered(weights["up"], 0)
    return lax.psum((gate * up) @ _gathered(weights["down"], 1), MODEL)


def _cross_entropy(config: LlamaConfig, logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Of logits whose last axis, the vocabulary, is split over `model`."""
    largest = lax.pmax(lax.stop_gradient(logits).max(-1), MODEL)
    total = lax.psum(jnp.exp(logits - largest[..., None]).sum(-1), MODEL)
    share = config.vocabulary // config.model
    owned = lax.axis_index(MODEL) * share + jnp.arange(share)
    hit = lax.psum(jnp.where(targets[..., None] == owned, logits, 0.0).sum(-1), MODEL)
    return lax.pmean((jnp.log(total) + largest - hit).mean(), FSDP)


def _gathered(weight: jax.Array, axis: int) -> jax.Array:
    return lax.all_gather(weight, FSDP, axis=axis, tiled=True)


def _rms_norm(hidden: jax.Array, scale: jax.Array) -> jax.Array:
    wide = hidden.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return normed.astype(hidden.dtype) * scale


def _rotation(config: LlamaConfig) -> Tree:
    """Cosines and sines of the rotary angles, each (positions, 1, head size / 2)."""
    half = config.head_size // 2
    frequencies = 10000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(config.sequence)[:, None] * frequencies
    return jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]


# --- the update: no collective, the state stays where it is ---------------------------------------


def _sgd(state: Tree, gradients: Tree, rate: float = 1e-2) -> Tree:
    moved = jax.tree.map(
        lambda w, g: (w - rate * g).astype(w.dtype), state["parameters"], gradients
    )
    return {"parameters": moved}


def _adamw(state: Tree, gradients: Tree, rate: float = 1e-3, decay: float = 1e-2) -> Tree:
    count = state["count"] + 1
    steps = count.astype(jnp.float32)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], gradients)
    second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state["second"], gradients)

    def moved(weight: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
        mean = mean / (1 - 0.9**steps)
        square = square / (1 - 0.95**steps)
        change = mean / (jnp.sqrt(square) + 1e-8) + decay * weight
        return (weight - rate * change).astype(weight.dtype)

    parameters = jax.tree.map(moved, state["parameters"], first, second)
    return {"parameters": parameters, "first": first, "second": second, "count": count}


# --- shapes and shardings -------------------------------------------------------------------------


def argument_specs(config: LlamaConfig) -> tuple[Tree, P]:
    """The partition specs of the state and of the tokens."""
    parameters = jax.tree.map(lambda entry: entry[1], _parameters(config), is_leaf=_is_entry)
    state: dict[str, Tree] = {"parameters": parameters}
    if config.optimizer == "adamw":
        state |= {"first": parameters, "second": parameters, "count": P()}
    return state, P(FSDP)


def _argument_shapes(config: LlamaConfig) -> tuple[Tree, jax.ShapeDtypeStruct]:
    def shapes(dtype: str) -> Tree:
        return jax.tree.map(
            lambda entry: jax.ShapeDtypeStruct(entry[0], dtype),
            _parameters(config),
            is_leaf=_is_entry,
        )

    state: dict[str, Tree] = {"parameters": shapes(config.dtype)}
    if config.optimizer == "adamw":
        moments = {"first": shapes("float32"), "second": shapes("float32")}
        state |= moments | {"count": jax.ShapeDtypeStruct((), jnp.int32)}
    return state, jax.ShapeDtypeStruct((config.batch, config.sequence + 1), jnp.int32)


def _parameters(config: LlamaConfig) -> Tree:
    """(global shape, spec) of every weight; stacked over layers where they are scanned."""
    width, inner = config.d_model, config.d_feed_forward
    key_value = config.key_value_heads * config.head_size
    column, row = P(FSDP, MODEL), P(MODEL, FSDP)  # columns or rows are split over `model`
    layer = {
        "attention_norm": ((width,), P()),
        "query": ((width, width), column),
        "key": ((width, key_value), column),
        "value": ((width, key_value), column),
        "output": ((width, width), row),
        "feed_forward_norm": ((width,), P()),
        "gate": ((width, inner), column),
        "up": ((width, inner), column),
        "down": ((inner, width), row),
    }
    stacked = {
        name: ((config.layers, *shape), P(None, *spec)) for name, (shape, spec) in layer.items()
    }
    return {
        "embedding": ((config.vocabulary, width), P(FSDP)),
        "layers": stacked if config.scan_layers else [layer] * config.layers,
        "final_norm": ((width,), P()),
        "unembedding": ((width, config.vocabulary), column),
    }


def _is_entry(node: object) -> bool:
    return isinstance(node, tuple) and isinstance(node[-1], P)


def _shardings(config: LlamaConfig, specs: Tree) -> Tree:
    mesh = config.mesh()
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, P)
    )
