"""accumulate-gradients on whole programs: values, what stands in the loop, and memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accumulation_programs import STEPS
from jax import export, lax
from jax.export import Exported
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kept_values import Known, assert_kept
from models.devices import mesh
from models.zoo import LAYER_SCANS, ZOO
from pipeline_checks import collectives_after_partition, loops, reference, shown
from soaking import first, one_in

import stablehlo_tools
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.walk import entry_function

SLOW = [
    "lengths",
    "preferences",
    "gradient-penalty",
    "hessian-product",
    "half-precision",
    "batch-last",
]
QUICK = [name for name, step in STEPS.items() if not step.refused and name not in SLOW]
REFUSED = [name for name, step in STEPS.items() if step.refused]
# What the pass cannot do of the zoo of layer loops, and why.
UNDIVIDED = {
    "accumulate-fori-step": "rows of the batch are taken by a number that is computed",
    "statistics-forward": "a maximum over the batch goes into a stack",
    "statistics-gradients": "a maximum over the batch goes into a stack",
    "by-outputs-gradients": "the loss is divided by a sum over all outputs",
}
SCANS = [
    name
    for name, case in LAYER_SCANS.items()
    if name not in UNDIVIDED and (not case.refused or name == "dynamic-depth-forward")
]
SOONER = ["mlp-gradients", "packed-forward"]


def accumulated(exported: Exported, options: str = "microbatches=4") -> Exported:
    return stablehlo_tools.transform(exported, f"accumulate-gradients{{{options}}}")


@pytest.mark.parametrize("name", one_in(3, QUICK + SLOW))
def test_values_are_kept(name: str):
    step = STEPS[name]
    before = step.export()
    known = Known.of(before, step.arguments)
    after = accumulated(before)
    assert any(loop.trips == 4 for loop in loops(after))
    assert_kept(known.compared(after))


@pytest.mark.parametrize("microbatches", [2, 8])
def test_any_number_of_microbatches_keeps_values(microbatches: int):
    step = STEPS["squared-errors"]
    before = step.export()
    after = accumulated(before, f"microbatches={microbatches}")
    assert_kept(Known.of(before, step.arguments).compared(after))


@pytest.mark.parametrize("name", REFUSED)
def test_what_hangs_on_all_samples_is_refused_by_name(name: str):
    step = STEPS[name]
    with pytest.raises(ToolError) as caught:
        accumulated(step.export())
    text = caught.value.diagnostic.render("input")
    assert step.refused in text
    assert ("(P3)" if name == "seven-samples" else "(P4)") in text


@pytest.mark.parametrize("name", first(1, [*SOONER, *(n for n in SCANS if n not in SOONER)]))
def test_loops_over_layers_are_in_the_loop(name: str):
    case = LAYER_SCANS[name]
    after = accumulated(case.build())
    assert "4[" in shown(loops(after))
    assert_kept(reference(case).compared(after))


@pytest.mark.parametrize("name", first(2, UNDIVIDED))
def test_known_limits_are_refused(name: str):
    with pytest.raises(ToolError, match=r"\(P[34]\)"):
        accumulated(LAYER_SCANS[name].build())


@pytest.mark.soak
def test_microbatches_smaller_than_the_devices_they_are_divided_over_keep_values():
    case = LAYER_SCANS["llama-bf16-step"]
    assert_kept(reference(case).compared(accumulated(case.build())))


@pytest.mark.parametrize("name", first(1, ["decoder-tp-step", "decoder-2d-scan-step", "vit-step"]))
def test_gradients_are_summed_over_devices_once(name: str):
    exported = ZOO[name].build()
    assert isinstance(exported, Exported)
    before = collectives_after_partition(exported)
    inner = [sent for sent in before if sent.depth == 0]
    after = collectives_after_partition(exported, "partition{choices=shardy},accumulate-gradients")
    outside = [sent for sent in after if sent.depth == 0]
    assert 0 < len(outside) < len(inner)
    assert len(after) <= len(before)


def test_one_accumulator_for_each_gradient_and_sum():
    step = STEPS["masked-adam"]
    module = artifact.from_exported(accumulated(step.export())).module
    ops = [view.operation for view in entry_function(module).regions[0].blocks[0].operations]
    (loop,) = [op for op in ops if op.name == "stablehlo.while"]
    weights = len(jax.tree.leaves(step.arguments[0]))
    assert len(loop.results) == 1 + 1 + weights  # the counter and the loss


def test_the_loop_holds_nothing_that_no_microbatch_changes():
    """Casts of weights stand in front, though rematerialisation puts a barrier around them."""
    module = artifact.from_exported(accumulated(STEPS["rematerialised"].export())).module
    main = entry_function(module)
    assert _count(main, "stablehlo.exponential", inside=False) > 0
    assert _count(main, "stablehlo.exponential", inside=True) == 0


def _count(op: ir.Operation, name: str, *, inside: bool, depth: int = 0) -> int:
    found = int(op.name == name and (depth > 0) == inside)
    below = depth + (op.name == "stablehlo.while")
    for region in op.regions:
        for block in region.blocks:
            for view in block.operations:
                found += _count(view.operation, name, inside=inside, depth=below)
    return found


def test_the_same_input_gives_the_same_bytes():
    exported = STEPS["metrics"].export()
    texts = {str(accumulated(exported).mlir_module()) for _ in range(2)}
    assert len(texts) == 1


def test_activations_take_the_memory_of_one_microbatch():
    def loss(weights: Any, x: Any) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    weights = [jax.ShapeDtypeStruct((16, 16), np.float32)] * 4
    x = jax.ShapeDtypeStruct((4096, 16), np.float32)
    before = export.export(jax.jit(jax.grad(loss)))(weights, x)
    after = accumulated(before, "microbatches=16")
    assert 4 * _temporary_bytes(after) < _temporary_bytes(before)


def _temporary_bytes(exported: Exported) -> int:
    arguments = jax.tree.unflatten(exported.in_tree, exported.in_avals)[0]
    compiled = jax.jit(exported.call).lower(*arguments).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def test_gradients_of_convolutions_on_fewer_samples_than_devices_need_partition():
    """XLA's partitioner multiplies them by the number of devices that compute the same."""
    sharded = NamedSharding(mesh(data=4, model=2), P("data"))

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            numbers = ("NHWC", "HWIO", "NHWC")
            made = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
            return jnp.mean(jnp.tanh(made) ** 2)

        return w - jax.grad(loss)(w)

    arguments = [
        jax.ShapeDtypeStruct((3, 3, 4, 4), jnp.float32),
        jax.ShapeDtypeStruct((4, 8, 8, 4), jnp.float32, sharding=sharded),
    ]
    program = export.export(jax.jit(step))(*arguments)
    with pytest.raises(ToolError, match=r"computes such gradients of convolutions wrongly \(P6\)"):
        accumulated(program, "microbatches=2")
    passes = "accumulate-gradients{microbatches=2},partition"
    assert len(loops(stablehlo_tools.transform(program, passes))) == 1
