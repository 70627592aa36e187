// A collective in a branch that is surely taken, as jax writes one for each platform, passes another
// outside of it: the branch moves as a whole.

// RUN: rm -rf %t && stablehlo-tools align-order --target none %s %S/Inputs/align_order_cases_turned.mlir -o %t
// RUN: filecheck %s < %t/align_order_cases.mlir
// RUN: filecheck %s < %t/align_order_cases_turned.mlir
// RUN: stablehlo-tools check-order --target none %t/align_order_cases.mlir %t/align_order_cases_turned.mlir | filecheck %s --check-prefix=ORDERED
// ORDERED: ordered: 2 programs on devices 0 and 1, 4 collectives

// CHECK: %[[CASE:.+]]:2 = "stablehlo.case"
// CHECK: "stablehlo.all_gather"
// CHECK: "stablehlo.all_gather"
// CHECK: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %arg1, %[[CASE]]#1
// CHECK-NEXT: "stablehlo.all_reduce"(%[[IN]]#0)

// The values are the same, bit for bit.
// RUN: stablehlo-tools verify %S/Inputs/align_order_cases_turned.mlir %t/align_order_cases_turned.mlir --trials 1 --backend interpreter | filecheck %s --check-prefix=SAME
// SAME: same: 2 outputs, 12 elements, bitwise, 1 trial, 2 devices
module attributes {mhlo.num_replicas = 2 : i32, mhlo.num_partitions = 1 : i32} {
  func.func @main(%x: tensor<2xf32>, %y: tensor<2xf32>) -> (tensor<4xf32>, tensor<2xf32>) {
    %platform = stablehlo.constant dense<1> : tensor<i32>
    %gathered = "stablehlo.case"(%platform) ({
      %g = "stablehlo.all_gather"(%x) {
        all_gather_dim = 0 : i64,
        replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
      } : (tensor<2xf32>) -> tensor<4xf32>
      stablehlo.return %g : tensor<4xf32>
    }, {
      %g = "stablehlo.all_gather"(%x) {
        all_gather_dim = 0 : i64,
        replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
      } : (tensor<2xf32>) -> tensor<4xf32>
      stablehlo.return %g : tensor<4xf32>
    }) : (tensor<i32>) -> tensor<4xf32>
    %reduced = "stablehlo.all_reduce"(%y) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
    return %gathered, %reduced : tensor<4xf32>, tensor<2xf32>
  }
}
