// Programs with the same two collectives in opposite text order come into one order.

// RUN: rm -rf %t && stablehlo-tools align-order --target none %s %S/Inputs/align_order_turned.mlir -o %t | filecheck %s --check-prefix=WRITTEN
// RUN: filecheck %s < %t/align_order.mlir
// RUN: filecheck %s < %t/align_order_turned.mlir
// RUN: stablehlo-tools check-order --target none %t/align_order.mlir %t/align_order_turned.mlir | filecheck %s --check-prefix=ORDERED
// WRITTEN: {{.*}}.tmp/align_order.mlir
// WRITTEN-NEXT: {{.*}}.tmp/align_order_turned.mlir
// ORDERED: ordered: 2 programs on devices 0 and 1, 4 collectives

// CHECK: func.func @main(%[[X:.+]]: tensor<2xf32>, %[[Y:.+]]: tensor<2xf32>) -> (tensor<4xf32>, tensor<2xf32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]]
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[GATHER]], %[[IN]]#1
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[Y]], %[[OUT]]#1
// CHECK-NEXT: %[[REDUCE:.+]] = "stablehlo.all_reduce"(%[[IN2]]#0)
// CHECK: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[REDUCE]], %[[IN2]]#1
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT2]]#0

// The values are the same, bit for bit.
// RUN: stablehlo-tools verify %S/Inputs/align_order_turned.mlir %t/align_order_turned.mlir --trials 1 --backend interpreter | filecheck %s --check-prefix=SAME
// SAME: same: 2 outputs, 12 elements, bitwise, 1 trial, 2 devices

// As composites; and chains that were there before are replaced.
// RUN: rm -rf %t.again && stablehlo-tools align-order --target none %t/align_order.mlir %t/align_order_turned.mlir -o %t.again
// RUN: diff %t/align_order.mlir %t.again/align_order.mlir
// RUN: stablehlo-tools align-order --target none %t/align_order.mlir %t/align_order_turned.mlir -o %t.composite --form=composite
// RUN: filecheck %s --check-prefix=COMPOSITE < %t.composite/align_order.mlir
// RUN: stablehlo-tools check-order --target none %t.composite/align_order.mlir %t/align_order_turned.mlir | filecheck %s --check-prefix=ORDERED
// COMPOSITE: stablehlo.composite "stablehlo_tools.all_gather"
// COMPOSITE: stablehlo.composite "stablehlo_tools.all_reduce"
module attributes {mhlo.num_replicas = 2 : i32, mhlo.num_partitions = 1 : i32} {
  func.func @main(%x: tensor<2xf32>, %y: tensor<2xf32>) -> (tensor<4xf32>, tensor<2xf32>) {
    %g = "stablehlo.all_gather"(%x) {
      all_gather_dim = 0 : i64,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<4xf32>
    %r = "stablehlo.all_reduce"(%y) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
    return %g, %r : tensor<4xf32>, tensor<2xf32>
  }
}
