"""flax.linen: a scan over rematerialised layers, its shardings by logical axes.

    python from_flax_linen.py [--keep DIR] [--optimize]

`nn.logical_to_mesh_sharding` turns the names at the parameters into shardings of the whole
TrainState, the optimizer's moments too; the step is exported under the same rules.
"""

# flax.linen says what it exports in a way that type checkers do not follow.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import sys
from typing import Any

from recipe import abstract, export_step, main

import jax  # isort: skip
import flax.linen as nn
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.export import Exported
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, HEADS, INNER, WORDS = 4, 64, 4, 128, 256
BATCH, LENGTH = 8, 32
RULES = (
    ("batch", "data"),
    ("embed", "data"),  # weights are kept in parts along the data axis: FSDP
    ("mlp", "model"),
    ("heads", "model"),
    ("words", "model"),
    ("layers", None),
)


Named = dict[str, jax.Array]
MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def named(*axes: str | None) -> Any:
    """An initializer whose parameter knows the logical names of its axes."""
    return nn.with_logical_partitioning(nn.initializers.normal(0.02), axes)


def constrained(x: jax.Array, *axes: str | None) -> jax.Array:
    """The activation, divided as its logical axes say.

    Without `mesh=`, and where no mesh is set, flax leaves the constraint out and says nothing.
    """
    return nn.with_logical_constraint(x, axes, mesh=MESH)


class Layer(nn.Module):
    """Attention and two dense layers, each behind a norm and beside a residual."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        x = constrained(x, "batch", None, None)
        attention = nn.MultiHeadDotProductAttention(
            num_heads=HEADS,
            use_bias=False,
            kernel_init=named("embed", "heads", None),
            out_kernel_init=named("heads", None, "embed"),
        )
        x = x + attention(nn.RMSNorm()(x), mask=mask)
        y = nn.Dense(INNER, use_bias=False, kernel_init=named("embed", "mlp"))(nn.RMSNorm()(x))
        y = constrained(nn.gelu(y), "batch", None, "mlp")
        return x + nn.Dense(WIDTH, use_bias=False, kernel_init=named("mlp", "embed"))(y), None


class LanguageModel(nn.Module):
    """The layers in one scan, between an embedding and its transpose."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embedding = nn.Embed(WORDS, WIDTH, embedding_init=named("words", "embed"))
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers(name="layers")(embedding(tokens), nn.make_causal_mask(tokens))
        return embedding.attend(nn.RMSNorm()(x))


def build() -> Exported:
    """The step for 4 parts of the data and 2 of the model."""
    model, optimizer = LanguageModel(), optax.adamw(3e-4)

    def initial(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((BATCH, LENGTH), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def step(state: TrainState, batch: Named) -> tuple[TrainState, Named]:
        tokens = batch["tokens"]

        def loss(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, tokens)[:, :-1]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses.mean()

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), {"loss": value}

    boxed = jax.eval_shape(initial, jax.random.key(0))
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), MESH, RULES)
    rows = NamedSharding(MESH, P("data"))
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32, sharding=rows)
    state = abstract(nn.unbox(boxed), shardings)
    with nn.logical_axis_rules(RULES):
        return export_step(
            step,
            state,
            {"tokens": tokens},
            out_shardings=(shardings, {"loss": NamedSharding(MESH, P())}),
            donated=1,
        )


if __name__ == "__main__":
    sys.exit(main(build, "from_flax_linen", "flax", "optax"))
