"""A training loop whose step can be replaced by an artifact.

python own_step.py export step.jax_export    writes the step, for eight devices
python own_step.py train [step.jax_export]   runs the artifact, or jax.jit's step
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import stablehlo_tools

OPTIMIZER = optax.adamw(1e-3)


class State(NamedTuple):
    """What the loop carries."""

    count: Any
    params: Any
    moments: Any


def init(width: int) -> State:
    """The state before the first step: four layers."""
    shapes = {"up": (4, width, 4 * width), "down": (4, 4 * width, width)}
    keys = jax.random.split(jax.random.key(0))
    params = {
        name: 0.02 * jax.random.normal(key, shape, jnp.bfloat16)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return State(jnp.zeros((), jnp.int32), params, OPTIMIZER.init(params))


def step(state: State, batch: Any) -> tuple[State, jax.Array]:
    """One update; returns the next state, and the loss."""

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    def loss(params: Any) -> jax.Array:
        x, _ = lax.scan(layer, batch["x"], params)
        return jnp.mean(jnp.square(x - batch["y"]).astype(jnp.float32))

    value, gradients = jax.value_and_grad(loss)(state.params)
    updates, moments = OPTIMIZER.update(gradients, state.moments, state.params)
    return State(state.count + 1, optax.apply_updates(state.params, updates), moments), value


def described(mesh: Any, width: int, rows: int) -> tuple[State, Any]:
    """Shapes and shardings of the arguments: FSDP over the axis `data`. No array is made."""

    def leaf(value: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.tree.map(
        lambda each: leaf(each, P(None, "data") if each.ndim > 1 else P()),
        jax.eval_shape(lambda: init(width)),
    )
    samples = leaf(jax.ShapeDtypeStruct((rows, width), jnp.bfloat16), P("data"))
    return state, {"x": samples, "y": samples}


def main() -> None:
    """Exports the step, or trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("export", "train"))
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--platform", default="cuda", help="where the step will run")
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=65536, help="of a batch: tokens, say")
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    sizes, jitted = (asked.width, asked.rows), jax.jit(step, donate_argnums=0)
    if asked.what == "export":
        arguments = described(AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,)), *sizes)
        exported = stablehlo_tools.export(jitted, *arguments, platforms=[asked.platform])
        asked.file.write_bytes(exported.serialize())
        return
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    shardings = jax.tree.map(lambda each: each.sharding, described(mesh, *sizes))
    run: Any = stablehlo_tools.load_step(asked.file) if asked.file else jitted
    state = jax.device_put(init(asked.width), shardings[0])
    for number in range(asked.steps):
        keys = jax.random.split(jax.random.key(number))
        batch = {
            name: jax.random.normal(key, (asked.rows, asked.width), jnp.bfloat16)
            for key, name in zip(keys, ("x", "y"), strict=True)
        }
        state, loss = run(state, jax.device_put(batch, shardings[1]))
        print(f"step {number}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
