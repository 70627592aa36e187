// RUN: stablehlo-tools opt %s -p 'accumulate-gradients{microbatches=3}' -o %t.after.mlir
// RUN: filecheck %s --check-prefix=REWRITTEN --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --backend interpreter | filecheck %s

// Sums, a maximum and values of samples are what the whole batch gave. Only sums of integers, and
// not of floats, may be compared bitwise.
// REWRITTEN: stablehlo.while
// REWRITTEN: stablehlo.dynamic_slice
// CHECK: same: 4 outputs, 29 elements, bitwise

// A microbatch that is taken twice is seen.
// RUN: sed 's/stablehlo.dynamic_slice \(.*\), %iterArg, /stablehlo.dynamic_slice \1, %c, /' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --backend interpreter --trials 1 \
// RUN:   | filecheck %s --check-prefix=DIFFERS
// DIFFERS: differs: output 0,
module attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func @main(%w: tensor<4x2xi32>, %x: tensor<6x4xi32>) -> (tensor<4x2xi32>, tensor<6x2xi32>, tensor<i32>, tensor<2x4xi32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %low = stablehlo.constant dense<-2147483648> : tensor<i32>
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<6x4xi32>, tensor<4x2xi32>) -> tensor<6x2xi32>
    %1 = stablehlo.dot_general %x, %0, contracting_dims = [0] x [0] : (tensor<6x4xi32>, tensor<6x2xi32>) -> tensor<4x2xi32>
    %2 = stablehlo.reduce(%0 init: %low) applies stablehlo.maximum across dimensions = [0, 1] : (tensor<6x2xi32>, tensor<i32>) -> tensor<i32>
    %3 = stablehlo.transpose %1, dims = [1, 0] : (tensor<4x2xi32>) -> tensor<2x4xi32>
    %4 = stablehlo.multiply %3, %3 : tensor<2x4xi32>
    return %1, %0, %2, %4 : tensor<4x2xi32>, tensor<6x2xi32>, tensor<i32>, tensor<2x4xi32>
  }
}
