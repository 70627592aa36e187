"""Training steps in plain data parallelism with optax's optimizers: all state is everywhere."""

from __future__ import annotations

from typing import Any

from models.devices import mesh  # first: sets up the devices

import jax  # isort: skip
import jax.numpy as jnp
import optax
from jax import export, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

OPTIMIZERS: dict[str, Any] = {
    "adamw": optax.adamw(1e-3),
    "lion": optax.lion(1e-3),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(1e-3),
}
LAYERS = 2


def data_parallel_step(
    name: str, *, width: int = 32, clip: bool = True, scan: bool = False, batch: int = 16
) -> export.Exported:
    """`((parameters, state), x, y) -> ((parameters, state), loss)`, on data 4 x model 2."""
    on = mesh(data=4, model=2)
    update = OPTIMIZERS[name]
    if clip:
        update = optax.chain(optax.clip_by_global_norm(1.0), update)
    lead = (LAYERS,) if scan else ()
    shapes = {"up": (*lead, width, 2 * width), "down": (*lead, 2 * width, width)}
    free = [None] * len(lead)
    specs = {"up": P(*free, None, "model"), "down": P(*free, "model", None)}

    def placed(spec: P) -> NamedSharding:
        return NamedSharding(on, spec)

    layer = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}
    shardings = {key: placed(spec) for key, spec in specs.items()}
    parameters: Any = layer if scan else [layer] * LAYERS
    of_parameters: Any = shardings if scan else [shardings] * LAYERS
    leaves, tree = jax.tree.flatten(jax.eval_shape(update.init, parameters))
    by_shape = {shapes[key]: shardings[key] for key in shapes}
    of_state = [by_shape.get(leaf.shape, placed(P())) for leaf in leaves]

    def block(x: jax.Array, weights: Any) -> jax.Array:
        return x + jnp.tanh(x @ weights["up"]) @ weights["down"]

    def loss(given: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        if scan:
            x, _ = lax.scan(lambda x, w: (block(x, w), None), x, given)
        else:
            for weights in given:
                x = block(x, weights)
        return jnp.square(x - y).mean()

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        given, moments = state[0], jax.tree.unflatten(tree, state[1])
        value, gradients = jax.value_and_grad(loss)(given, x, y)
        changes, moments = update.update(gradients, moments, given)
        return (optax.apply_updates(given, changes), jax.tree.leaves(moments)), value

    rows = placed(P("data", None))
    state_shardings = (of_parameters, of_state)
    jitted = jax.jit(
        step,
        in_shardings=(state_shardings, rows, rows),
        out_shardings=(state_shardings, placed(P())),
        donate_argnums=(0,),
    )
    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    return export.export(jitted, platforms=("cpu",))((parameters, leaves), x, x)
