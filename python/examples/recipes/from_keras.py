"""Keras 3 on jax: the training step that `fit` compiles, under `keras.distribution.ModelParallel`.

    python from_keras.py [--keep DIR] [--optimize]

`fit` jits `Model.train_step(state, data)` over four lists of variables. The same is exported here,
with the shardings that the layout map gave the variables.
"""

# The library is in an environment of its own: see docs/recipes.
# pyright: reportMissingImports=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

from recipe import export_step, main

import jax  # isort: skip
import keras
import numpy as np
from jax.export import Exported
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, HEADS, INNER, WORDS = 2, 64, 4, 128, 256
BATCH, LENGTH = 8, 32


def distribution() -> keras.distribution.ModelParallel:
    """4 parts of the batch, along which weights are divided too, and 2 of the model."""
    mesh = keras.distribution.DeviceMesh((4, 2), ("batch", "model"))
    layout = keras.distribution.LayoutMap(mesh)
    layout["embedding/embeddings"] = ("model", "batch")
    layout[".*(query|key|value)/kernel"] = ("batch", "model", None)
    layout[".*attention_output/kernel"] = ("model", None, "batch")
    layout[".*up/kernel"] = ("batch", "model")
    layout[".*down/kernel"] = ("model", "batch")
    return keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")


def language_model() -> keras.Model:
    """Layers of attention and two dense layers, compiled with AdamW as for `fit`."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH, name="embedding")(tokens)
    for layer in range(LAYERS):
        attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, use_bias=False)
        y = keras.layers.RMSNormalization()(x)
        x = x + attention(y, y, use_causal_mask=True)
        y = keras.layers.RMSNormalization()(x)
        y = keras.layers.Dense(INNER, "silu", use_bias=False, name=f"layer{layer}_up")(y)
        x = x + keras.layers.Dense(WIDTH, use_bias=False, name=f"layer{layer}_down")(y)
    logits = keras.layers.Dense(WORDS, use_bias=False)(keras.layers.RMSNormalization()(x))
    model = keras.Model(tokens, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(3e-4), loss=loss)
    return model


def build() -> Exported:
    """The step with the state and the batch that `fit` gives it."""
    # Before the first layer: what is made without it lies on one device, and does not fit the rest.
    keras.distribution.set_distribution(distribution())
    model = language_model()
    batch = (np.zeros((BATCH, LENGTH), np.int32), np.zeros((BATCH, LENGTH), np.int32))
    model._symbolic_build(data_batch=batch)  # as fit does, for the metrics
    model.optimizer.build(model.trainable_variables)
    state = model._get_jax_state(
        trainable_variables=True,
        non_trainable_variables=True,
        optimizer_variables=True,
        metrics_variables=True,
    )
    mesh = model.trainable_variables[0].value.sharding.mesh

    def shape(value: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    def step(state: Any, data: Any) -> tuple[Any, Any]:
        logs, state = model.train_step(state, data)
        return state, logs

    shapes = jax.tree.map(lambda value: shape(value, value.sharding), state)
    rows = jax.tree.map(lambda value: shape(value, NamedSharding(mesh, P("batch"))), batch)
    shardings = (model._get_state_sharding_spec(), {"loss": NamedSharding(mesh, P())})
    return export_step(step, shapes, rows, out_shardings=shardings, donated=1)


if __name__ == "__main__":
    sys.exit(main(build, "from_keras", "keras"))
