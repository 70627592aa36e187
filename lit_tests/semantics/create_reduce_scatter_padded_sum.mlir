// RUN: stablehlo-tools opt %s -p create-reduce-scatter -o %t.after.mlir
// RUN: filecheck %s --check-prefix=REWRITTEN --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --backend interpreter | filecheck %s

// A sum of five rows in parts of three, and the same of maxima with any padding: what is padded is
// padded before, to the bit.
// REWRITTEN-NOT: stablehlo.all_reduce
// REWRITTEN-COUNT-2: "stablehlo.reduce_scatter"
// CHECK: same: 2 outputs, 36 elements, bitwise

// RUN: sed 's/high = .1, 0./high = [0, 0]/; s/low = .0, 0./low = [1, 0]/' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --backend interpreter | filecheck %s --check-prefix=MOVED
// MOVED: differs: output 0,
module attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
func.func @main(%x: tensor<5x3xi32>) -> (tensor<3x3xi32>, tensor<3x3xi32>) {
  %sum = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<i32>, %b: tensor<i32>):
    %c = stablehlo.add %a, %b : tensor<i32>
    stablehlo.return %c : tensor<i32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<5x3xi32>) -> tensor<5x3xi32>
  %most = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<i32>, %b: tensor<i32>):
    %c = stablehlo.maximum %a, %b : tensor<i32>
    stablehlo.return %c : tensor<i32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<5x3xi32>) -> tensor<5x3xi32>
  %nothing = stablehlo.constant dense<0> : tensor<i32>
  %seven = stablehlo.constant dense<7> : tensor<i32>
  %p = stablehlo.pad %sum, %nothing, low = [0, 0], high = [1, 0], interior = [0, 0] : (tensor<5x3xi32>, tensor<i32>) -> tensor<6x3xi32>
  %q = stablehlo.pad %most, %seven, low = [0, 0], high = [1, 0], interior = [0, 0] : (tensor<5x3xi32>, tensor<i32>) -> tensor<6x3xi32>
  %d = stablehlo.replica_id : tensor<ui32>
  %three = stablehlo.constant dense<3> : tensor<ui32>
  %s = stablehlo.multiply %d, %three : tensor<ui32>
  %z = stablehlo.constant dense<0> : tensor<ui32>
  %y = stablehlo.dynamic_slice %p, %s, %z, sizes = [3, 3] : (tensor<6x3xi32>, tensor<ui32>, tensor<ui32>) -> tensor<3x3xi32>
  %v = stablehlo.dynamic_slice %q, %s, %z, sizes = [3, 3] : (tensor<6x3xi32>, tensor<ui32>, tensor<ui32>) -> tensor<3x3xi32>
  return %y, %v : tensor<3x3xi32>, tensor<3x3xi32>
}
}
