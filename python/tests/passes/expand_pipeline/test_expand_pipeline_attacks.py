"""Programs made to mislead expand-pipeline: what a loop carries, leaves and hands to its backward.

Each is a loop over eight layers whose body is one dot; what surrounds it is the trap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kept_values import Known, assert_kept
from soaking import first, one_in

import stablehlo_tools
from stablehlo_tools.diagnostics import ToolError

LAYERS, BATCH, WIDTH = 8, 8, 5  # no number of microbatches below divides the width
GPIPE = "expand-pipeline{microbatches=4}"
CIRCULAR = "expand-pipeline{microbatches=2 schedule=circular repeats=2}"
ONE_F_ONE_B = "expand-pipeline{microbatches=4 schedule=1f1b}"
Program = Callable[[Any, Any], Any]


def exported(program: Program) -> export.Exported:
    mesh = AbstractMesh((4,), ("stage",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, P())
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole)
        for shape in ((LAYERS, WIDTH, WIDTH), (BATCH, WIDTH))
    ]
    return export.export(jax.jit(program, in_shardings=(whole, whole)))(*shapes)


def check(program: Program, pipeline: str) -> None:
    random = np.random.default_rng(0)
    shapes = (LAYERS, WIDTH, WIDTH), (BATCH, WIDTH)
    arguments = [(0.5 * random.normal(size=shape)).astype(np.float32) for shape in shapes]
    before = exported(program)
    after = stablehlo_tools.transform(before, pipeline)
    assert_kept(Known.of(before, arguments).compared(after))


def layer(h: Any, w: Any) -> Any:
    return h + jnp.tanh(h @ w)


def carrying(end: Callable[[Any, Any, Any], Any], start: float = 0.5) -> Program:
    """A loop that also carries `a`, of one sample's width: `end(a, sum over samples, w)`."""

    def program(w: Any, x: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            h, a = carry
            h = layer(h, row)
            return (h, end(a, h.sum(0), row)), a

        return lax.scan(body, (x, jnp.full(WIDTH, start)), w)

    return program


CARRIED = {
    "added": lambda a, t, w: a + t,
    "decayed": lambda a, t, w: 0.5 * a + t,
    "reversed": lambda a, t, w: a[::-1] + t,
    "negated": lambda a, t, w: t - a,
    "twice": lambda a, t, w: a + t + a,
    "shifted": lambda a, t, w: jnp.concatenate([a[1:], t[:1]]),
    "by-layer": lambda a, t, w: a * w[0] + t,
    "replaced": lambda a, t, w: t,
}


@pytest.mark.parametrize("pipeline", [GPIPE, CIRCULAR], ids=["gpipe", "circular"])
@pytest.mark.parametrize("end", one_in(4, CARRIED))
def test_a_carried_sum_keeps_what_each_layer_makes_of_it(end: str, pipeline: str) -> None:
    check(carrying(CARRIED[end]), pipeline)


REDUCED = {
    "max-of-negatives": lambda h: jnp.max(h - 10, 0),
    "product": lambda h: jnp.prod(h, 0),
    "any": lambda h: jnp.any(h < -99, 0),
    "min-of-positives": lambda h: jnp.min(h + 10, 0),
    "all": lambda h: jnp.all(h > -9, 0),
    "sum": lambda h: jnp.sum(h, 0),
}


@pytest.mark.parametrize("name", first(3, REDUCED))
def test_rows_that_reduce_the_batch_begin_at_the_identity(name: str) -> None:
    def program(w: Any, x: Any) -> Any:
        def body(h: Any, row: Any) -> Any:
            h = layer(h, row)
            return h, REDUCED[name](h)

        return lax.scan(body, x, w)

    check(program, CIRCULAR)


NOT_LINEAR = {
    "integer-quotient": lambda h: lax.div(jnp.sum(h > 0, 0), 3),
    "truncated": lambda h: jnp.sum(3 * h, 0).astype(jnp.int32),
    "widened-after-wrapping": lambda h: lax.reduce(
        (h > 0).astype(jnp.int8) * jnp.int8(100), np.int8(0), lax.add, (0,)
    ).astype(jnp.int32),
    "whether-any": lambda h: jnp.sum(h > 0, 0).astype(bool),
    "clamped-mean": lambda h: jnp.maximum(jnp.mean(h, 0), 0),
}


@pytest.mark.parametrize("made", NOT_LINEAR.values(), ids=NOT_LINEAR)
def test_what_is_not_linear_in_a_sum_over_samples_is_refused(made: Any) -> None:
    def program(w: Any, x: Any) -> Any:
        def body(h: Any, row: Any) -> Any:
            h = layer(h, row)
            return h, made(h)

        return lax.scan(body, x, w)

    with pytest.raises(ToolError, match=r"mixes samples of the batch"):
        stablehlo_tools.transform(exported(program), GPIPE)


def trained(
    start: Callable[[Any, Any], Any] = lambda h, left: 2 * h,
    results: Callable[[Any, Any, Any], Any] = lambda h, left, found: found,
    between: Callable[[Any, Any], Any] = lambda h, left: 0.0,
    leave: Callable[[Any], Any] = lambda h: (),
) -> Program:
    """A forward and a backward loop by hand.

    The forward leaves its activations and what `leave` makes of them, `left`; the backward begins
    at `start` and adds `between` in each layer.
    """

    def program(w: Any, x: Any) -> Any:
        h, left = lax.scan(lambda h, row: (layer(h, row), (h, leave(h))), x, w)
        constant = between(h, left)

        def body(g: Any, row: Any) -> Any:
            w, h = row
            t = jnp.tanh(h @ w)
            d = g * (1 - t * t)
            return g + d @ w.T + constant, h.T @ d

        found = lax.scan(body, start(h, left), (w, left[0]), reverse=True)
        return results(h, left, found)

    return program


def test_a_backward_by_hand_is_pipelined() -> None:
    check(trained(results=lambda h, left, found: (found, h)), ONE_F_ONE_B)


@pytest.mark.parametrize("options", [GPIPE, ONE_F_ONE_B])
def test_last_activations_go_back_with_their_cotangents(options: str) -> None:
    check(trained(between=lambda h, left: h), options)


TAKEN_WHOLE = {
    "activations-returned": trained(results=lambda h, left, found: (found, left)),
    "activations-in-head": trained(start=lambda h, left: h + left[0].mean(0)),
    "sum-in-each-layer": trained(leave=lambda h: h.sum(0), between=lambda h, left: left[1].sum(0)),
}


@pytest.mark.parametrize("program", TAKEN_WHOLE.values(), ids=TAKEN_WHOLE)
def test_what_1f1b_cannot_hold_for_the_backward_is_refused(program: Program) -> None:
    with pytest.raises(ToolError, match=r"\(P7\)"):
        stablehlo_tools.transform(exported(program), ONE_F_ONE_B)


@pytest.mark.parametrize("program", TAKEN_WHOLE.values(), ids=TAKEN_WHOLE)
def test_what_1f1b_refuses_each_loop_by_itself_can(program: Program) -> None:
    check(program, GPIPE)


def test_hidden_states_beside_those_of_the_backward_come_out_whole() -> None:
    program = trained(
        leave=lambda h: jnp.sin(h).sum(-1),
        results=lambda h, left, found: (found, left[1], left[1].mean(1)),
    )
    check(program, ONE_F_ONE_B)


def test_loops_in_two_branches_are_pipelined_each() -> None:
    def program(w: Any, x: Any) -> Any:
        def run(x: Any) -> Any:
            return lax.scan(lambda h, row: (layer(h, row), None), x, w)[0]

        return lax.cond(x[0, 0] > 0, run, lambda x: run(2 * x), x)

    check(program, GPIPE)
