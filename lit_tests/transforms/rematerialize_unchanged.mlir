// RUN: stablehlo-tools opt %s -p 'rematerialize{explain}' -o %t.mlir --split-input-file 2>&1 | filecheck %s --check-prefix=NOTE
// RUN: stablehlo-tools opt %s --split-input-file | diff %t.mlir -

// A program that fits, and that no other choice makes faster, stays as it is.
// NOTE: note: rematerialize: the program stays unchanged: no choice that fits is expected to be faster
func.func @forward(%x: tensor<64x64xf32>, %w: tensor<64x64xf32>) -> tensor<64x64xf32> {
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %z = stablehlo.tanh %y : tensor<64x64xf32>
  return %z : tensor<64x64xf32>
}

// -----

// Unrolled layers that fit: to keep what is in memory anyway is as fast.
// NOTE: note: rematerialize: the program stays unchanged
func.func @small_step(%w0: tensor<64x64xf32>, %w1: tensor<64x64xf32>, %x: tensor<64x64xf32>) -> (tensor<64x64xf32>, tensor<64x64xf32>, tensor<64x64xf32>) {
  %a0 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %y0 = stablehlo.tanh %a0 : tensor<64x64xf32>
  %h0 = stablehlo.add %x, %y0 : tensor<64x64xf32>
  %s0 = stablehlo.multiply %y0, %a0 : tensor<64x64xf32>
  %a1 = stablehlo.dot_general %h0, %w1, contracting_dims = [1] x [0] : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %y1 = stablehlo.tanh %a1 : tensor<64x64xf32>
  %h1 = stablehlo.add %h0, %y1 : tensor<64x64xf32>
  %s1 = stablehlo.multiply %y1, %a1 : tensor<64x64xf32>
  %u1 = stablehlo.multiply %h1, %s1 : tensor<64x64xf32>
  %g1 = stablehlo.dot_general %h0, %u1, contracting_dims = [0] x [0] : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %v1 = stablehlo.dot_general %u1, %w1, contracting_dims = [1] x [1] : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %d1 = stablehlo.add %h1, %v1 : tensor<64x64xf32>
  %u0 = stablehlo.multiply %d1, %s0 : tensor<64x64xf32>
  %g0 = stablehlo.dot_general %x, %u0, contracting_dims = [0] x [0] : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %t0 = stablehlo.add %g1, %g0 : tensor<64x64xf32>
  %v0 = stablehlo.dot_general %u0, %w0, contracting_dims = [1] x [1] : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %d0 = stablehlo.add %d1, %v0 : tensor<64x64xf32>
  return %h1, %t0, %d0 : tensor<64x64xf32>, tensor<64x64xf32>, tensor<64x64xf32>
}

// -----

// What has an effect is never repeated, nor a custom call, however little memory there were.
// NOTE: note: rematerialize: the program stays unchanged
func.func @effects(%x: tensor<64x64xf32>, %w: tensor<64x64xf32>) -> tensor<64x64xf32> {
  %y = stablehlo.custom_call @unknown(%x, %w) : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %z = stablehlo.tanh %y : tensor<64x64xf32>
  %u = stablehlo.multiply %z, %y : tensor<64x64xf32>
  return %u : tensor<64x64xf32>
}
