// RUN: stablehlo-tools opt %s -p 'import-pseudo-tokens{fork=preserve}' --split-input-file --verify-diagnostics

// P4: a partial order is kept inside one block. Here a permute stands in a loop, which carries the token.
func.func @in_a_loop_p4(%x: tensor<2xf32>, %p1: tensor<i1>) -> (tensor<2xf32>, tensor<2xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %1 = stablehlo.add %x, %0 : tensor<2xf32>
  %p = "stablehlo.collective_permute"(%1) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %2 = stablehlo.slice %p [0:1] : (tensor<2xf32>) -> tensor<1xf32>
  %3 = stablehlo.reshape %2 : (tensor<1xf32>) -> tensor<f32>
  %4 = stablehlo.multiply %zero, %3 : tensor<f32>
  %5 = stablehlo.broadcast_in_dim %4, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %6 = stablehlo.add %x, %5 : tensor<2xf32>
  %q = "stablehlo.collective_permute"(%6) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %w = stablehlo.while(%v = %x) : tensor<2xf32>
    cond {
      stablehlo.return %p1 : tensor<i1>
    } do {
      %7 = stablehlo.add %v, %5 : tensor<2xf32>
      // expected-error@+1 {{fork=preserve: the token of this stablehlo.collective_permute comes through a loop, a branch or a call}}
      %8 = "stablehlo.collective_permute"(%7) {
        source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
      } : (tensor<2xf32>) -> tensor<2xf32>
      stablehlo.return %8 : tensor<2xf32>
    }
  return %q, %w : tensor<2xf32>, tensor<2xf32>
}
