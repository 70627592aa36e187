"""Twins of programs with a few of their layers: the ops, the border, and the values."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dimension_cases import run
from jax import export

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.transforms.parts.roll_layers.fewer_layers import LayeredProgram

LAYERS, BATCH, WIDTH = 12, 4, 6
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def forward(weights: Any, x: jax.Array) -> jax.Array:
    h = x @ weights["first"]
    for w in weights["layers"]:
        h = h + jnp.tanh(h @ w["in"] + w["bias"]) @ w["out"]
    return h


def step(weights: Any, state: Any, x: jax.Array) -> Any:
    """A training step; the norm of all gradients scales each of them."""
    loss, gradients = jax.value_and_grad(lambda w: jnp.square(forward(w, x)).mean())(weights)
    updates, state = OPTIMIZER.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state, loss


def scaled_by_all(weights: Any, x: jax.Array) -> Any:
    """Each new weight depends on all weights."""
    gradients = jax.grad(lambda w: jnp.square(forward(w, x)).mean())(weights)
    norm = sum(jnp.square(w).sum() for w in jax.tree.leaves(weights))
    return jax.tree.map(lambda w, g: w - g * norm, weights, gradients)


def weights_of(layers: int) -> Any:
    made = np.random.default_rng(layers)

    def random(*shape: int) -> Any:
        return jnp.asarray(made.normal(size=shape).astype(np.float32) / 4)

    layer = [
        {"in": random(WIDTH, WIDTH), "bias": random(WIDTH), "out": random(WIDTH, WIDTH)}
        for _ in range(layers)
    ]
    return {"first": random(WIDTH, WIDTH), "layers": layer}


X = jnp.ones((BATCH, WIDTH))


def step_module(layers: int) -> ir.Module:
    weights = weights_of(layers)
    exported = export.export(jax.jit(step, donate_argnums=(0, 1)))(
        weights, OPTIMIZER.init(weights), X
    )
    return artifact.from_exported(exported).module


def border(module: ir.Module) -> tuple[list[str], list[str]]:
    """The types of the arguments and results."""
    body = Function(entry_function(module)).body
    returned = list(body.operations)[-1].operands
    return [str(value.type) for value in body.arguments], [str(value.type) for value in returned]


def ops(module: ir.Module) -> Counter[str]:
    return Counter(view.operation.name for view in Function(entry_function(module)).body.operations)


@pytest.mark.parametrize("kept", [2, 4])
def test_a_twin_has_the_ops_and_the_border_of_a_step_with_as_many_layers(kept: int):
    layered = LayeredProgram(step_module(LAYERS))
    twin, short = layered.keep(kept), step_module(kept)
    assert layered.count == LAYERS
    assert twin is not None
    assert twin.operation.verify()
    assert border(twin) == border(short)
    products = ("stablehlo.dot_general", "stablehlo.tanh", "stablehlo.sqrt")
    assert {name: ops(twin)[name] for name in products} == {
        name: ops(short)[name] for name in products
    }
    # The norm of all gradients still adds one term for each weight of each layer.
    assert ops(twin)["stablehlo.add"] - ops(short)["stablehlo.add"] == 3 * (LAYERS - kept)


def test_donated_arguments_of_a_twin_name_its_own_results():
    twin = LayeredProgram(step_module(LAYERS)).keep(2)
    assert twin is not None
    main = entry_function(twin)
    given, returned = border(twin)
    aliased = {
        position: ir.IntegerAttr(ir.DictAttr(entry)["tf.aliasing_output"]).value
        for position, entry in enumerate(ir.ArrayAttr(main.attributes["arg_attrs"]))
        if "tf.aliasing_output" in ir.DictAttr(entry)
    }
    assert len(aliased) == len(given) - 1  # all but the batch
    assert all(given[argument] == returned[result] for argument, result in aliased.items())
    assert len(set(aliased.values())) == len(aliased)


def test_a_forward_twin_is_the_model_of_the_layers_that_stay():
    weights = weights_of(LAYERS)
    module = artifact.from_exported(export.export(jax.jit(forward))(weights, X)).module
    twin = LayeredProgram(module).keep(4)
    assert twin is not None
    stay = {**weights, "layers": [weights["layers"][i] for i in (0, 9, 10, 11)]}
    arguments = [np.asarray(leaf) for leaf in (*jax.tree.leaves(stay), X)]
    (value,) = run(twin, arguments)
    np.testing.assert_allclose(value, forward(stay, X), rtol=1e-5, atol=1e-6)


def test_a_program_whose_results_all_need_each_layer_has_no_twin():
    weights = weights_of(LAYERS)
    module = artifact.from_exported(export.export(jax.jit(scaled_by_all))(weights, X)).module
    layered = LayeredProgram(module)
    assert layered.count == LAYERS
    assert layered.keep(4) is None


def test_a_program_without_layers_has_no_twin():
    exported = export.export(jax.jit(lambda x: jnp.tanh(x @ x.T)))(X)
    layered = LayeredProgram(artifact.from_exported(exported).module)
    assert layered.count == 0
    assert layered.keep(2) is None
