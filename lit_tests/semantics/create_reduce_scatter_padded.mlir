// RUN: stablehlo-tools opt %s -p create-reduce-scatter -o %t.after.mlir
// RUN: filecheck %s --check-prefix=REWRITTEN --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --backend interpreter | filecheck %s

// What one device takes of a padded gather, and what the other has of the padding, bit for bit.
// REWRITTEN: "stablehlo.collective_permute"
// REWRITTEN-NOT: stablehlo.all_gather
// CHECK: same: 1 output, 60 elements, bitwise
module attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
func.func @main(%x: tensor<4x3xf32>, %v: tensor<f32>) -> tensor<10x3xf32> {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x3xf32>) -> tensor<8x3xf32>
  %p = stablehlo.pad %g, %v, low = [11, 0], high = [1, 0], interior = [0, 0] : (tensor<8x3xf32>, tensor<f32>) -> tensor<20x3xf32>
  %d = stablehlo.replica_id : tensor<ui32>
  %ten = stablehlo.constant dense<10> : tensor<ui32>
  %s = stablehlo.multiply %d, %ten : tensor<ui32>
  %z = stablehlo.constant dense<0> : tensor<ui32>
  %y = stablehlo.dynamic_slice %p, %s, %z, sizes = [10, 3] : (tensor<20x3xf32>, tensor<ui32>, tensor<ui32>) -> tensor<10x3xf32>
  return %y : tensor<10x3xf32>
}
}
