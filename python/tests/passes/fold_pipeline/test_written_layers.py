"""Layers that a stage has written out: which are alike, and what each takes and computes."""

from __future__ import annotations

import pytest

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Scratch
from stablehlo_tools.transforms.parts.fold_pipeline.written_layers import written_layers

# h0 -> h1 -> h2, with the ops of the second layer in another order; h1 is kept, too.
FORWARD = """
sdy.mesh @mesh = <["a"=2]>
func.func @stage(%h: tensor<2x4xf32>, %a: tensor<4x4xf32>, %b: tensor<4x4xf32>,
    %p: tensor<4xf32>, %q: tensor<4xf32>) -> (tensor<2x4xf32>, tensor<2x4xf32>) {
  %0 = stablehlo.dot_general %h, %a, contracting_dims = [1] x [0]
      : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %1 = stablehlo.broadcast_in_dim %p, dims = [1] : (tensor<4xf32>) -> tensor<2x4xf32>
  %2 = stablehlo.add %0, %1 : tensor<2x4xf32>
  %3 = stablehlo.tanh %2 : tensor<2x4xf32>
  %h1 = stablehlo.add %h, %3 : tensor<2x4xf32>
  %bound = sdy.sharding_constraint %h1 <@mesh, [{"a"}, {}]> : tensor<2x4xf32>
  %5 = stablehlo.broadcast_in_dim %q, dims = [1] : (tensor<4xf32>) -> tensor<2x4xf32>
  %6 = stablehlo.dot_general %bound, %b, contracting_dims = [1] x [0]
      : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %7 = stablehlo.add %6, %5 : tensor<2x4xf32>
  %8 = stablehlo.tanh %7 : tensor<2x4xf32>
  %h2 = stablehlo.add %bound, %8 : tensor<2x4xf32>
  return %h1, %h2 : tensor<2x4xf32>, tensor<2x4xf32>
}
"""
# g2 -> g1 -> g0 of tanh(h . w), with the gradients of both matrices.
BACKWARD = """
func.func @stage(%g: tensor<2x4xf32>, %h0: tensor<2x4xf32>, %a: tensor<4x4xf32>,
    %h1: tensor<2x4xf32>, %b: tensor<4x4xf32>)
    -> (tensor<4x4xf32>, tensor<2x4xf32>, tensor<4x4xf32>) {
  %0 = stablehlo.multiply %g, %h1 : tensor<2x4xf32>
  %db = stablehlo.dot_general %h1, %0, contracting_dims = [0] x [0]
      : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<4x4xf32>
  %g1 = stablehlo.dot_general %0, %b, contracting_dims = [1] x [1]
      : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %2 = stablehlo.multiply %g1, %h0 : tensor<2x4xf32>
  %g0 = stablehlo.dot_general %2, %a, contracting_dims = [1] x [1]
      : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %da = stablehlo.dot_general %h0, %2, contracting_dims = [0] x [0]
      : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<4x4xf32>
  return %db, %g0, %da : tensor<4x4xf32>, tensor<2x4xf32>, tensor<4x4xf32>
}
"""


def block_of(text: str) -> tuple[ir.Module, ir.Block]:
    module = bindings.parse_module(text, bindings.new_context())
    function = next(
        view.operation for view in module.body.operations if view.operation.name == "func.func"
    )
    return module, function.regions[0].blocks[0]


def test_layers_are_told_by_what_they_compute_and_not_by_the_order_of_the_text():
    module, block = block_of(FORWARD)
    layers = written_layers(block, [0], 1)
    assert layers is not None
    assert layers.inputs == ((1, 3), (2, 4))
    assert layers.handed == (0, 1)
    assert layers.outputs == ((), ())
    types = [block.arguments[number].type for number in (0, 1, 3)]
    function = Scratch(module).function(types, layers.template.write)
    assert module.operation.verify()
    names = [view.operation.name for view in function.regions[0].blocks[0].operations]
    assert names.count("stablehlo.dot_general") == 1
    assert names.count("sdy.sharding_constraint") == 1  # as between them


def test_a_layer_of_a_backward_computes_the_gradients_of_its_weights():
    _, block = block_of(BACKWARD)
    layers = written_layers(block, [0], 1)
    assert layers is not None
    assert layers.handed == (None, 1)
    assert layers.outputs == ((0,), (2,))
    assert [set(inputs) for inputs in layers.inputs] == [{3, 4}, {1, 2}]
    first, second = layers.inputs
    assert (first.index(3), first.index(4)) == (second.index(1), second.index(2))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%8 = stablehlo.tanh %7", "%8 = stablehlo.sine %7"),
        ("%h2 = stablehlo.add %bound", "%h2 = stablehlo.add %h"),  # a way around h1
        ("return %h1, %h2", "return %8, %h2"),  # of the second layer alone
        ("return %h1, %h2", "return %h2, %h2"),
        ("%h2 = stablehlo.add %bound, %8", "%h2 = stablehlo.add %5, %5"),  # nothing is handed on
    ],
)
def test_what_is_not_alike_is_one_layer(old: str, new: str):
    _, block = block_of(FORWARD.replace(old, new))
    assert written_layers(block, [0], 1) is None


def test_a_gradient_that_two_layers_add_to_is_of_no_layer():
    text = BACKWARD.replace(
        "return %db", "%both = stablehlo.add %db, %da : tensor<4x4xf32>\n  return %both"
    )
    _, block = block_of(text)
    assert written_layers(block, [0], 1) is None
