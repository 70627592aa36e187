// RUN: stablehlo-tools opt %s -p roll-layers -o %t.after.mlir
// RUN: filecheck %s --check-prefix=REWRITTEN --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --backend interpreter | filecheck %s

// A forward and a backward of three layers give the same as two loops, bit for bit.
// REWRITTEN-COUNT-2: stablehlo.while
// REWRITTEN-NOT: stablehlo.while
// CHECK: same: 4 outputs, 56 elements, bitwise

// Weights in another order are seen.
// RUN: sed 's/concatenate %\([0-9]*\), %\([0-9]*\), /concatenate %\2, %\1, /' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --backend interpreter --trials 1 \
// RUN:   | filecheck %s --check-prefix=DIFFERS
// DIFFERS: differs: output
func.func @main(%x: tensor<2x4xf32>, %w0: tensor<4x4xf32>, %w1: tensor<4x4xf32>, %w2: tensor<4x4xf32>) -> (tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>, tensor<2x4xf32>) {
  %ones = stablehlo.constant dense<1.0> : tensor<2x4xf32>
  %d0 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h0 = stablehlo.tanh %d0 : tensor<2x4xf32>
  %q0 = stablehlo.multiply %h0, %h0 : tensor<2x4xf32>
  %s0 = stablehlo.subtract %ones, %q0 : tensor<2x4xf32>
  %d1 = stablehlo.dot_general %h0, %w1, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h1 = stablehlo.tanh %d1 : tensor<2x4xf32>
  %q1 = stablehlo.multiply %h1, %h1 : tensor<2x4xf32>
  %s1 = stablehlo.subtract %ones, %q1 : tensor<2x4xf32>
  %d2 = stablehlo.dot_general %h1, %w2, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h2 = stablehlo.tanh %d2 : tensor<2x4xf32>
  %q2 = stablehlo.multiply %h2, %h2 : tensor<2x4xf32>
  %s2 = stablehlo.subtract %ones, %q2 : tensor<2x4xf32>
  %g2 = stablehlo.multiply %h2, %s2 : tensor<2x4xf32>
  %dw2 = stablehlo.dot_general %h1, %g2, contracting_dims = [0] x [0] : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<4x4xf32>
  %dx2 = stablehlo.dot_general %g2, %w2, contracting_dims = [1] x [1] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %g1 = stablehlo.multiply %dx2, %s1 : tensor<2x4xf32>
  %dw1 = stablehlo.dot_general %h0, %g1, contracting_dims = [0] x [0] : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<4x4xf32>
  %dx1 = stablehlo.dot_general %g1, %w1, contracting_dims = [1] x [1] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %g0 = stablehlo.multiply %dx1, %s0 : tensor<2x4xf32>
  %dw0 = stablehlo.dot_general %x, %g0, contracting_dims = [0] x [0] : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<4x4xf32>
  return %dw0, %dw1, %dw2, %h2 : tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>, tensor<2x4xf32>
}
