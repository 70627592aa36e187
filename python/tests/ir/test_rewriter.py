"""Patterns of `ir/rewriter.py`: order, conditions, values and errors."""

from __future__ import annotations

import pytest

from stablehlo_tools.bindings import ir, new_context, parse_module
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.rewriter import Patterns
from stablehlo_tools.ir.walk import ops_where

PROGRAM = """
func.func @main(%x: tensor<4xf32>, %i: tensor<i32>) -> tensor<4xf32> {
  %0 = stablehlo.negate %x : tensor<4xf32>
  %1 = "stablehlo.case"(%i) ({
    %2 = stablehlo.abs %0 : tensor<4xf32>
    %3 = stablehlo.negate %2 : tensor<4xf32>
    stablehlo.return %3 : tensor<4xf32>
  }) : (tensor<i32>) -> tensor<4xf32>
  %4 = stablehlo.negate %1 : tensor<4xf32>
  return %4 : tensor<4xf32>
}
"""


@pytest.fixture
def module():
    return parse_module(PROGRAM, new_context())


def names(module: ir.Module) -> list[str]:
    ops = ops_where(module.operation, lambda op: op.name.startswith("stablehlo."))
    return [op.name.removeprefix("stablehlo.") for op in ops]


def test_a_pattern_replaces_ops_by_values_also_in_regions(module: ir.Module):
    patterns = Patterns()

    @patterns.on("stablehlo.negate")
    def forward_operand(op: ir.Operation, build: Builder) -> ir.Value:
        return op.operands[0]

    patterns.apply(module.operation)
    assert names(module) == ["case", "abs", "return"]
    assert module.operation.verify()


def test_ops_are_visited_in_order_and_regions_before_the_op_around_them(module: ir.Module):
    patterns, visited = Patterns(), list[str]()

    @patterns.on("stablehlo.negate", "stablehlo.abs", "stablehlo.case")
    def record(op: ir.Operation, build: Builder) -> None:
        visited.append(op.name.removeprefix("stablehlo."))

    before = str(module)
    patterns.apply(module.operation)
    assert visited == ["negate", "abs", "negate", "case", "negate"]
    assert str(module) == before


def test_new_ops_stand_in_place_of_the_old_and_are_not_visited(module: ir.Module):
    patterns = Patterns()

    @patterns.on("stablehlo.negate")
    def negate_twice_more(op: ir.Operation, build: Builder) -> ir.Value:
        inner = build.op("negate", [op.operands[0]], op.results[0].type)
        inner = build.op("negate", [inner], op.results[0].type)
        return build.op("negate", [inner], op.results[0].type)

    patterns.apply(module.operation)
    assert names(module) == [
        *["negate"] * 3,
        "case",
        "abs",
        *["negate"] * 3,
        "return",
        *["negate"] * 3,
    ]
    assert module.operation.verify()


def test_the_first_pattern_that_gives_values_wins(module: ir.Module):
    patterns, order = Patterns(), list[str]()

    @patterns.on("stablehlo.abs")
    def decline(op: ir.Operation, build: Builder) -> None:
        order.append("decline")

    @patterns.on("stablehlo.abs")
    def forward_operand(op: ir.Operation, build: Builder) -> ir.Value:
        order.append("forward")
        return op.operands[0]

    @patterns.on("stablehlo.abs")
    def never_asked(op: ir.Operation, build: Builder) -> ir.Value:
        raise AssertionError

    patterns.apply(module.operation)
    assert order == ["decline", "forward"]
    assert "abs" not in names(module)


def test_the_error_of_a_pattern_is_raised(module: ir.Module):
    patterns = Patterns()

    @patterns.on("stablehlo.abs")
    def refuse(op: ir.Operation, build: Builder) -> None:
        raise ToolError("no abs here", op.location)

    with pytest.raises(ToolError, match="no abs here"):
        patterns.apply(module.operation)
    assert module.operation.verify()
