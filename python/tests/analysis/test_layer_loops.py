"""What loops over layers read, write and hand on, and which values are sums over the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax

from stablehlo_tools.analysis.dimension_propagation.propagation import Graph
from stablehlo_tools.analysis.dimension_propagation.seeds import try_seeds
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_carries import LayerLoop, layer_loops
from stablehlo_tools.analysis.partial_sums import PartialSums
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.walk import entry_function, functions_by_name

LAYERS, BATCH, WIDTH = 6, 4, 3
KEPT: list[artifact.Artifact] = []  # modules whose ops tests hold


def program(function: Callable[..., Any], *shapes: tuple[int, ...]) -> artifact.Artifact:
    """A function of floats as a module without calls."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    found = artifact.from_exported(export.export(jax.jit(function, keep_unused=True))(*arguments))
    inline_all_calls(found.module)
    KEPT.append(found)
    return found


def found_loops(function: Callable[..., Any], *more: tuple[int, ...]) -> list[LayerLoop]:
    """The layer loops of a function of stacked weights and a batch."""
    weights, batch = (LAYERS, WIDTH, WIDTH), (BATCH, WIDTH)
    module = program(function, weights, batch, *more).module
    effects = Effects(functions_by_name(module))
    return layer_loops(entry_function(module).regions[0].blocks[0], effects)


def shapes(loop: LayerLoop, carries: Any) -> list[tuple[int, ...]]:
    """The shapes of carries."""
    return [tuple(loop.op.operands[carry].type.shape) for carry in carries]


def layer(h: Any, w: Any) -> tuple[Any, None]:
    """A layer of one product."""
    return jnp.tanh(h @ w), None


def test_a_scan_reads_weights_in_order_and_hands_on_activations():
    (loop,) = found_loops(lambda w, x: lax.scan(layer, x, w)[0])
    assert (loop.trips, loop.reverse) == (LAYERS, False)
    assert list(loop.counters.values()) == [1]
    assert shapes(loop, loop.reads) == [(LAYERS, WIDTH, WIDTH)]
    assert shapes(loop, loop.flows) == [(BATCH, WIDTH)]
    assert not loop.writes
    (rows,) = loop.reads.values()
    assert (rows.first, rows.span, [access.offset for access in rows.accesses]) == (0, 1, [0])


def test_a_reverse_scan_reads_them_from_the_last():
    (loop,) = found_loops(lambda w, x: lax.scan(layer, x, w, reverse=True)[0])
    assert loop.reverse
    assert [(rows.first, rows.span) for rows in loop.reads.values()] == [(0, 1)]


def two_layers(w: Any, x: Any) -> Any:
    """Two layers in an iteration."""
    return lax.fori_loop(0, LAYERS // 2, lambda i, h: jnp.tanh(h @ w[2 * i] @ w[2 * i + 1]), x)


def test_an_iteration_may_read_several_rows():
    (loop,) = found_loops(two_layers)
    (rows,) = loop.reads.values()
    assert (loop.trips, rows.span) == (LAYERS // 2, 2)
    assert sorted(access.offset for access in rows.accesses) == [0, 1]


def test_a_loop_over_some_of_the_layers_begins_where_it_does():
    def some(w: Any, x: Any) -> Any:
        return lax.fori_loop(2, 5, lambda i, h: jnp.tanh(h @ w[i]), x)

    (loop,) = found_loops(some)
    (rows,) = loop.reads.values()
    assert (loop.trips, rows.first, rows.span) == (3, 2, 1)


def test_the_step_of_a_training_step_writes_residuals_and_gradients():
    def loss(w: Any, x: Any) -> Any:
        return jnp.square(lax.scan(layer, x, w)[0]).sum()

    forward, backward = found_loops(jax.grad(loss))
    assert (forward.reverse, backward.reverse) == (False, True)
    assert set(shapes(forward, forward.writes)) == {(LAYERS, BATCH, WIDTH)}
    assert shapes(backward, backward.writes) == [(LAYERS, WIDTH, WIDTH)]
    assert shapes(backward, backward.flows) == [(BATCH, WIDTH)]
    assert not backward.reads.keys() & backward.writes.keys()


def test_a_cache_is_read_and_then_written():
    def decode(w: Any, x: Any, cache: Any) -> Any:
        def step(i: Any, state: Any) -> Any:
            h, kept = state
            h = jnp.tanh(h @ w[i]) + kept[i]
            return h, lax.dynamic_update_index_in_dim(kept, h, i, 0)

        return lax.fori_loop(0, LAYERS, step, (x, cache))

    (loop,) = found_loops(decode, (LAYERS, BATCH, WIDTH))
    both = loop.reads.keys() & loop.writes.keys()
    assert shapes(loop, both) == [(LAYERS, BATCH, WIDTH)]


def test_what_all_layers_share_is_a_constant():
    def shared(w: Any, x: Any, bias: Any) -> Any:
        return lax.fori_loop(0, LAYERS, lambda i, h: jnp.tanh(h @ w[i]) + bias[0], x)

    (loop,) = found_loops(shared, (2, WIDTH))
    assert shapes(loop, loop.reads) == [(LAYERS, WIDTH, WIDTH)]


def by_part(w: Any, x: Any) -> Any:
    """All layers on one part of the batch after the other."""
    parts = x.reshape(2, BATCH // 2, WIDTH)

    def added(sums: Any, part: Any) -> tuple[Any, None]:
        return sums + lax.scan(layer, part, w)[0], None

    return lax.scan(added, parts[0], parts)[0]


def test_a_loop_around_the_layers_goes_over_batches():
    (loop,) = found_loops(by_part)
    assert (loop.trips, shapes(loop, loop.flows)) == (LAYERS, [(BATCH // 2, WIDTH)])


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: lax.fori_loop(0, 5, lambda _, h: jnp.tanh(h @ w[0]), x),
        lambda w, x: lax.while_loop(lambda h: h.sum() < 1, lambda h: h + w[0].sum(), x),
        lambda w, x: lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w[i * i]), x),
        lambda w, x: lax.fori_loop(0, 5, lambda i, h: jnp.tanh(h @ w[i] @ w[4 - i]), x),
        lambda w, x: lax.scan(lambda h, r: (h * r, None), x, w[:, 0, 0])[0],
        lambda w, x: lax.scan(layer, x, w[:1])[0],
    ],
    ids=["one row", "unknown end", "uneven steps", "both ways", "scalars", "one layer"],
)
def test_other_loops_are_none(function: Callable[..., Any]):
    assert [loop for loop in found_loops(function) if loop.weights] == []


def state_of(function: Callable[..., Any]) -> str:
    """What the result of a function of a batch and a matrix is, on one of two microbatches."""
    module = program(function, (BATCH, WIDTH), (WIDTH, WIDTH)).module
    graph = Graph.from_block(entry_function(module).regions[0].blocks[0])
    trial = try_seeds(graph, {graph.root.arguments[0]: DimTiling(0)}, 2)
    terms = PartialSums(trial.dims)
    terms.visit(graph.root.nodes)
    (result,) = graph.root.returned
    if result in terms.blocked:
        return "blocked"
    return terms.terms.get(result) or ("samples" if result in trial.dims.tilings else "whole")


def total(x: Any) -> Any:
    """A sum over samples."""
    return x.sum(0)


def added_up(x: Any, w: Any) -> Any:
    """A carry that starts from 0, to which every iteration adds a sum over samples."""
    start = jnp.zeros(WIDTH)
    return lax.fori_loop(0, 3, lambda i, s: s + total(x @ w) * i.astype(jnp.float32), start)


@pytest.mark.parametrize(
    ("function", "state"),
    [
        (lambda x, w: jnp.tanh(x @ w), "samples"),
        (lambda _, w: w @ w, "whole"),
        (lambda x, w: total(x), "add"),
        (lambda x, w: x.max(0), "maximum"),
        (lambda x, w: x.T @ x, "add"),
        (lambda x, w: -total(x), "add"),
        (lambda x, w: total(x) / 3.0, "add"),
        (lambda x, w: total(x) @ w, "add"),
        (lambda x, w: total(x) + total(x @ w), "add"),
        (lambda x, w: jnp.where(w[0] > 0, total(x), jnp.zeros(WIDTH)), "add"),
        (lambda x, w: lax.pad(total(x), 0.0, [(1, 1, 0)]), "add"),
        (lambda x, w: total(x)[jnp.array([2, 0])], "add"),
        (lambda x, w: jnp.zeros((5, WIDTH)).at[2].add(total(x)), "add"),
        (lambda x, w: jnp.concatenate([total(x), total(x)]), "add"),
        (added_up, "add"),
        (lambda x, w: total(x) + 1.0, "blocked"),
        (lambda x, w: total(x) * total(x), "blocked"),
        (lambda x, w: 1.0 / total(x), "blocked"),
        (lambda x, w: jnp.exp(total(x)), "blocked"),
        (lambda x, w: total(x) + x.max(0), "blocked"),
        (lambda x, w: -x.max(0), "blocked"),
        (lambda x, w: x - total(x), "blocked"),
        (lambda x, w: jnp.where(total(x) > 0, w[0], 0.0), "blocked"),
        (lambda x, w: jnp.sort(x, axis=0), "blocked"),
        (lambda x, w: jnp.pad(total(x), 1, constant_values=1.0), "blocked"),
        (lambda x, w: total(x).max(), "blocked"),
    ],
    ids=lambda value: value if isinstance(value, str) else "of",
)
def test_what_is_linear_in_a_sum_is_a_term(function: Callable[..., Any], state: str):
    assert state_of(function) == state
