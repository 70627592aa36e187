// The interpreter runs nothing that is still to be divided: XLA:CPU divides the program without and with
// the constraint, and computes the same, up to the order of sums.
// RUN: stablehlo-tools opt %S/../transforms/constrain_batch.mlir -p constrain-batch -o %t.after.mlir
// RUN: stablehlo-tools verify %S/../transforms/constrain_batch.mlir %t.after.mlir --trials 2 | filecheck %s
// CHECK: identical in exact arithmetic: 1 output, 48 elements

// And after partition, the weights are gathered and not the batch.
// RUN: stablehlo-tools opt %t.after.mlir -p partition -o %t.divided.mlir
// RUN: filecheck %s --check-prefix=WEIGHTS --input-file %t.divided.mlir
// WEIGHTS-NOT: -> tensor<8x4xf32>
// WEIGHTS: "stablehlo.all_gather"(%{{.+}}) {{.*}} : (tensor<{{.*}}2x4xf32>) -> tensor<{{.*}}4x4xf32>
// WEIGHTS-NOT: -> tensor<8x4xf32>
// RUN: stablehlo-tools verify %S/../transforms/constrain_batch.mlir %t.divided.mlir --trials 2 | filecheck %s
