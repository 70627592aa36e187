// RUN: stablehlo-tools opt %s -p 'import-pseudo-tokens{assume-zero-argument=1 drop-token-argument}' --split-input-file --verify-diagnostics

// P6: nothing else uses an argument that is dropped, and the module states no list of its arguments
// elsewhere.
func.func @still_used_p6(%x: tensor<2xf32>, %token: tensor<f32>) -> (tensor<2xf32>, tensor<f32>) {
  %0:2 = "stablehlo.all_reduce"(%x, %token) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %sum = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %sum : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>, tensor<f32>) -> (tensor<2xf32>, tensor<f32>)
  // expected-error@+1 {{drop-token-argument: argument 1 of @still_used_p6 is still used, by stablehlo.cosine (P6)}}
  %1 = stablehlo.cosine %token : tensor<f32>
  return %0#0, %1 : tensor<2xf32>, tensor<f32>
}

// -----

// The calling convention of a jax.export artifact names the argument.
// expected-error@+1 {{drop-token-argument: argument 1 of @exported_by_jax_p6 belongs to the calling convention of a jax.export artifact (P6)}}
module @jit_f attributes {jax.uses_shape_polymorphism = false} {
  func.func @exported_by_jax_p6(%x: tensor<2xf32>, %token: tensor<f32>) -> tensor<2xf32> {
    %0:2 = "stablehlo.all_reduce"(%x, %token) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %sum = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %sum : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>, tensor<f32>) -> (tensor<2xf32>, tensor<f32>)
    return %0#0 : tensor<2xf32>
  }
}

// -----

// Results are aliased to arguments by number.
// expected-error@+1 {{the module's attribute mhlo.input_output_alias counts arguments, and would be wrong (P6)}}
module @IrToHlo.1 attributes {mhlo.input_output_alias = [{alias = {kind = "may_alias", parameter_index = array<i64>, parameter_number = 0 : i64}, output_index = array<i64>}]} {
  func.func @aliased_p6(%x: tensor<2xf32>, %token: tensor<f32>) -> tensor<2xf32> {
    %0:2 = "stablehlo.all_reduce"(%x, %token) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %sum = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %sum : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>, tensor<f32>) -> (tensor<2xf32>, tensor<f32>)
    return %0#0 : tensor<2xf32>
  }
}
