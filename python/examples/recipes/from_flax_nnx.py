"""flax.nnx: model and optimizer as one state, its shardings by the annotations at the parameters.

    python from_flax_nnx.py [--keep DIR] [--optimize]

`nnx.eval_shape` under a mesh gives every variable a shape with its sharding, the optimizer's
moments too. The step merges definition and state, updates, and returns the state.
"""

from __future__ import annotations

import sys
from typing import Any

from recipe import export_step, main

import jax  # isort: skip
import jax.numpy as jnp
import optax
from flax import nnx
from jax.export import Exported
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, HEADS, INNER, WORDS = 2, 64, 4, 128, 256
BATCH, LENGTH = 8, 32
Named = dict[str, jax.Array]
MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
ROWS = NamedSharding(MESH, P("data"))


def linear(entering: int, leaving: int, *axes: str | None, rngs: nnx.Rngs) -> nnx.Linear:
    """A projection without a bias, its kernel divided along these mesh axes."""
    init = nnx.with_partitioning(nnx.initializers.normal(0.02), axes)
    return nnx.Linear(entering, leaving, use_bias=False, kernel_init=init, rngs=rngs)


class Layer(nnx.Module):
    """Attention and a gated pair of dense layers, each behind a norm and beside a residual."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.query, self.key, self.value = (
            nnx.data(linear(WIDTH, WIDTH, "data", "model", rngs=rngs)) for _ in range(3)
        )
        self.output = linear(WIDTH, WIDTH, "model", "data", rngs=rngs)
        self.gate = linear(WIDTH, INNER, "data", "model", rngs=rngs)
        self.up = linear(WIDTH, INNER, "data", "model", rngs=rngs)
        self.down = linear(INNER, WIDTH, "model", "data", rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norms[0](x)
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        query, key, value = (f(y).reshape(heads) for f in (self.query, self.key, self.value))
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.reshape(x.shape))
        y = self.norms[1](x)
        x = x + self.down(nnx.silu(self.gate(y)) * self.up(y))
        return jax.lax.with_sharding_constraint(x, ROWS)


class LanguageModel(nnx.Module):
    """Layers in a row, each computed again in the backward."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(nnx.initializers.normal(0.02), ("model", "data"))
        self.embed = nnx.Embed(WORDS, WIDTH, embedding_init=init, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(self.embed(tokens), ROWS)
        for layer in self.layers:
            x = nnx.remat(type(layer).__call__)(layer, x)
        return self.embed.attend(self.norm(x))


def loss(model: LanguageModel, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of each next token."""
    logits = model(tokens)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def build() -> Exported:
    """The step for 4 parts of the data and 2 of the model."""

    def create() -> dict[str, Any]:
        model = LanguageModel(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)
        return {"model": model, "optimizer": optimizer}

    with jax.set_mesh(MESH):
        definition, state = nnx.split(nnx.eval_shape(create))

    def step(state: Any, batch: Named) -> tuple[Any, Named]:
        both = nnx.merge(definition, state)
        model, optimizer = both["model"], both["optimizer"]
        value, gradients = nnx.value_and_grad(loss)(model, batch["tokens"])
        optimizer.update(model, gradients)
        return nnx.state(both), {"loss": value}

    whole = NamedSharding(MESH, P())
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or whole), state
    )
    shardings = (jax.tree.map(lambda x: x.sharding, state), {"loss": whole})
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32, sharding=ROWS)
    return export_step(step, state, {"tokens": tokens}, out_shardings=shardings, donated=1)


if __name__ == "__main__":
    sys.exit(main(build, "from_flax_nnx", "flax", "optax"))
