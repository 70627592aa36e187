// RUN: stablehlo-tools opt %s -p 'offload{explain}' -o %t.mlir 2>&1 | filecheck %s --check-prefix=NOTE
// RUN: stablehlo-tools opt %s | diff %t.mlir -

// A program that fits is left alone.
// NOTE: note: offload: the program fits without a change
func.func @forward(%x: tensor<64x64xf32>, %w: tensor<64x64xf32>) -> tensor<64x64xf32> {
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %z = stablehlo.tanh %y : tensor<64x64xf32>
  return %z : tensor<64x64xf32>
}
