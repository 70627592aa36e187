"""offload{state}: an optimizer's state in the host's memory, in jax and as the compilers see it."""

from __future__ import annotations

from typing import Any

import pytest
from models.devices import mesh
from optimizer_steps import OPTIMIZERS, data_parallel_step

import jax  # isort: skip
import numpy as np
from exact_comparison import BITS, assert_identical
from jax import export, memory
from models.zoo import MODELS

import stablehlo_tools
from stablehlo_tools.analysis.tasks.graph import expected_run
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.transforms.parts.offload.state import move_state, state_groups

GIB = 2.0**30
HOST = memory.Space.Host


def with_state_in_host(before: Artifact) -> Artifact:
    """A step with all of its state in the host's memory."""
    after = before.copy()
    inline_all_calls(after.module)
    move_state(after.module, state_groups(after.module))
    assert after.module.operation.verify()
    return after


def of_host(avals: Any) -> list[tuple[int, ...]]:
    """The shapes of what an `Exported` says lies in the host's memory."""
    return [aval.shape for aval in avals if aval.memory_space == HOST]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_values(name: str):
    before = artifact.from_exported(data_parallel_step(name))
    after = with_state_in_host(before)
    moved = of_host(after.to_exported().in_avals)
    assert bool(moved) == (name != "muon"), "what matrix products depend on stays"
    assert of_host(after.to_exported().out_avals) == moved
    assert_identical(before, after)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_values_behind_partition(name: str):
    """Also of state that is divided; what `partition` itself updates in slices stays."""
    before = artifact.from_exported(data_parallel_step(name))
    pipeline = "shard-optimizer,partition,create-reduce-scatter"
    after = with_state_in_host(stablehlo_tools.transform(before, pipeline))
    assert of_host(after.to_exported().in_avals)
    assert_identical(before, after)


def test_values_are_bitwise_in_the_interpreter():
    sizes = {"layers": 1, "d_model": 16, "heads": 2, "key_value_heads": 1, "d_feed_forward": 16}
    sizes |= {"vocabulary": 16, "batch": 2, "sequence": 4, "fsdp": 1, "model": 1}
    one = MODELS["decoder-2d-scan-step"].build(**sizes)
    assert isinstance(one, export.Exported)
    before = artifact.from_exported(one)
    after = with_state_in_host(before)
    assert len(of_host(after.to_exported().in_avals)) == len(state_groups_of(before)) * 2
    assert_identical(before, after, BITS)


def state_groups_of(program: Artifact) -> list[Any]:
    copy = program.copy()
    inline_all_calls(copy.module)
    return state_groups(copy.module)


def test_jax_gives_the_state_back_where_it_was_given():
    exported = data_parallel_step("adamw")
    after = with_state_in_host(artifact.from_exported(exported)).to_exported()
    read = export.deserialize(bytearray(after.serialize()))
    on = mesh(data=4, model=2)
    leaves = [
        np.random.default_rng(n).standard_normal(aval.shape).astype(aval.dtype) ** 2
        for n, aval in enumerate(read.in_avals)
    ]

    def given(program: export.Exported) -> list[jax.Array]:
        pairs = zip(leaves, program.in_shardings_jax(on), strict=True)
        return [jax.device_put(leaf, sharding) for leaf, sharding in pairs]

    def run(program: export.Exported) -> list[jax.Array]:
        arguments, _ = jax.tree.unflatten(program.in_tree, given(program))
        return jax.tree.leaves(jax.jit(program.call)(*arguments))

    told = [array.sharding.memory_kind == "pinned_host" for array in given(read)]
    assert told == [aval.memory_space == HOST for aval in read.in_avals]
    results = run(read)
    told = [array.sharding.memory_kind == "pinned_host" for array in results]
    assert told == [aval.memory_space == HOST for aval in read.out_avals]
    for one, other in zip(run(exported), results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def step() -> Artifact:
    """A step of a decoder on one device, of which half a GiB is state."""
    sizes = {"d_model": 1024, "heads": 8, "d_feed_forward": 4096, "vocabulary": 8192}
    sizes |= {"layers": 4, "batch": 4, "sequence": 1024, "fsdp": 1, "model": 1}
    return artifact.from_exported(MODELS["decoder-2d-scan-step"].full(**sizes))


def test_so_much_less_memory_is_expected(step: Artifact):
    after = with_state_in_host(step)
    moved = sum(group.bytes for group in state_groups_of(step))
    expected = [expected_run(p.module, load_hardware("h100")).peak_bytes for p in (step, after)]
    assert expected[1] < expected[0] - 0.6 * moved


@pytest.mark.soak  # 20 s of compiling; that XLA:GPU keeps rows there is in test_offload
def test_xla_gpu_has_that_much_more_memory(step: Artifact):
    after = with_state_in_host(step)
    moved = sum(group.bytes for group in state_groups_of(step))
    one, other = (compile_artifact(program, "gpu").memory for program in (step, after))
    assert other.argument_bytes == pytest.approx(one.argument_bytes - moved, rel=1e-3)
    assert other.peak_bytes < one.peak_bytes - 0.6 * moved


@pytest.mark.soak
def test_xla_tpu_takes_what_did_not_fit():
    """XLA:TPU fills memory that is free with copies: only where it is short does it hold them."""
    sizes = {"d_model": 2048, "heads": 16, "d_feed_forward": 8192, "vocabulary": 32_000}
    sizes |= {"layers": 12, "batch": 8, "sequence": 2048, "fsdp": 1, "model": 1}
    model = MODELS["decoder-2d-scan-step"].full(**sizes, remat=True, policy="nothing_saveable")
    before = artifact.from_exported(model)
    with pytest.raises(ToolError, match="Ran out of memory on HBM"):
        compile_artifact(before, "tpu")
    compile_artifact(with_state_in_host(before), "tpu")


def test_as_much_is_moved_as_it_takes(step: Artifact):
    peak = expected_run(step.module, load_hardware("h100")).peak_bytes / GIB
    limit = peak - 0.3
    after = stablehlo_tools.transform(step, f"offload{{memory-limit={limit} margin=0 state}}")
    moved = of_host(after.to_exported().in_avals)
    assert 0 < len(moved) < 2 * len(state_groups_of(step))
    assert expected_run(after.module, load_hardware("h100")).peak_bytes <= limit * GIB
    again = stablehlo_tools.transform(after, f"offload{{memory-limit={limit} margin=0 state}}")
    assert of_host(again.to_exported().in_avals) == moved, "it fits, and is left alone"
