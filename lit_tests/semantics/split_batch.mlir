// RUN: stablehlo-tools opt %s -p 'split-batch{arguments=0}' -o %t.after.mlir
// RUN: filecheck %s --check-prefix=REWRITTEN --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --backend interpreter | filecheck %s

// Parts, a sum over them, and a batch that lies behind the devices give what the whole gave. Only
// the sum of integers, and not of floats, may be compared bitwise.
// REWRITTEN-COUNT-4: stablehlo.all_
// CHECK: same: 3 outputs, 122 elements, bitwise

// A part in the place of another one is seen.
// RUN: sed 's/\[0:2, 0:6\]/[2:4, 0:6]/' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --backend interpreter --trials 1 \
// RUN:   | filecheck %s --check-prefix=DIFFERS
// DIFFERS: differs: output 0,
module attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
  func.func @main(%x: tensor<4x6xi32>) -> (tensor<4x3xi32>, tensor<i32>, tensor<8x6xi32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %0 = stablehlo.slice %x [0:4, 1:4] : (tensor<4x6xi32>) -> tensor<4x3xi32>
    %1 = "stablehlo.all_reduce"(%0) ({
    ^bb0(%a: tensor<i32>, %b: tensor<i32>):
      %c = stablehlo.add %a, %b : tensor<i32>
      stablehlo.return %c : tensor<i32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x3xi32>) -> tensor<4x3xi32>
    %2 = stablehlo.reduce(%1 init: %zero) applies stablehlo.add across dimensions = [0, 1] : (tensor<4x3xi32>, tensor<i32>) -> tensor<i32>
    %3 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x6xi32>) -> tensor<8x6xi32>
    %4 = stablehlo.negate %3 : tensor<8x6xi32>
    return %1, %2, %4 : tensor<4x3xi32>, tensor<i32>, tensor<8x6xi32>
  }
}
