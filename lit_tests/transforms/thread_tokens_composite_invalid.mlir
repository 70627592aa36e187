// RUN: stablehlo-tools opt %s -p 'thread-tokens{form=composite}' --split-input-file --verify-diagnostics
// RUN: sed 's/expected-error/no longer expected/' %s > %t.mlir
// RUN: stablehlo-tools opt %t.mlir -p thread-tokens --split-input-file --verify-diagnostics

// A decomposition is a function: its reduction can use nothing from outside. As barriers the same
// program is fine.
func.func @reduction_that_captures_p9(%x: tensor<4xf32>, %scale: tensor<f32>) -> tensor<4xf32> {
  // expected-error@+1 {{stablehlo.all_reduce cannot become a composite, because its reduction uses a value from outside: use form=barrier}}
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %sum = stablehlo.add %a, %b : tensor<f32>
    %scaled = stablehlo.multiply %sum, %scale : tensor<f32>
    stablehlo.return %scaled : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// Nor do calls with symbolic dimensions survive jax's refinement of shapes.
module attributes {jax.uses_shape_polymorphism = true} {
func.func @symbolic_dimension_p9(%x: tensor<?xf32>) -> tensor<?xf32> {
  // expected-error@+1 {{stablehlo.collective_permute with symbolic dimensions cannot become a composite}}
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<?xf32>) -> tensor<?xf32>
  return %0 : tensor<?xf32>
}
}
