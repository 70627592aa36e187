// RUN: stablehlo-tools opt %s -p 'offload{memory-limit=1e-9}' --verify-diagnostics --split-input-file

// P3: it fits with what can be moved; here nothing can.
// expected-error@+1 {{offload: the least memory that was found is}}
func.func @fits_p3(%x: tensor<4x4xf32>, %w: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %z = stablehlo.tanh %y : tensor<4x4xf32>
  return %z : tensor<4x4xf32>
}

// -----

// P4: no op has a token yet.
func.func @token_p4(%x: tensor<4x4xf32>, %token: !stablehlo.token) -> (tensor<4x4xf32>, !stablehlo.token) {
  // expected-error@+1 {{offload}}
  %y:2 = stablehlo.optimization_barrier %x, %token : tensor<4x4xf32>, !stablehlo.token
  return %y#0, %y#1 : tensor<4x4xf32>, !stablehlo.token
}
