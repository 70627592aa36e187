// RUN: stablehlo-tools opt %s -p split-weight-gradients --verify-diagnostics

// P1: there is a backward loop over layers.
// expected-error@+1 {{split-weight-gradients: the program has no backward loop over layers: no loop reads rows that another loop over layers has written (P1)}}
func.func @forward_p1(%w: tensor<3x4x4xf32>, %x: tensor<2x4xf32>) -> tensor<2x4xf32> {
  %c0 = stablehlo.constant dense<0> : tensor<i32>
  %c1 = stablehlo.constant dense<1> : tensor<i32>
  %c3 = stablehlo.constant dense<3> : tensor<i32>
  %k0 = stablehlo.constant dense<0.0> : tensor<3x2x4xf32>
  %forward:4 = stablehlo.while(%i = %c0, %ws = %w, %h = %x, %kept = %k0) : tensor<i32>, tensor<3x4x4xf32>, tensor<2x4xf32>, tensor<3x2x4xf32>
  cond {
    %more = stablehlo.compare LT, %i, %c3 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %ws, %i, %c0, %c0, sizes = [1, 4, 4] : (tensor<3x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
    %one = stablehlo.reshape %row : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
    %next = stablehlo.dot_general %h, %one, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
    %up = stablehlo.reshape %h : (tensor<2x4xf32>) -> tensor<1x2x4xf32>
    %stack = stablehlo.dynamic_update_slice %kept, %up, %i, %c0, %c0 : (tensor<3x2x4xf32>, tensor<1x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x2x4xf32>
    %j = stablehlo.add %i, %c1 : tensor<i32>
    stablehlo.return %j, %ws, %next, %stack : tensor<i32>, tensor<3x4x4xf32>, tensor<2x4xf32>, tensor<3x2x4xf32>
  }
  return %forward#2 : tensor<2x4xf32>
}
