"""Training steps that accumulate gradients, for tests of `expand-mpmd`: a small model of tokens.

Its embedding is also its head; the first activation is added to the last; gradients are clipped by
their global norm and go to Adam.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import export, lax
from jax.export import Exported
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

LENGTH = 4
Tree = Any


@dataclass(frozen=True)
class Step:
    """A step: `layers` in a loop, or written out; gradients accumulated in a `scan`, in a
    `fori_loop`, or `whole`, for the batch at once. `scopes` name stages: that many, of as many
    layers each. `devices` divide the samples of a microbatch; `stages` is the size of a mesh axis
    in front of theirs that divides no argument."""

    layers: int = 6
    microbatches: int = 5
    samples: int = 2
    width: int = 16
    words: int = 24
    form: Literal["loop", "unrolled"] = "loop"
    accumulate: Literal["scan", "fori", "whole"] = "scan"
    scopes: int = 0
    devices: int = 1
    stages: int = 1

    def export(self) -> Exported:
        """The program."""
        return _export(self)

    def loss(self, weights: Tree, tokens: jax.Array) -> jax.Array:
        """The mean negative log likelihood of the next token."""
        with self._scope(0):
            first = x = weights["words"][tokens[:, :-1]]
        for stage in range(max(self.scopes, 1)):
            with self._scope(stage):
                x = self._layers(weights["layers"], x, stage)
        with self._scope(self.scopes - 1):
            scores = jax.nn.log_softmax((x + first) @ weights["words"].T)
            return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

    def _scope(self, stage: int) -> AbstractContextManager[Any]:
        return jax.named_scope(f"stage_{stage}" if self.scopes else "model")

    def _layers(self, layers: Tree, x: jax.Array, stage: int) -> jax.Array:
        count = self.layers // max(self.scopes, 1)
        if self.form == "unrolled":
            for layer in layers[stage * count : (stage + 1) * count]:
                x = block(x, layer)[0]
            return x
        own = layers
        if self.scopes:
            own = jax.tree.map(lambda w: w[stage * count : (stage + 1) * count], layers)
        return lax.scan(block, x, own)[0]

    def step(self, weights: Tree, state: Tree, batch: jax.Array) -> Tree:
        """The new weights, the new state and the loss."""
        loss, gradients = self._gradients(weights, batch)
        updates, state = optimizer().update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    def _gradients(self, weights: Tree, batch: jax.Array) -> tuple[jax.Array, Tree]:
        if self.accumulate == "whole":
            return jax.value_and_grad(self.loss)(weights, batch)
        parts = jnp.reshape(batch, (self.microbatches, self.samples, LENGTH + 1))

        def add(total: Tree, part: jax.Array) -> tuple[Tree, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(self.loss)(weights, part)), None

        empty = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights))
        if self.accumulate == "fori":
            total = lax.fori_loop(0, self.microbatches, lambda i, t: add(t, parts[i])[0], empty)
        else:
            total = lax.scan(add, empty, parts)[0]
        return jax.tree.map(lambda value: value / self.microbatches, total)

    def weights(self) -> Tree:
        """The shapes of the weights."""
        square = {"up": (self.width, self.width), "down": (self.width, self.width)}
        if self.form == "unrolled":
            layers: Tree = [dict(square) for _ in range(self.layers)]
        else:
            layers = {name: (self.layers, *shape) for name, shape in square.items()}
        shapes = {"words": (self.words, self.width), "layers": layers}
        return jax.tree.map(_floats, shapes, is_leaf=lambda node: isinstance(node, tuple))


def block(x: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
    """A layer."""
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"], None


def optimizer() -> optax.GradientTransformation:
    """Adam on clipped gradients."""
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))


def _floats(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@cache
def _export(step: Step) -> Exported:
    weights = step.weights()
    state = jax.eval_shape(optimizer().init, weights)
    batch: Any = jax.ShapeDtypeStruct((step.microbatches * step.samples, LENGTH + 1), jnp.int32)
    sizes = {"stage": step.stages, "data": step.devices}
    axes = {name: size for name, size in sizes.items() if size > 1}
    if axes:
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
        weights, state = jax.tree.map(lambda s: _placed(s, mesh), (weights, state))
        batch = _placed(batch, mesh, *(["data"] if "data" in axes else []))
    return export.export(jax.jit(step.step))(weights, state, batch)


def _placed(shape: Any, mesh: AbstractMesh, *axes: str) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
