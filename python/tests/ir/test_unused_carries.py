"""What loops carry for nothing, also through loops in them."""

from __future__ import annotations

import pytest

from stablehlo_tools.artifacts.artifact import parse
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.ir.cleanup import drop_unused_carries
from stablehlo_tools.ir.walk import entry_function, ops_where

# %h goes through both loops, and so does a count; the inner loop has a counter of its own.
NESTED = """
func.func public @main(%h: tensor<4xf32>, %n: tensor<i32>) -> {types} {{
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %out:3 = stablehlo.while(%i = %zero, %x = %h, %sum = %n)
      : tensor<i32>, tensor<4xf32>, tensor<i32>
  cond {{
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  }} do {{
    %in:3 = stablehlo.while(%j = %zero, %y = %x, %inner = %sum)
        : tensor<i32>, tensor<4xf32>, tensor<i32>
    cond {{
      %more = stablehlo.compare LT, %j, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    }} do {{
      %tanh = stablehlo.tanh %y : tensor<4xf32>
      {counted}
      %j1 = stablehlo.add %j, %one : tensor<i32>
      stablehlo.return %j1, %tanh, %counted : tensor<i32>, tensor<4xf32>, tensor<i32>
    }}
    %sine = stablehlo.sine %in#1 : tensor<4xf32>
    %i1 = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %i1, %sine, %in#2 : tensor<i32>, tensor<4xf32>, tensor<i32>
  }}
  return {returned} : {types}
}}
"""
_ADDS = "%counted = stablehlo.add %inner, %one : tensor<i32>"
_READS = """%cut = stablehlo.slice %y [0:1] : (tensor<4xf32>) -> tensor<1xf32>
      %whole = stablehlo.convert %cut : (tensor<1xf32>) -> tensor<1xi32>
      %own = stablehlo.reshape %whole : (tensor<1xi32>) -> tensor<i32>
      %counted = stablehlo.add %inner, %own : tensor<i32>"""


@pytest.mark.parametrize(
    ("counted", "result", "kept", "computes"),
    [(_ADDS, 2, 2, False), (_ADDS, 1, 2, True), (_READS, 2, 3, True), (_READS, 1, 2, True)],
)
def test_what_only_goes_around_both_loops_is_dropped(
    counted: str, result: int, kept: int, computes: bool
):
    types = "tensor<4xf32>" if result == 1 else "tensor<i32>"
    text = NESTED.format(counted=counted, returned=f"%out#{result}", types=types)
    module = parse(text.encode()).module
    main = entry_function(module)
    drop_unused_carries(main.regions[0].blocks[0])
    assert module.operation.verify()
    loops = ops_where(main, lambda op: op.name == WHILE)
    assert [len(loop.operands) for loop in loops] == [kept, kept]
    names = {op.name for op in ops_where(main, lambda op: True)}
    assert ("stablehlo.tanh" in names, "stablehlo.sine" in names) == (computes, computes)
