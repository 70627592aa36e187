// RUN: stablehlo-tools opt %s -p accumulate-gradients --split-input-file | tee %t.once.mlir | filecheck %s

// The same input and options give the same bytes.
// RUN: stablehlo-tools opt %s -p accumulate-gradients --split-input-file | diff -u %t.once.mlir -

// A program that cannot be cut is not written.
// RUN: rm -f %t.none.mlir
// RUN: not stablehlo-tools opt %s -p 'accumulate-gradients{microbatches=5}' --split-input-file -o %t.none.mlir
// RUN: not ls %t.none.mlir

// The signature stays; so does everything that no microbatch changes, in front of the loop, and what
// is not linear in a sum, behind it: here a random mask, and the norm of the gradient.
// CHECK-LABEL: func.func public @main(
// CHECK-SAME: %arg0: tensor<3x2xf32> {jax.buffer_donor = true}, %arg1: tensor<4x3xf32>, %arg2: tensor<2xui64>)
// CHECK-SAME: -> (tensor<3x2xf32> {jax.result_info = "result"})
// CHECK: stablehlo.rng_bit_generator
// CHECK: stablehlo.exponential %arg0
// CHECK-NOT: stablehlo.exponential
// CHECK: stablehlo.while
// CHECK-NOT: stablehlo.rng_bit_generator
// CHECK-NOT: stablehlo.sqrt
// CHECK: stablehlo.return
// CHECK: stablehlo.return
// CHECK: stablehlo.multiply
// CHECK: stablehlo.reduce
// CHECK: stablehlo.sqrt
// CHECK: stablehlo.divide
func.func public @main(%w: tensor<3x2xf32> {jax.buffer_donor = true}, %x: tensor<4x3xf32>, %key: tensor<2xui64>) -> (tensor<3x2xf32> {jax.result_info = "result"}) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %state, %bits = stablehlo.rng_bit_generator %key, algorithm = THREE_FRY : (tensor<2xui64>) -> (tensor<2xui64>, tensor<4x3xui32>)
  %mask = stablehlo.convert %bits : (tensor<4x3xui32>) -> tensor<4x3xf32>
  %0 = stablehlo.multiply %x, %mask : tensor<4x3xf32>
  %1 = stablehlo.exponential %w : tensor<3x2xf32>
  %2 = stablehlo.dot_general %0, %1, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x2xf32>) -> tensor<4x2xf32>
  %3 = stablehlo.dot_general %0, %2, contracting_dims = [0] x [0] : (tensor<4x3xf32>, tensor<4x2xf32>) -> tensor<3x2xf32>
  %4 = stablehlo.multiply %3, %3 : tensor<3x2xf32>
  %5 = stablehlo.reduce(%4 init: %zero) applies stablehlo.add across dimensions = [0, 1] : (tensor<3x2xf32>, tensor<f32>) -> tensor<f32>
  %6 = stablehlo.sqrt %5 : tensor<f32>
  %7 = stablehlo.broadcast_in_dim %6, dims = [] : (tensor<f32>) -> tensor<3x2xf32>
  %8 = stablehlo.divide %3, %7 : tensor<3x2xf32>
  return %8 : tensor<3x2xf32>
}
