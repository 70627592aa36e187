"""roll-layers on training steps whose layers stand in a Python loop, and pipelines of that.

Each program is a loss of four small layers, or what it makes of two stacks of them; the step gives
the weights after a descent, and the loss. lit_tests/semantics/roll_layers.mlir has the bits; a
compiler fuses a loop's ops otherwise than those of layers one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kept_values import Known, assert_kept
from pipeline_checks import loops
from soaking import one_in

import stablehlo_tools
from stablehlo_tools.diagnostics import ToolError

LAYERS, BATCH, WIDTH = 4, 8, 6
GPIPE, CIRCULAR = "microbatches=2", "microbatches=2 schedule=circular repeats=2"
ONE_F_ONE_B = "microbatches=2 schedule=1f1b"
Loss = Callable[[Any, Any], Any]


def plain(weights: Any, x: Any) -> Any:
    """Nothing asks for the cotangent of what the first layer reads."""
    for w in weights["layers"]:
        x = jnp.tanh(x @ w["in"] + w["bias"])
    return jnp.square(x).mean()


def normed(weights: Any, x: Any) -> Any:
    """The last norm, and the product behind it, look like the beginning of a layer."""

    def norm(h: Any, scale: Any) -> Any:
        return h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6) * scale

    h = x @ weights["first"]
    for w in weights["layers"]:
        h = h + jax.nn.gelu(norm(h, w["bias"]) @ w["in"]) @ w["out"]
    return jnp.square(norm(h, weights["shared"]) @ weights["first"]).mean()


def shared_bias(weights: Any, x: Any) -> Any:
    """The gradient of a bias adds up over the layers, and begins with the last one's."""
    h = x @ weights["first"]
    for w in weights["layers"]:
        h = h + jnp.tanh(h @ w["in"] + weights["shared"])
    return jnp.square(h).mean()


def memory(weights: Any, x: Any) -> Any:
    """All layers read, twice, what was made in front of them, as in cross attention."""
    read = jnp.tanh(x @ weights["first"])
    h = x
    for w in weights["layers"]:
        h = h + jnp.tanh(h @ w["in"] + read @ w["out"]) * jax.nn.sigmoid(read @ w["out"])
    return jnp.square(h).mean()


def masked(weights: Any, x: Any) -> Any:
    """Each layer makes a mask for itself, and is computed again for its backward."""

    @jax.checkpoint
    def layer(h: Any, w: Any) -> Any:
        mask = jnp.tril(jnp.ones((WIDTH, WIDTH), bool))
        return h + jnp.tanh(h @ jnp.where(mask, w["in"], 0.0))

    h = x @ weights["first"]
    for w in weights["layers"]:
        h = layer(h, w)
    return jnp.square(h).mean()


def rows(weights: Any, x: Any) -> Any:
    """The weights are stacked, and the loop is not."""
    h = x @ weights["first"]
    for i in range(LAYERS):
        h = h + jnp.tanh(h @ weights["stacked"][i])
    return jnp.square(h).mean()


def two_stacks(weights: Any, x: Any) -> Any:
    """One kind of layer and then another, which all read what the first ones gave."""
    read = x @ weights["first"]
    for w in weights["layers"]:
        read = jnp.tanh(read @ w["in"])
    h = x
    for w in weights["layers"]:
        h = h + jax.nn.gelu(h @ w["out"] + read)
    return jnp.square(h).mean()


def arguments(*used: str) -> tuple[Any, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)

    def array(*shape: int) -> np.ndarray[Any, Any]:
        return (0.5 * random.normal(size=shape)).astype("f4")

    square = WIDTH, WIDTH
    names = used or ("first", "shared", "layers")
    layer = {"in": square, "out": square, "bias": (WIDTH,)}
    every = {
        "first": array(*square),
        "shared": array(WIDTH),
        "stacked": array(LAYERS, *square),
        "layers": [{k: array(*shape) for k, shape in layer.items()} for _ in range(LAYERS)],
    }
    return {name: every[name] for name in names}, array(BATCH, WIDTH)


def step(loss: Loss, given: tuple[Any, Any]) -> export.Exported:
    """A step of descent, exported for two stages with everything on both."""
    mesh = AbstractMesh((2,), ("stage",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, P())

    def descent(weights: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), given)
    return export.export(jax.jit(descent))(*shapes)


def given_to(loss: Loss) -> tuple[Any, Any]:
    return arguments("first", "stacked") if loss is rows else arguments()


ALL = [plain, normed, shared_bias, memory, masked, rows]


@pytest.mark.parametrize("loss", one_in(2, [*ALL, two_stacks]), ids=lambda loss: loss.__name__)
def test_forward_and_backward_are_loops_over_all_layers(loss: Loss):
    given = given_to(loss)
    before = step(loss, given)
    after = stablehlo_tools.transform(before, "roll-layers")
    stacks = 2 if loss is two_stacks else 1
    assert [loop.trips for loop in loops(after)] == [LAYERS] * (2 * stacks)
    assert_kept(Known.of(before, given).compared(after))


def test_what_all_layers_make_alike_is_made_once():
    """A mask of each layer is neither kept for its backward nor made again in the loop."""
    text = stablehlo_tools.transform(step(masked, arguments()), "roll-layers").mlir_module()
    assert "xi1>) -> tensor<1x" not in text
    assert text.count(f"tensor<{LAYERS}x{WIDTH}x{WIDTH}xi1>") == 0


@pytest.mark.parametrize(
    ("loss", "options"),
    [(plain, ONE_F_ONE_B), (shared_bias, CIRCULAR), (memory, ONE_F_ONE_B), (two_stacks, GPIPE)],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_a_pipeline_of_it(loss: Loss, options: str):
    check_pipeline(loss, options)


@pytest.mark.soak
@pytest.mark.parametrize("options", [GPIPE, CIRCULAR, ONE_F_ONE_B])
@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.__name__)
def test_every_pipeline_of_it(loss: Loss, options: str):
    check_pipeline(loss, options)


def check_pipeline(loss: Loss, options: str) -> None:
    given = given_to(loss)
    before = step(loss, given)
    pipeline = f"roll-layers,expand-pipeline{{{options}}},partition"
    assert_kept(Known.of(before, given).compared(stablehlo_tools.transform(before, pipeline)))


def test_a_pipeline_of_what_is_not_rolled_says_what_to_do():
    with pytest.raises(ToolError, match="run roll-layers first if they are written out one"):
        stablehlo_tools.transform(step(plain, arguments()), f"expand-pipeline{{{GPIPE}}}")
