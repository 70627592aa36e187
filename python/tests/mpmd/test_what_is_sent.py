"""What ranks send: small values behind the schedule together, others in the type they came from;
and what the devices of a rank do once for all microbatches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mpmd_steps import LENGTH, Step, optimizer

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.ir.walk import ops_named, symbol_name
from stablehlo_tools.mpmd.expansion import Expansion, ExpansionRequest, expand_mpmd
from stablehlo_tools.mpmd.proof.proving import prove
from stablehlo_tools.mpmd.rank_set import load, write
from stablehlo_tools.mpmd.running.set_outcome import SetOptions, run_set

SAMPLES, WIDTH, MICROBATCHES, STAGES = 2, 8, 4, 3


def mixed_step() -> Artifact:
    """A step in bfloat16 whose norms are in float32, converted at the end of each stage."""

    def loss(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        for stage, w in enumerate(weights):
            with jax.named_scope(f"stage_{stage}"):
                x = x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-3)
                x = (x.astype(jnp.bfloat16) @ w).astype(jnp.float32)
        with jax.named_scope(f"stage_{STAGES - 1}"):
            return jnp.mean(jnp.square(x - y))

    def step(weights: list[jax.Array], xs: jax.Array, ys: jax.Array) -> list[jax.Array]:
        def add(total: list[jax.Array], part: tuple[jax.Array, jax.Array]):
            gradients = jax.grad(loss)(weights, *part)
            return [t + g.astype(t.dtype) for t, g in zip(total, gradients, strict=True)], None

        zeros = [jnp.zeros(w.shape, jnp.float32) for w in weights]
        total, _ = lax.scan(add, zeros, (xs, ys))
        return [w - t.astype(w.dtype) for w, t in zip(weights, total, strict=True)]

    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)] * STAGES
    batch = jax.ShapeDtypeStruct((MICROBATCHES, SAMPLES, WIDTH), jnp.float32)
    return artifact.from_exported(export.export(jax.jit(step))(weights, batch, batch))


def expanded(step: Artifact, name: str, ranks: int) -> Expansion:
    return expand_mpmd(step, ExpansionRequest(name, ranks, load_hardware("h100"), None, None))


def check(step: Artifact, expansion: Expansion, directory: Path) -> None:
    write(directory, expansion.manifest, expansion.modules)
    ranks = load(directory)
    proof = prove(ranks)
    assert proof.is_proven, [str(finding) for finding in proof.findings]
    assert run_set(ranks, step, SetOptions()).same


@pytest.mark.parametrize("name", ["1f1b", pytest.param("zb-h1", marks=pytest.mark.soak)])
def test_what_was_converted_goes_in_the_narrower_type(name: str, tmp_path: Path):
    step = mixed_step()
    expansion = expanded(step, name, STAGES)
    types = {t.type for t in expansion.manifest.transfers if t.is_scheduled}
    assert types == {f"tensor<{SAMPLES}x{WIDTH}xbf16>"}
    check(step, expansion, tmp_path)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_numbers_of_the_norm_go_together(ranks: int, tmp_path: Path):
    step = artifact.from_exported(Step().export())
    expansion = expanded(step, "1f1b", ranks)
    sent = Counter(
        (t.source, t.target, t.type)
        for t in expansion.manifest.transfers
        if not t.is_scheduled and t.type != "tensor<24x16xf32>"  # the shared weight's gradient
    )
    assert max(sent.values()) == 1, "one transfer from rank to rank for all numbers of a type"
    assert {key for key in sent if key[1] == 0} == {
        (rank, 0, "tensor<2xf32>") for rank in range(1, ranks)
    }, "a number of the gradients of `up`, and one of `down`"
    check(step, expansion, tmp_path)


def fully_sharded(form: Literal["loop", "unrolled"], accumulate: Literal["scan", "whole"]):
    """A step whose weights and samples two devices divide, and how many microbatches to make."""
    step = Step(devices=2, form=form, accumulate=accumulate, microbatches=8, width=32, samples=32)
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def placed(leaf: Any) -> Any:
        spec = P(*[None] * (len(leaf.shape) - 1), "data") if len(leaf.shape) > 1 else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    weights = step.weights()
    state = jax.eval_shape(optimizer().init, weights)
    state = jax.tree.map(placed, (weights, state))
    batch = jax.ShapeDtypeStruct((8 * 32, LENGTH + 1), jnp.int32)
    batch = jax.ShapeDtypeStruct(
        batch.shape, batch.dtype, sharding=NamedSharding(mesh, P("data", None))
    )
    kept = jax.tree.map(lambda leaf: leaf.sharding, state)
    traced = jax.jit(step.step, out_shardings=(*kept, None))
    exported = artifact.from_exported(export.export(traced)(*state, batch))
    return exported, 8 if accumulate == "whole" else None


def in_phases(expansion: Expansion) -> int:
    """The gathers and reductions of whole weights in what runs for every microbatch."""
    found = 0
    for module in expansion.modules:
        for op in module.body.operations:
            name = symbol_name(op)
            if name.startswith("stage_"):
                kinds = {"stablehlo.all_gather", "stablehlo.reduce_scatter"}
                found += len(ops_named(op.operation, kinds))
    return found


def rows(expansion: Expansion) -> list[tuple[Any, ...]]:
    """Which rank has which rows of each weight, and of each of their results."""
    entries = (*expansion.manifest.inputs, *expansion.manifest.outputs)
    return [
        (entry.path, *((p.rank, p.dim, p.start, p.limit) for p in entry.pieces))
        for entry in entries
        if "['layers']" in entry.path
    ]


@pytest.mark.parametrize(
    ("form", "accumulate"),
    [
        ("loop", "whole"),
        pytest.param("unrolled", "scan", marks=pytest.mark.soak),
        pytest.param("loop", "scan", marks=pytest.mark.soak),
        pytest.param("unrolled", "whole", marks=pytest.mark.soak),
    ],
)
def test_weights_are_gathered_and_gradients_reduced_once(
    form: Literal["loop", "unrolled"], accumulate: Literal["scan", "whole"], tmp_path: Path
):
    step, microbatches = fully_sharded(form, accumulate)
    request = ExpansionRequest("1f1b", 2, load_hardware("h100"), None, microbatches)
    expansion = expand_mpmd(step, request)
    assert in_phases(expansion) == 0
    small = replace(request, hardware=replace(request.hardware, memory_bytes=100_000))
    each = expand_mpmd(step, small)
    # Of layers that are written out, the loop that the tool makes has none from the start.
    is_late = (form, accumulate) != ("unrolled", "whole")
    said = [warning.message for warning in each.warnings]
    assert any("stay in each microbatch: to run them once" in text for text in said) == is_late
    assert bool(in_phases(each)) == is_late
    assert rows(expansion) == rows(each), "each rank has the same weights, and updates them"
    check(step, expansion, tmp_path)
