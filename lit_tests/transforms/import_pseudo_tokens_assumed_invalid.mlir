// RUN: stablehlo-tools opt %s -p 'import-pseudo-tokens{assume-zero-argument=1}' --split-input-file --verify-diagnostics

// P2: assume-zero-argument names a scalar float argument of the one entry function, and a collective
// takes a token from it.
// expected-error@+1 {{assume-zero-argument=1: @out_of_range_p2 has 1 arguments (P2)}}
func.func @out_of_range_p2(%x: tensor<2xf32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
}

// -----

// expected-error@+1 {{assume-zero-argument=1 is a tensor<2xf32>, and a token is a float of rank 0 (P2)}}
func.func @no_scalar_p2(%a: tensor<f32>, %x: tensor<2xf32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
}

// -----

// expected-error@+1 {{assume-zero-argument=1 is a tensor<i32>, and a token is a float of rank 0 (P2)}}
func.func @integer_p2(%x: tensor<2xf32>, %n: tensor<i32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
}

// -----

// expected-error@+1 {{assume-zero-argument=1: no collective takes a token from this argument (P2)}}
func.func @no_token_p2(%x: tensor<2xf32>, %bias: tensor<f32>) -> tensor<2xf32> {
  %0 = stablehlo.broadcast_in_dim %bias, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %1 = stablehlo.add %x, %0 : tensor<2xf32>
  %2 = stablehlo.add %1, %x : tensor<2xf32>
  %3 = "stablehlo.collective_permute"(%2) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %3 : tensor<2xf32>
}

// -----

// expected-error@+1 {{assume-zero-argument=1: of 2 public functions none is @main, so the argument could be of any (P2)}}
module {
  func.func @one_p2(%x: tensor<2xf32>, %a: tensor<f32>) -> tensor<2xf32> {
    return %x : tensor<2xf32>
  }
  func.func @other(%x: tensor<2xf32>, %a: tensor<f32>) -> tensor<2xf32> {
    return %x : tensor<2xf32>
  }
}
