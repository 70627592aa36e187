"""Loops that only copy rows become moves of whole tensors; loops that compute stay."""

from __future__ import annotations

import pytest

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.transforms.parts.fold_pipeline.global_moves import write_copying_loops_as_moves

# Of each matrix of `%w`, a loop leaves `%row` in `%out`, at the same row.
LOOP = """
module {{
  func.func @main(%w: tensor<4x2x3xf32>) -> tensor<4x3xf32> {{
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %last = stablehlo.constant dense<3> : tensor<i32>
    %count = stablehlo.constant dense<4> : tensor<i32>
    %empty = stablehlo.constant dense<0.0> : tensor<4x3xf32>
    %r:2 = stablehlo.while(%i = %zero, %out = %empty) : tensor<i32>, tensor<4x3xf32>
    cond {{
      %go = stablehlo.compare LT, %i, %count : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %go : tensor<i1>
    }} do {{
      %left = stablehlo.subtract %last, %i : tensor<i32>
      %taken = stablehlo.dynamic_slice %w, {index}, %zero, %zero, sizes = [1, 2, 3]
        : (tensor<4x2x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x3xf32>
      %both = stablehlo.reshape %taken : (tensor<1x2x3xf32>) -> tensor<2x3xf32>
      %second = stablehlo.slice %both [1:2, 0:3] : (tensor<2x3xf32>) -> tensor<1x3xf32>
      %row = {row}
      %new = stablehlo.dynamic_update_slice %out, %row, %i, %zero
        : (tensor<4x3xf32>, tensor<1x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %new : tensor<i32>, tensor<4x3xf32>
    }}
    return %r#1 : tensor<4x3xf32>
  }}
}}
"""
COPIED = "stablehlo.reshape %second : (tensor<1x3xf32>) -> tensor<1x3xf32>"
COMPUTED = "stablehlo.tanh %second : tensor<1x3xf32>"


def rewritten(index: str, row: str) -> list[str]:
    """The ops of the function after it, but for constants."""
    module = bindings.parse_module(LOOP.format(index=index, row=row), bindings.new_context())
    with ir.Location.unknown(module.context):
        block = entry_function(module).regions[0].blocks[0]
        write_copying_loops_as_moves(module, block)
        assert module.operation.verify()
        ops = [view.operation for view in block.operations]
        return [str(op) for op in ops if op.name != "stablehlo.constant"]


def test_rows_that_are_copied_are_a_slice_of_the_whole():
    taken, reshaped, _ = rewritten("%i", COPIED)
    assert "stablehlo.slice %arg0 [0:4, 1:2, 0:3]" in taken
    assert "stablehlo.reshape" in reshaped


def test_rows_that_are_copied_from_the_last_to_the_first_stay_in_that_order():
    *rows, joined, _ = rewritten("%left", COPIED)
    starts = [text.split("[")[1].split(":")[0] for text in rows if "slice" in text]
    assert starts == ["3", "2", "1", "0"]
    assert "stablehlo.concatenate" in joined


@pytest.mark.parametrize("index", ["%i", "%zero"])
def test_a_loop_that_computes_stays(index: str):
    loop, _ = rewritten(index, COMPUTED)
    assert "stablehlo.while" in loop
