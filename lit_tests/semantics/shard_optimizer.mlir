// The interpreter runs nothing that is still to be divided: XLA:CPU divides the program without and with
// the new shardings, and computes the same, up to the order of sums.
// RUN: stablehlo-tools opt %S/../transforms/shard_optimizer.mlir -p shard-optimizer -o %t.after.mlir
// RUN: stablehlo-tools verify %S/../transforms/shard_optimizer.mlir %t.after.mlir --trials 2 | filecheck %s
// CHECK: identical in exact arithmetic: 2 outputs, 32,768 elements

// After partition the gradient is reduced to parts, and the new weights are gathered.
// RUN: stablehlo-tools opt %t.after.mlir -p 'partition{hardware=h100},create-reduce-scatter' -o %t.divided.mlir
// RUN: filecheck %s --check-prefix=DIVIDED --input-file %t.divided.mlir
// DIVIDED: stablehlo.subtract
// DIVIDED: "stablehlo.all_gather"
// RUN: stablehlo-tools verify %S/../transforms/shard_optimizer.mlir %t.divided.mlir --trials 2 | filecheck %s
