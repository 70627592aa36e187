"""split-batch on whole programs: values, collectives, what is refused, and what is found."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.export import Exported
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from kept_values import assert_kept, compared
from models.zoo import ZOO

import stablehlo_tools
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.diagnostics import ToolError

# As the partitioner has it: by cost, toys like these have little to hide.
PARTITIONING = "partition{choices=shardy},create-reduce-scatter"
QUICK = {"decoder-tp-forward"}
# Each with at least two samples on a device, where the model's own batch has fewer.
OPTIONS: dict[str, dict[str, Any]] = {
    "decoder-tp-forward": {},
    "decoder-tp-step": {},
    "decoder-2d-step": {},
    "decoder-2d-scan-step": {"optimizer": "sgd"},
    "decoder-2d-remat-step": {},
    "decoder-fsdp-step": {"batch": 16},
    "vit-forward": {},
    "vit-step": {},
    "mamba-forward": {},
    "mamba-scan-step": {},
    "mamba-associative-step": {},
    "encoder-decoder-forward": {},
    "encoder-decoder-step": {},
    "moe-forward": {"batch": 16},
    "nnx-llama-forward": {},
    "nnx-llama-step": {},
}
# The same ops on half as many samples give the same bits on XLA:CPU.
BITWISE = {"decoder-tp-forward", "mamba-forward", "encoder-decoder-forward"}
REFUSED = {"convnet-step": "reduce", "moe-step": "reduce"}


@functools.cache
def partitioned(name: str) -> Exported:
    """A model with explicit collectives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = ZOO[name].build(**OPTIONS.get(name, {"batch": 16}))
        assert isinstance(exported, Exported)
        return stablehlo_tools.transform(exported, PARTITIONING)


def soaked(names: Any) -> list[Any]:
    """All names, those that are not quick for `make soak`."""
    return [pytest.param(n, marks=() if n in QUICK else pytest.mark.soak) for n in names]


def collectives(exported: Exported) -> Counter[str]:
    """How many collectives of each kind a program has in its text."""
    return Counter(c.kind for c in find_collectives(artifact.from_exported(exported).module))


@pytest.mark.parametrize("name", soaked(OPTIONS))
def test_models_keep_their_values(name: str):
    before = partitioned(name)
    after = stablehlo_tools.transform(before, "split-batch{against=text}")
    assert sum(collectives(after).values()) > sum(collectives(before).values())
    outputs = compared(before, after, ZOO[name].arguments(0, **OPTIONS[name]))
    assert_kept(outputs, bitwise=name in BITWISE)


@pytest.mark.parametrize("name", soaked(["decoder-tp-step"]))
def test_more_parts_keep_the_values(name: str):
    before = partitioned(name)
    after = stablehlo_tools.transform(before, "split-batch{parts=4 against=text}")
    assert_kept(compared(before, after, ZOO[name].arguments(0, **OPTIONS[name])))


@pytest.mark.parametrize("name", soaked(REFUSED))
def test_models_that_mix_samples_are_refused_by_name(name: str):
    with pytest.raises(ToolError, match=rf"stablehlo.{REFUSED[name]} mixes samples"):
        stablehlo_tools.transform(partitioned(name), "split-batch{against=text}")


@pytest.mark.parametrize("name", soaked(["decoder-2d-scan-step"]))
def test_the_same_bytes_come_out_every_time(name: str):
    after = [
        stablehlo_tools.transform(partitioned(name), "split-batch{against=text}") for _ in range(2)
    ]
    assert after[0].mlir_module_serialized == after[1].mlir_module_serialized


def on_devices(function: Callable[..., Any], specs: Any, results: Any, *shapes: Any) -> Exported:
    """The export of a function of what one of eight devices has."""
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("model",))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
    arguments = [
        jax.ShapeDtypeStruct(s[1:], jnp.int32)
        if s[0] == "i"
        else jax.ShapeDtypeStruct(s, jnp.float32)
        for s in shapes
    ]
    return export.export(jax.jit(mapped))(*arguments)


def random_arguments(exported: Exported) -> list[Any]:
    """Arguments for a program of floats and small integers."""
    random = np.random.default_rng(0)
    return [
        random.integers(0, 4, aval.shape).astype(np.int32)
        if aval.dtype == np.int32
        else random.standard_normal(aval.shape).astype(np.float32)
        for aval in exported.in_avals
    ]


def split_here(exported: Exported, options: str = "") -> Exported:
    """The program in parts, whose values are compared."""
    after = stablehlo_tools.transform(exported, f"split-batch{{{options} against=text}}")
    assert_kept(compared(exported, after, random_arguments(exported)))
    return after


def _megatron(up: Any, down: Any, x: Any) -> Any:
    return lax.psum(jax.nn.gelu(x @ up) @ down, "model")


MEGATRON = ((P(None, "model"), P("model"), P()), P(), (16, 32), (32, 16), (8, 16))


def test_a_layer_has_each_collective_once_for_each_part():
    before = on_devices(_megatron, *MEGATRON)
    assert collectives(split_here(before)) == {"all_reduce": 2}
    assert collectives(split_here(before, "parts=4")) == {"all_reduce": 4}


def test_a_named_argument_is_the_batch():
    before = on_devices(_megatron, *MEGATRON)
    assert collectives(split_here(before, "arguments=2")) == {"all_reduce": 2}
    columns = split_here(before, "arguments=0 dimension=1")
    assert collectives(columns) == {"all_reduce": 1}


def test_a_second_run_splits_the_parts():
    before = on_devices(_megatron, *MEGATRON)
    assert collectives(split_here(split_here(before))) == {"all_reduce": 4}


def _megatron_step(up: Any, down: Any, x: Any) -> Any:
    def loss(up: Any, down: Any) -> Any:
        return (_megatron(up, down, x) ** 2).mean()

    value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(up, down)
    return lax.pmean(value, "model"), gradients


def test_gradients_are_summed_over_the_parts():
    specs, _, *shapes = MEGATRON
    results = (P(), (P(None, "model"), P("model")))
    after = split_here(on_devices(_megatron_step, specs, results, *shapes))
    assert collectives(after)["all_reduce"] > 2


def _two_towers(up: Any, down: Any, x: Any, y: Any) -> Any:
    return _megatron(up, down, x), _megatron(up, down, y)


def test_both_towers_are_split():
    specs, _, *shapes = MEGATRON
    before = on_devices(_two_towers, (*specs, P()), (P(), P()), *shapes, (8, 16))
    assert collectives(split_here(before)) == {"all_reduce": 4}


def _masked_loss(up: Any, down: Any, x: Any, tokens: Any) -> Any:
    mask = (tokens > 0).astype(x.dtype)

    def loss(down: Any) -> Any:
        return ((_megatron(up, down, x) ** 2).mean(-1) * mask).sum() / mask.sum()

    return jax.grad(loss)(down)


def test_a_count_of_tokens_mixes_nothing():
    specs, _, *shapes = MEGATRON
    before = on_devices(_masked_loss, (*specs, P()), P("model"), *shapes, ("i", 8))
    split_here(before)


def _centred(up: Any, down: Any, x: Any) -> Any:
    x = x - x.mean(0)
    return _megatron(up, down, x)


def test_mixing_is_refused_where_it_stands_or_joined():
    before = on_devices(_centred, *MEGATRON)
    with pytest.raises(ToolError, match="mixes samples") as refused:
        stablehlo_tools.transform(before, "split-batch{against=text}")
    assert refused.value.diagnostic.place.function == "_centred"
    assert refused.value.diagnostic.notes[0].message == "it meets samples again here"
    assert collectives(split_here(before, "join-mixed")) == {"all_reduce": 2}


def _in_two_computations(up: Any, down: Any, x: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("model",))
    specs, result, *_ = MEGATRON
    layer = jax.shard_map(_megatron, mesh=mesh, in_specs=specs, out_specs=result)
    return layer(up, down, jnp.sin(layer(up, down, x)))


def test_each_manual_computation_is_split():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in MEGATRON[2:]]
    before = export.export(jax.jit(_in_two_computations))(*shapes)
    assert collectives(before) == {"all_reduce": 2}
    assert collectives(split_here(before)) == {"all_reduce": 4}
