// Two of one form that nothing orders: nobody hangs, and the data are exchanged for each other.

// RUN: not stablehlo-tools check-order --target none %s %s > %t.out
// RUN: filecheck %s < %t.out
// CHECK: mismatch: nothing orders collective_permute at {{.*}} and collective_permute at {{.*}}, and devices 0 and 1
// CHECK-NEXT: {{.*}}swapped.mlir issues the one at {{.*}} first
// CHECK-NEXT: device 1, in {{.*}}swapped.mlir, issues them in its own order
// CHECK-NEXT: no device hangs: the two have the same form, and the devices silently exchange the wrong data
module attributes {mhlo.num_replicas = 2 : i32, mhlo.num_partitions = 1 : i32} {
  func.func @main(%x: tensor<2xf32>, %y: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) {
    %p = "stablehlo.collective_permute"(%x) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    %q = "stablehlo.collective_permute"(%y) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    return %p, %q : tensor<2xf32>, tensor<2xf32>
  }
}
