// RUN: stablehlo-tools opt %s -p roll-layers --split-input-file 2>%t.warnings | filecheck %s
// RUN: filecheck %s --check-prefix=WARNED --input-file %t.warnings

// What is rolled has nothing left to roll, and the second run changes nothing.
// RUN: stablehlo-tools opt %S/roll_layers.mlir -p roll-layers --split-input-file -o %t.once.mlir
// RUN: stablehlo-tools opt %S/roll_layers.mlir -p roll-layers,roll-layers --split-input-file | diff %t.once.mlir -

// WARNED: warning: roll-layers: ops repeat here, but they are not layers: stablehlo.add reads results of different ops in different iterations; nothing is rolled
// WARNED: warning: roll-layers: ops repeat here, but they are not layers: stablehlo.dot_general reads no value that differs between iterations; nothing is rolled
// WARNED: warning: roll-layers: ops repeat here, but they are not layers: stablehlo.dot_general passes no value on that depends on the previous iteration; nothing is rolled
// WARNED: warning: roll-layers: no sequence of ops with a product repeats, so nothing is rolled
// WARNED: warning: roll-layers: no sequence of ops with a product repeats, so nothing is rolled
// WARNED: warning: roll-layers: ops repeat here, but they are not layers: stablehlo.dot_general has values that cannot be stacked; nothing is rolled

// The second layer adds to its product what the first one adds to something else.
// CHECK-LABEL: func.func @differing
// CHECK-NOT: stablehlo.while
// CHECK: return
func.func @differing(%x: tensor<2x4xf32>, %w0: tensor<4x4xf32>, %w1: tensor<4x4xf32>) -> tensor<2x4xf32> {
  %d0 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h0 = stablehlo.add %d0, %x : tensor<2x4xf32>
  %d1 = stablehlo.dot_general %h0, %w1, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h1 = stablehlo.add %d1, %d1 : tensor<2x4xf32>
  return %h1 : tensor<2x4xf32>
}

// -----

// All layers have one set of weights.
// CHECK-LABEL: func.func @shared
// CHECK-NOT: stablehlo.while
// CHECK: return
func.func @shared(%x: tensor<2x4xf32>, %w0: tensor<4x4xf32>, %w1: tensor<4x4xf32>, %w2: tensor<4x4xf32>) -> tensor<2x4xf32> {
  %d0 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h0 = stablehlo.tanh %d0 : tensor<2x4xf32>
  %d1 = stablehlo.dot_general %h0, %w0, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h1 = stablehlo.tanh %d1 : tensor<2x4xf32>
  %d2 = stablehlo.dot_general %h1, %w0, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h2 = stablehlo.tanh %d2 : tensor<2x4xf32>
  return %h2 : tensor<2x4xf32>
}

// -----

// Products beside each other hand nothing on.
// CHECK-LABEL: func.func @beside
// CHECK-NOT: stablehlo.while
// CHECK: return
func.func @beside(%x: tensor<2x4xf32>, %w0: tensor<4x4xf32>, %w1: tensor<4x4xf32>, %w2: tensor<4x4xf32>) -> tensor<2x4xf32> {
  %d0 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h0 = stablehlo.tanh %d0 : tensor<2x4xf32>
  %d1 = stablehlo.dot_general %x, %w1, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h1 = stablehlo.tanh %d1 : tensor<2x4xf32>
  %d2 = stablehlo.dot_general %x, %w2, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h2 = stablehlo.tanh %d2 : tensor<2x4xf32>
  return %h2 : tensor<2x4xf32>
}

// -----

// Layers differ in an op.
// CHECK-LABEL: func.func @other
// CHECK-NOT: stablehlo.while
// CHECK: return
func.func @other(%x: tensor<2x4xf32>, %w0: tensor<4x4xf32>, %w1: tensor<4x4xf32>, %w2: tensor<4x4xf32>) -> tensor<2x4xf32> {
  %d0 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h0 = stablehlo.tanh %d0 : tensor<2x4xf32>
  %m0 = stablehlo.exponential %h0 : tensor<2x4xf32>
  %d1 = stablehlo.dot_general %m0, %w1, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h1 = stablehlo.tanh %d1 : tensor<2x4xf32>
  %m1 = stablehlo.negate %h1 : tensor<2x4xf32>
  %d2 = stablehlo.dot_general %m1, %w2, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h2 = stablehlo.tanh %d2 : tensor<2x4xf32>
  return %h2 : tensor<2x4xf32>
}

// -----

// Layers have side effects.
// CHECK-LABEL: func.func @effects
// CHECK-NOT: stablehlo.while
// CHECK: return
func.func @effects(%x: tensor<2x4xf32>, %w0: tensor<4x4xf32>, %w1: tensor<4x4xf32>, %w2: tensor<4x4xf32>) -> tensor<2x4xf32> {
  %d0 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h0 = stablehlo.custom_call @log(%d0) {has_side_effect = true} : (tensor<2x4xf32>) -> tensor<2x4xf32>
  %d1 = stablehlo.dot_general %h0, %w1, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h1 = stablehlo.custom_call @log(%d1) {has_side_effect = true} : (tensor<2x4xf32>) -> tensor<2x4xf32>
  %d2 = stablehlo.dot_general %h1, %w2, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h2 = stablehlo.custom_call @log(%d2) {has_side_effect = true} : (tensor<2x4xf32>) -> tensor<2x4xf32>
  return %h2 : tensor<2x4xf32>
}

// -----

// Of values whose size is not known no stack can be made.
// CHECK-LABEL: func.func @unknown_size
// CHECK-NOT: stablehlo.while
// CHECK: return
func.func @unknown_size(%x: tensor<?x4xf32>, %w0: tensor<4x4xf32>, %w1: tensor<4x4xf32>) -> tensor<?x4xf32> {
  %d0 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (tensor<?x4xf32>, tensor<4x4xf32>) -> tensor<?x4xf32>
  %h0 = stablehlo.tanh %d0 : tensor<?x4xf32>
  %d1 = stablehlo.dot_general %h0, %w1, contracting_dims = [1] x [0] : (tensor<?x4xf32>, tensor<4x4xf32>) -> tensor<?x4xf32>
  %h1 = stablehlo.tanh %d1 : tensor<?x4xf32>
  return %h1 : tensor<?x4xf32>
}
