"""Which dimensions partition keeps whole although Shardy's rules pass them through."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.walk import ops_named
from stablehlo_tools.transforms.parts.partition.sharding_rules import is_whole_op, undividable

_PROGRAM = """
func.func @main(%x: tensor<12x8xf32>, %row: tensor<1x8xf32>, %z: tensor<f32>, %i: tensor<i32>) {{
  {op}
  return
}}
"""
_NONE = set[tuple[int, int]]()  # (tensor, dimension)


def _asked[Answer](text: str, question: Callable[[ir.Operation], Answer]) -> Answer:
    """What a rule says of an op, while its module lives."""
    module = artifact.parse(_PROGRAM.format(op=text).encode(), module_only=True).module
    name = text.split("stablehlo.")[1].split(maxsplit=1)[0].strip('"')
    return question(ops_named(module.operation, {f"stablehlo.{name}"})[0])


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        # elements go to other places, which devices send each other
        pytest.param(
            "%0 = stablehlo.pad %x, %z, low = [1, 0], high = [-1, 0], interior = [0, 0] : "
            "(tensor<12x8xf32>, tensor<f32>) -> tensor<12x8xf32>",
            _NONE,
            id="shift",
        ),
        pytest.param(
            "%0 = stablehlo.slice %x [0:5, 0:8] : (tensor<12x8xf32>) -> tensor<5x8xf32>",
            _NONE,
            id="uneven-slice",
        ),
        # the one row is whole on every device, which looks whether it is in its part
        pytest.param(
            "%0 = stablehlo.dynamic_update_slice %x, %row, %i, %i : (tensor<12x8xf32>, "
            "tensor<1x8xf32>, tensor<i32>, tensor<i32>) -> tensor<12x8xf32>",
            {(1, 0)},
            id="row-update",
        ),
        pytest.param(
            "%0 = stablehlo.transpose %x, dims = [1, 0] : (tensor<12x8xf32>) -> tensor<8x12xf32>",
            _NONE,
            id="transpose",
        ),
    ],
)
def test_whole_dimensions(text: str, whole: set[tuple[int, int]]) -> None:
    assert _asked(text, undividable) == whole


@pytest.mark.parametrize(("target", "whole"), [("mhlo.topk", False), ("unheard_of", True)])
def test_custom_calls_are_whole_unless_rows_are_computed_alone(target: str, whole: bool) -> None:
    call = f"%0 = stablehlo.custom_call @{target}(%x) : (tensor<12x8xf32>) -> tensor<12x8xf32>"
    assert _asked(call, is_whole_op) is whole
