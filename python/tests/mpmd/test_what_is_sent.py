"""What ranks send: small values behind the schedule together, others in the type they came from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax
from mpmd_steps import Step

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.mpmd.expansion import Expansion, Request, expand_mpmd
from stablehlo_tools.mpmd.proof.proving import prove
from stablehlo_tools.mpmd.rank_set import load, write
from stablehlo_tools.mpmd.running.outcome import Options, run_set

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
    return expand_mpmd(step, Request(name, ranks, load_hardware("h100"), None, None))


def check(step: Artifact, expansion: Expansion, directory: Path) -> None:
    write(directory, expansion.manifest, expansion.modules)
    ranks = load(directory)
    proof = prove(ranks)
    assert proof.is_proven, [str(finding) for finding in proof.findings]
    assert run_set(ranks, step, Options()).same


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_what_was_converted_goes_in_the_narrower_type(name: str, tmp_path: Path):
    step = mixed_step()
    expansion = expanded(step, name, STAGES)
    types = {t.type for t in expansion.manifest.transfers if t.is_scheduled}
    assert types == {f"tensor<{SAMPLES}x{WIDTH}xbf16>"}
    check(step, expansion, tmp_path)


@pytest.mark.parametrize("ranks", [2, 3])
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
