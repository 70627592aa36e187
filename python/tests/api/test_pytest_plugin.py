"""The plugin in a pytest of its own: fixtures, what a failure says, and what it loads."""

import pytest

pytest_plugins = ["pytester"]

_STEP = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, pytest
from jax import export
from jax.sharding import Mesh, PartitionSpec as P

@pytest.fixture(scope="module")
def step():
    def local(rows):
        return jax.lax.psum(jax.lax.all_gather(rows, "x", tiled=True).sum(0), "x")
    mapped = jax.shard_map(
        local, mesh=Mesh(jax.devices(), "x"), in_specs=P("x"), out_specs=P(), check_vma=False
    )
    return export.export(jax.jit(mapped))(jax.ShapeDtypeStruct((512, 512), jnp.float32))
"""


def test_fixtures_assert_and_failures_explain(pytester: pytest.Pytester):
    pytester.makepyfile(
        _STEP
        + """
def test_right(step, assert_collectives, assert_exposed_below, collectives_of):
    assert_collectives(step, all_gather=1, all_reduce=1)
    assert_exposed_below(step, "h100", ms=100.0)
    assert collectives_of(step) == {"all_gather": 1, "all_reduce": 1}

def test_counts(step, assert_collectives):
    assert_collectives(step, all_gather=2)

def test_compared(step, collectives_of):
    assert collectives_of(step) == {"all_gather": 2}

def test_exposed(step, assert_exposed_below):
    assert_exposed_below(step, "h100", ms=1e-6)
"""
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--tb=short")
    result.assert_outcomes(passed=1, failed=3)
    said = result.stdout.str()
    expected = "expected 2 all_gather, found 1 all_gather, 1 all_reduce:"
    assert f"AssertionError: {expected}" in said
    assert f"assert {expected}" in said
    assert "all_reduce at " in said
    assert "ms are exposed, more than 1e-06:" in said
    assert "assertions.py" not in said  # the lines that are shown are the test's


def test_nothing_heavy_is_loaded_when_pytest_starts(pytester: pytest.Pytester):
    pytester.makepyfile(
        """
import sys

def test_loaded(pytestconfig):
    assert pytestconfig.pluginmanager.has_plugin("stablehlo_tools")
    heavy = {"jax", "jaxlib", "numpy", "rich", "scipy"}
    ours = {name for name in sys.modules if name.startswith("stablehlo_tools")}
    assert not heavy & set(sys.modules)
    assert ours == {"stablehlo_tools", "stablehlo_tools.api", "stablehlo_tools.api.pytest_plugin"}
"""
    )
    # Other people's plugins, which load what they like, are left out.
    result = pytester.runpytest_subprocess("-p", "no:hypothesispytest", "-p", "no:jaxtyping")
    result.assert_outcomes(passed=1)
