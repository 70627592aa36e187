"""C++ passes in a process of their own: what they return, refuse, and end."""

import pytest

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.passes.native_passes import NativePasses

SHARDED = """
sdy.mesh @mesh = <["x"=2]>
func.func @main(%a: tensor<{size}xf32> {{sdy.sharding = #sdy.sharding<@mesh, [{{"x"}}]>}})
    -> tensor<{size}xf32> {{
  %0 = stablehlo.tanh %a : tensor<{size}xf32>
  return %0 : tensor<{size}xf32>
}}
"""
TO_LOCAL = "sdy-convert-global-to-local"


def loaded(size: int) -> artifact.Artifact:
    return artifact.parse(SHARDED.format(size=size).encode(), "sharded.mlir")


def test_passes_run_one_after_another_on_a_copy():
    module = loaded(8).module
    before = str(module)
    with NativePasses(module.context) as native:
        once = native.run(module, "sdy-propagation-pipeline")
        twice = native.run(once, "sdy-populate-op-sharding-rules", "symbol-dce")
    assert "sdy.sharding_rule" in str(twice)
    assert "sdy.sharding_rule" not in str(once)
    assert str(module) == before


def test_a_pass_that_ends_its_process_is_an_error_with_its_last_words():
    module = loaded(7).module
    with (
        NativePasses(module.context) as native,
        pytest.raises(ToolError, match=f"was ended by SIG.* while running {TO_LOCAL}") as raised,
    ):
        native.run(module, TO_LOCAL)
    assert "non-divisible sharding" in str(raised.value)


def test_a_pass_that_refuses_says_where():
    text = (
        SHARDED.format(size=8)
        .replace("tanh %a", "negate %a")
        .replace('[{"x"}]', '[{}], unreduced={"x"}')
    )
    module = artifact.parse(text.encode(), "unreduced.mlir").module
    with NativePasses(module.context) as native, pytest.raises(ToolError) as raised:
        native.run(module, "sdy-propagation-pipeline")
    assert "unreduced" in raised.value.diagnostic.message
    assert raised.value.diagnostic.place.line


def test_nothing_is_started_before_there_is_something_to_run():
    with NativePasses(loaded(8).module.context) as native:
        assert native._process is None
