// RUN: stablehlo-tools opt %s -p 'split-layers{counts=1,3}' -o %t.layers.mlir
// RUN: stablehlo-tools opt %t.layers.mlir -p split-weight-gradients -o %t.after.mlir
// RUN: filecheck %s --check-prefix=LAYERS --input-file %t.layers.mlir
// RUN: filecheck %s --check-prefix=REWRITTEN --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.layers.mlir --backend interpreter | filecheck %s
// RUN: stablehlo-tools verify %s %t.after.mlir --backend interpreter | filecheck %s

// A forward and a backward loop over four layers, in two ranges, and with the gradients of weights
// apart, give the same, bit for bit; the counter is used in the layers.
// LAYERS-COUNT-4: stablehlo.while
// LAYERS-NOT: stablehlo.while
// REWRITTEN-COUNT-6: stablehlo.while
// REWRITTEN-NOT: stablehlo.while
// CHECK: same: 3 outputs, 23 elements, bitwise

// Pieces of the weights in another order are seen.
// RUN: sed 's/\[0:1, 0:2, 0:2\]/[3:4, 0:2, 0:2]/' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --backend interpreter --trials 1 \
// RUN:   | filecheck %s --check-prefix=DIFFERS
// DIFFERS: differs: output
func.func @main(%w: tensor<4x2x2xf32>, %x: tensor<3x2xf32>) -> (tensor<4x2x2xf32>, tensor<3x2xf32>, tensor<f32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %none = stablehlo.constant dense<0.0> : tensor<f32>
  %room = stablehlo.constant dense<0.0> : tensor<4x3x2xf32>
  %gradients = stablehlo.constant dense<0.0> : tensor<4x2x2xf32>
  %f:4 = stablehlo.while(%i = %zero, %h = %x, %kept = %room, %ws = %w) : tensor<i32>, tensor<3x2xf32>, tensor<4x3x2xf32>, tensor<4x2x2xf32>
  cond {
    %more = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 2, 2] : (tensor<4x2x2xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x2xf32>
    %m = stablehlo.reshape %row : (tensor<1x2x2xf32>) -> tensor<2x2xf32>
    %put = stablehlo.reshape %h : (tensor<3x2xf32>) -> tensor<1x3x2xf32>
    %new = stablehlo.dynamic_update_slice %kept, %put, %i, %zero, %zero : (tensor<4x3x2xf32>, tensor<1x3x2xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x3x2xf32>
    %y = stablehlo.dot_general %h, %m, contracting_dims = [1] x [0] : (tensor<3x2xf32>, tensor<2x2xf32>) -> tensor<3x2xf32>
    %number = stablehlo.convert %i : (tensor<i32>) -> tensor<f32>
    %shift = stablehlo.broadcast_in_dim %number, dims = [] : (tensor<f32>) -> tensor<3x2xf32>
    %out = stablehlo.add %y, %shift : tensor<3x2xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %out, %new, %ws : tensor<i32>, tensor<3x2xf32>, tensor<4x3x2xf32>, tensor<4x2x2xf32>
  }
  %loss = stablehlo.reduce(%f#1 init: %none) applies stablehlo.add across dimensions = [0, 1] : (tensor<3x2xf32>, tensor<f32>) -> tensor<f32>
  %b:5 = stablehlo.while(%i = %zero, %d = %f#1, %into = %gradients, %kept = %f#2, %ws = %w) : tensor<i32>, tensor<3x2xf32>, tensor<4x2x2xf32>, tensor<4x3x2xf32>, tensor<4x2x2xf32>
  cond {
    %more = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %at = stablehlo.subtract %three, %i : tensor<i32>
    %row = stablehlo.dynamic_slice %ws, %at, %zero, %zero, sizes = [1, 2, 2] : (tensor<4x2x2xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x2xf32>
    %m = stablehlo.reshape %row : (tensor<1x2x2xf32>) -> tensor<2x2xf32>
    %was = stablehlo.dynamic_slice %kept, %at, %zero, %zero, sizes = [1, 3, 2] : (tensor<4x3x2xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x2xf32>
    %h = stablehlo.reshape %was : (tensor<1x3x2xf32>) -> tensor<3x2xf32>
    %g = stablehlo.dot_general %h, %d, contracting_dims = [0] x [0] : (tensor<3x2xf32>, tensor<3x2xf32>) -> tensor<2x2xf32>
    %put = stablehlo.reshape %g : (tensor<2x2xf32>) -> tensor<1x2x2xf32>
    %new = stablehlo.dynamic_update_slice %into, %put, %at, %zero, %zero : (tensor<4x2x2xf32>, tensor<1x2x2xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x2x2xf32>
    %dx = stablehlo.dot_general %d, %m, contracting_dims = [1] x [1] : (tensor<3x2xf32>, tensor<2x2xf32>) -> tensor<3x2xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %dx, %new, %kept, %ws : tensor<i32>, tensor<3x2xf32>, tensor<4x2x2xf32>, tensor<4x3x2xf32>, tensor<4x2x2xf32>
  }
  %updated = stablehlo.subtract %w, %b#2 : tensor<4x2x2xf32>
  return %updated, %b#1, %loss : tensor<4x2x2xf32>, tensor<3x2xf32>, tensor<f32>
}
