// RUN: stablehlo-tools opt %s -p split-weight-gradients --split-input-file 2>%t.warnings | filecheck %s
// RUN: filecheck %s --check-prefix=WARNED --input-file %t.warnings
// WARNED: warning: split-weight-gradients: all work of the backward loops is part of their chains, so nothing is divided

// The chain needs the product that is written.
// CHECK-LABEL: func.func @frozen
// CHECK-COUNT-2: stablehlo.while
// CHECK-NOT: stablehlo.while
func.func @frozen(%w: tensor<3x4x4xf32>, %x: tensor<2x4xf32>) -> (tensor<3x4x4xf32>, tensor<f32>, tensor<2x4xf32>) {
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
  %g0 = stablehlo.constant dense<0.0> : tensor<3x4x4xf32>
  %backward:5 = stablehlo.while(%i = %c0, %ws = %w, %kept = %forward#3, %d = %forward#2, %dws = %g0) : tensor<i32>, tensor<3x4x4xf32>, tensor<3x2x4xf32>, tensor<2x4xf32>, tensor<3x4x4xf32>
  cond {
    %more = stablehlo.compare LT, %i, %c3 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %c2 = stablehlo.constant dense<2> : tensor<i32>
    %r = stablehlo.subtract %c2, %i : tensor<i32>
    %row = stablehlo.dynamic_slice %ws, %r, %c0, %c0, sizes = [1, 4, 4] : (tensor<3x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
    %one = stablehlo.reshape %row : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
    %in = stablehlo.dynamic_slice %kept, %r, %c0, %c0, sizes = [1, 2, 4] : (tensor<3x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
    %h = stablehlo.reshape %in : (tensor<1x2x4xf32>) -> tensor<2x4xf32>
    %dw = stablehlo.dot_general %h, %d, contracting_dims = [0] x [0] : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<4x4xf32>
    %turned = stablehlo.dot_general %d, %dw, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
    %dx = stablehlo.dot_general %turned, %one, contracting_dims = [1] x [1] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
    %up = stablehlo.reshape %dw : (tensor<4x4xf32>) -> tensor<1x4x4xf32>
    %stack = stablehlo.dynamic_update_slice %dws, %up, %r, %c0, %c0 : (tensor<3x4x4xf32>, tensor<1x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x4x4xf32>
    %j = stablehlo.add %i, %c1 : tensor<i32>
    stablehlo.return %j, %ws, %kept, %dx, %stack : tensor<i32>, tensor<3x4x4xf32>, tensor<3x2x4xf32>, tensor<2x4xf32>, tensor<3x4x4xf32>
  }
  %next = stablehlo.subtract %w, %backward#4 : tensor<3x4x4xf32>
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %sum = stablehlo.reduce(%backward#4 init: %zero) applies stablehlo.add across dimensions = [0, 1, 2] : (tensor<3x4x4xf32>, tensor<f32>) -> tensor<f32>
  return %next, %sum, %backward#3 : tensor<3x4x4xf32>, tensor<f32>, tensor<2x4xf32>
}
