"""Assertions for tests of one's own programs, and how an inspection looks in a notebook."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax
from jax.sharding import PartitionSpec as P
from models.devices import mesh

import stablehlo_tools
from stablehlo_tools import assert_collectives, assert_exposed_below
from stablehlo_tools.analysis.stated_trips import short_location
from stablehlo_tools.report import exposure


@pytest.fixture(scope="module")
def step() -> export.Exported:
    """A gather and a sum over eight devices."""

    def local(a: jax.Array) -> jax.Array:
        return lax.psum(lax.all_gather(a, "x", tiled=True).sum(0, keepdims=True), "x")

    traced = jax.jit(
        jax.shard_map(local, mesh=mesh(x=8), in_specs=P("x"), out_specs=P(), check_vma=False)
    )
    return export.export(traced)(jax.ShapeDtypeStruct((4096, 1024), jnp.float32))


def test_collectives_are_counted(step: export.Exported):
    assert_collectives(step, all_gather=1, all_reduce=1, reduce_scatter=0)
    with pytest.raises(AssertionError) as raised:
        assert_collectives(step, all_gather=2)
    first, *lines = str(raised.value).splitlines()
    assert first == "expected 2 all_gather, found 1 all_gather, 1 all_reduce:"
    assert all("test_assertions.py:" in line for line in lines)


def test_exposure_has_a_limit(step: export.Exported):
    assert_exposed_below(step, "h100", ms=10.0)
    with pytest.raises(AssertionError, match=r"ms are exposed, more than 0\.001"):
        assert_exposed_below(step, "h100", ms=0.001)
    with pytest.raises(stablehlo_tools.ToolError, match="no hardware profile"):
        assert_exposed_below(step, "h99", ms=1.0)


def test_an_inspection_is_a_page_in_a_notebook(step: export.Exported):
    shown = stablehlo_tools.inspect(step, hardware="h100")
    html = shown._repr_html_()
    assert html.startswith("<iframe srcdoc=")
    assert "all_gather" in html
    assert "exposed" in str(shown)


def test_the_timeline_is_made_where_it_is_looked_at(
    step: export.Exported, monkeypatch: pytest.MonkeyPatch
):
    drawn: list[object] = []
    real = exposure.timeline
    monkeypatch.setattr(exposure, "timeline", lambda *given: (drawn.append(given), real(*given))[1])
    shown = stablehlo_tools.inspect(step, hardware="h100")
    assert shown.to_json()["programs"][0]["total_ns"] > 0
    assert "events" not in shown.to_json()["programs"][0]
    assert not drawn
    assert "&quot;lanes&quot;:[[0," in shown._repr_html_()
    assert len(drawn) == 1


def test_the_user_states_how_often_a_loop_runs():
    def descend(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda u: u[0] > 1.0, lambda u: u - jnp.sin(u), x)

    program = export.export(jax.jit(descend))(jax.ShapeDtypeStruct((1024,), jnp.float32))
    once = stablehlo_tools.inspect(program, hardware="h100").to_json()["programs"][0]
    (loop,) = once["loops"]
    assert loop["trips"] is None
    place = short_location(loop["place"])
    often = stablehlo_tools.inspect(program, hardware="h100", trips={place: 50})
    (loop,) = often.to_json()["programs"][0]["loops"]
    assert loop["trips"] == 50
    assert loop["ns"] == pytest.approx(50 * once["loops"][0]["ns"], rel=0.01)
    with pytest.raises(stablehlo_tools.ToolError, match="no loop is there"):
        stablehlo_tools.inspect(program, hardware="h100", trips={"nowhere.py:1": 2})
