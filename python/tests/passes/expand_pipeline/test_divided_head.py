"""The head of a microbatch in 1F1B: a part of it on each rank, and as much kept as one asks for."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, export, lax
from jax.export import Exported
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kept_values import Known, assert_kept

import stablehlo_tools
from stablehlo_tools.diagnostics import ToolError

_LAYERS, _BATCH, _TOKENS, _WIDE, _WORDS = 4, 16, 8, 16, 96


def _layer(h: Array, weight: Array) -> tuple[Array, None]:
    return h + jnp.tanh(h @ weight), None


def _one_hot(logits: Array, labels: Array) -> Array:
    hot = jax.nn.one_hot(labels, _WORDS, dtype=logits.dtype)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * hot, axis=-1))


def _masked(logits: Array, labels: Array) -> Array:
    """Of tokens that are not 0, as many as there are."""
    hot = jax.nn.one_hot(labels, _WORDS, dtype=logits.dtype)
    mask = (labels != 0).astype(logits.dtype)
    each = jnp.sum(jax.nn.log_softmax(logits) * hot, axis=-1)
    return -jnp.sum(each * mask) / jnp.sum(labels != 0)


def _logits_too(logits: Array, labels: Array) -> Array:
    return _one_hot(logits, labels)


def _chunked(h: Array, head: Array, labels: Array) -> Array:
    """Of a quarter of the tokens at a time, whose logits the backward makes again."""

    @jax.checkpoint
    def chunk(total: Array, rows: tuple[Array, Array]) -> tuple[Array, None]:
        return total + _one_hot(rows[0] @ head, rows[1]) / 4, None

    chunks = h.reshape(_BATCH, 4, -1, _WIDE).swapaxes(0, 1)
    of_chunks = labels.reshape(_BATCH, 4, -1).swapaxes(0, 1)
    return lax.scan(chunk, jnp.zeros(()), (chunks, of_chunks))[0]


LOSSES = {"one-hot": _one_hot, "masked": _masked, "logits": _logits_too}


@cache
def _program(
    loss: str, tokens: int, *, shifted: bool, axes: tuple[tuple[str, int], ...]
) -> Exported:
    """A decoder's step: gradients, the loss, and with `logits` these of all samples."""
    mesh = AbstractMesh(
        tuple(size for _, size in axes),
        tuple(name for name, _ in axes),
        axis_types=(AxisType.Auto,) * len(axes),
    )
    batch = "data" if any(name == "data" for name, _ in axes) else None

    def step(weights: dict[str, Array], tokens: Array, labels: Array) -> Any:
        if shifted:
            tokens, labels = tokens[:, :-1], tokens[:, 1:]

        def of(weights: dict[str, Array]) -> tuple[Array, Array]:
            h, _ = lax.scan(_layer, weights["words"][tokens], weights["layers"])
            if loss == "chunked":
                return _chunked(h, weights["head"], labels), jnp.zeros(())
            logits = h @ weights["head"]
            return LOSSES[loss](logits, labels), logits

        (value, logits), gradients = jax.value_and_grad(of, has_aux=True)(weights)
        return (value, gradients, logits) if loss == "logits" else (value, gradients)

    def shape(sizes: tuple[int, ...], spec: P, kind: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, kind, sharding=NamedSharding(mesh, spec))

    weights = {
        "words": shape((_WORDS, _WIDE), P()),
        "layers": shape((_LAYERS, _WIDE, _WIDE), P("stage")),
        "head": shape((_WIDE, _WORDS), P()),
    }
    samples = shape((_BATCH, tokens), P(batch), jnp.int32)
    return export.export(jax.jit(step))(weights, samples, samples)


@cache
def _reference(loss: str, tokens: int, *, shifted: bool) -> Known:
    program = _program(loss, tokens, shifted=shifted, axes=_FOUR)
    random = np.random.default_rng(0)
    floats, samples = program.in_avals[:-2], program.in_avals[-2:]
    arguments = [(random.standard_normal(a.shape) / 2).astype(a.dtype) for a in floats]
    arguments += [random.integers(0, _WORDS, a.shape).astype(a.dtype) for a in samples]
    return Known.of(program, jax.tree.unflatten(program.in_tree, arguments)[0])


_TWO, _FOUR = (("data", 2), ("stage", 4)), (("stage", 4),)


@pytest.mark.parametrize(
    ("loss", "options", "axes"),
    [
        ("one-hot", "schedule=1f1b", _TWO),
        ("one-hot", "schedule=eager-1f1b", _FOUR),
        ("one-hot", "schedule=1f1b skip=false", _TWO),
        ("masked", "schedule=eager-1f1b", _TWO),
        ("logits", "schedule=1f1b", _TWO),
        ("logits", "schedule=eager-1f1b skip=false", _FOUR),
    ],
)
def test_each_rank_runs_a_part_of_the_tokens(
    loss: str, options: str, axes: tuple[tuple[str, int], ...]
):
    program = _program(loss, _TOKENS, shifted=False, axes=axes)
    after = _expanded(program, f"{options} microbatches=4 head=divided")
    assert _products(after) == {(4, _TOKENS // 4)}
    assert_kept(_reference(loss, _TOKENS, shifted=False).compared(after))


@pytest.mark.parametrize("microbatches", [2, 4])
def test_of_an_odd_number_of_tokens_each_rank_takes_samples(microbatches: int):
    """Those of one device along the other axis lie in one part for each rank."""
    axes = _TWO if microbatches == 2 else _FOUR
    program = _program("one-hot", 8, shifted=True, axes=axes)
    after = _expanded(program, f"schedule=1f1b microbatches={microbatches} head=divided")
    assert _products(after) == {(_BATCH // microbatches // 4, 7)}
    assert_kept(_reference("one-hot", 8, shifted=True).compared(after))


def test_the_last_rank_runs_what_cannot_be_divided():
    """Seven tokens, and four samples on two devices along the other axis."""
    program = _program("one-hot", 8, shifted=True, axes=_TWO)
    options = "schedule=1f1b microbatches=4"
    assert _products(_expanded(program, options)) == {(4, 7)}
    with pytest.raises(ToolError, match=r"but no dimension that 4 ranks divide cuts .* \(P7\)"):
        _expanded(program, f"{options} head=divided")


@pytest.mark.parametrize(
    "options", ["schedule=gpipe", "schedule=1f1b", "schedule=1f1b head=divided"]
)
def test_a_loop_over_chunks_of_tokens_is_none_over_layers(options: str):
    """Its rows are of samples, also those of labels, which no layer takes."""
    program = _program("chunked", _TOKENS, shifted=False, axes=_FOUR)
    after = _expanded(program, f"{options} microbatches=4")
    samples = 1 if "divided" in options else 4
    if "1f1b" in options:
        assert _products(after) == {(samples, _TOKENS // 4)}
    assert_kept(_reference("chunked", _TOKENS, shifted=False).compared(after))


def test_a_small_head_stays_where_it_is():
    program = _program("one-hot", _TOKENS, shifted=False, axes=_FOUR)
    after = _expanded(program, "schedule=1f1b microbatches=4")
    assert _products(after) == {(4, _TOKENS)}
    told = _expanded(program, "schedule=1f1b microbatches=4 head=last")
    assert told.mlir_module() == after.mlir_module()


@pytest.mark.parametrize("head", ["divided", "last"])
def test_labels_become_words_for_a_microbatch_alone(head: str):
    """The one-hot of the whole batch would be as large as all of its logits."""
    program = _program("one-hot", _TOKENS, shifted=False, axes=_FOUR)
    text = _expanded(program, f"schedule=1f1b microbatches=4 head={head}").mlir_module()
    ticks = text[text.index("sdy.manual_computation") :].splitlines()[0]
    assert f"x{_TOKENS}x{_WORDS}x" not in ticks


def _expanded(program: Exported, options: str) -> Exported:
    return stablehlo_tools.transform(program, f"expand-pipeline{{{options}}}")


def _products(after: Exported) -> set[tuple[int, int]]:
    """Of how many samples, and tokens of each, products with the head's weights are."""
    found = re.findall(rf"dot_general .*-> tensor<(\d+)x(\d+)x{_WORDS}xf32>", after.mlir_module())
    return {(int(samples), int(tokens)) for samples, tokens in found}
