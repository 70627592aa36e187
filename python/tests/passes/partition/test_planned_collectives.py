"""What `partition` plans is what it writes: each kind of collective, how often, and its bytes."""

from __future__ import annotations

from collections import defaultdict
from math import prod

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models.devices import mesh
from models.zoo import programs
from soaking import first

from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.analysis.loops import expected_trips
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.ir.walk import ops_around
from stablehlo_tools.passes.pipeline import Pipeline, run_pipeline
from stablehlo_tools.transforms import partition
from stablehlo_tools.transforms.parts.partition.choosing.division_moves import Moves
from stablehlo_tools.transforms.parts.partition.choosing.proposals import improve

UNKNOWN_TRIPS = 8  # as `partition` assumes
Sent = dict[str, tuple[float, float]]  # by kind: runs, and bytes


def planned(moves: Moves) -> Sent:
    runs, sent = defaultdict[str, float](float), defaultdict[str, float](float)
    steps = [
        (step, times)
        for link in moves.problem.links
        for steps, times in [moves.steps(link)]
        for step in steps
    ]
    steps += [
        (step, node.times)
        for node in moves.problem.nodes
        for step in moves.halos(node, node.choice)
    ]
    for step, times in steps:
        runs[step.kind] += times
        sent[step.kind] += times * step.size
    return {kind: (runs[kind], sent[kind]) for kind in runs}


def written(program: artifact.Artifact) -> Sent:
    runs, sent = defaultdict[str, float](float), defaultdict[str, float](float)
    for each in find_collectives(program.module):
        times = prod(expected_trips(op, UNKNOWN_TRIPS) for op in ops_around(each.op, WHILE))
        runs[each.kind] += times
        sent[each.kind] += times * max(each.bytes_in or 0, each.bytes_out or 0)
    return {kind: (runs[kind], sent[kind]) for kind in runs}


def check_plan(exported: export.Exported, monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Compares the plan of a program with its module, and returns what it sends."""
    seen: list[Sent] = []

    def noting(moves: Moves) -> None:
        improve(moves)
        seen.append(planned(moves))

    monkeypatch.setattr(partition, "improve", noting)
    given = artifact.from_exported(exported)
    run_pipeline(given, Pipeline.parse("partition{hardware=h100}"))
    (plan,), module = seen, written(given)
    # A planned exchange of borders may be two permutes, one in each direction.
    for kind in plan.keys() | module.keys():
        runs, sent = zip(plan.get(kind, (0, 0)), module.get(kind, (0, 0)), strict=True)
        assert sent[0] == sent[1], kind
        assert runs[0] == runs[1] or kind == "collective_permute", kind
    return module


MODELS = {model.name: model for model in programs(jit=True)}


@pytest.mark.parametrize("name", first(12, list(MODELS)))
def test_models_send_what_is_planned(name: str, monkeypatch: pytest.MonkeyPatch):
    exported = MODELS[name].build()
    assert isinstance(exported, export.Exported)
    check_plan(exported, monkeypatch)


ROWS = P("x")


def _argument(*shape: int, spec: P = ROWS) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh(x=8), spec))


def test_a_stencil_sends_the_borders_that_are_planned(monkeypatch: pytest.MonkeyPatch):
    def step(u: jax.Array) -> jax.Array:
        return u.at[1:-1].add(u[2:] + u[:-2] - 2 * u[1:-1])

    sent = check_plan(export.export(jax.jit(step))(_argument(65536, 512)), monkeypatch)
    assert sent == {"collective_permute": (2, 2 * 512 * 4)}


def test_what_starts_from_zero_sends_nothing_for_it(monkeypatch: pytest.MonkeyPatch):
    """A solver applies its operator to a first guess of zeros: no borders of these are sent."""

    def apply(u: jax.Array) -> jax.Array:
        return 3 * u - jnp.roll(u, 1, 0) - jnp.roll(u, -1, 0)

    def solve(b: jax.Array) -> jax.Array:
        residual = b - apply(jnp.zeros_like(b))
        return apply(residual)

    sent = check_plan(export.export(jax.jit(solve))(_argument(65536, 512)), monkeypatch)
    assert sent == {"collective_permute": (2, 2 * 512 * 4)}


def test_masks_are_made_where_they_are_used(monkeypatch: pytest.MonkeyPatch):
    """One mask of two users that are divided differently, and a part that needs all of it."""

    def masked(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        lower = jnp.tril(jnp.ones((512, 512), bool))
        thinned = jnp.eye(512)[::2]
        return jnp.where(lower, x, 0), jnp.where(lower, y, 0), thinned @ thinned.T

    arguments = [_argument(512, 512), _argument(512, 512, spec=P(None, "x"))]
    divided = [each.sharding for each in arguments]
    stepped = jax.jit(masked, out_shardings=(*divided, None))
    assert check_plan(export.export(stepped)(*arguments), monkeypatch) == {}


def test_the_largest_element_is_gathered_as_planned(monkeypatch: pytest.MonkeyPatch):
    def choose(logits: jax.Array) -> jax.Array:
        return jnp.argmax(logits, axis=-1)

    argument = _argument(32, 4096, spec=P(None, "x"))
    stepped = jax.jit(choose, out_shardings=NamedSharding(mesh(x=8), P()))
    sent = check_plan(export.export(stepped)(argument), monkeypatch)
    assert sent.keys() == {"all_gather"}


def test_a_residual_reads_no_borders_again(monkeypatch: pytest.MonkeyPatch):
    """The largest update of the interior, on which a loop may end."""

    def step(u: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        change = u[2:] + u[:-2] - 2 * u[1:-1]
        return u.at[1:-1].add(change), jnp.max(jnp.abs(change)), jnp.sum(change**2)

    sent = check_plan(export.export(jax.jit(step))(_argument(65536, 512)), monkeypatch)
    assert sent["collective_permute"] == (2, 2 * 512 * 4)
    assert sent["all_reduce"] == (2, 8)
    assert len(sent) == 2
