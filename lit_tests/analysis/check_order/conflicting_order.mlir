// Each program forces an order, and the orders differ.

// RUN: stablehlo-tools opt %s -p thread-tokens -o %t.a.mlir
// RUN: stablehlo-tools opt %S/Inputs/turned.mlir -p thread-tokens -o %t.b.mlir
// RUN: not stablehlo-tools check-order --target none %t.a.mlir %t.b.mlir > %t.out
// RUN: filecheck %s < %t.out
// CHECK: may-deadlock: the programs issue all_gather at {{.*}}a.mlir:[[FIRST:[0-9:]+]] and all_reduce at {{.*}}b.mlir:[[SECOND:[0-9:]+]] in conflicting orders
// CHECK-NEXT: device 0  waits in all_gather  for device 1  at {{.*}}a.mlir:[[FIRST]]
// CHECK-NEXT: device 1  waits in all_reduce  for device 0  at {{.*}}b.mlir:[[SECOND]]
// CHECK-NOT: not replayed

// With nothing that forces them, each may take the order of the other, or not.
// RUN: not stablehlo-tools check-order --target none %s %S/Inputs/turned.mlir > %t.out
// RUN: filecheck %s --check-prefix=LOOSE < %t.out
// LOOSE: may-deadlock: the programs issue all_gather at {{.*}}order.mlir:{{.*}} and all_reduce at {{.*}}turned.mlir:{{.*}} in conflicting orders

// RUN: not stablehlo-tools check-order --target none %t.a.mlir %t.b.mlir --json > %t.json
// RUN: python -m json.tool --compact < %t.json | filecheck %s --check-prefix=JSON
// JSON: "rule":"conflicting-order"
// JSON-SAME: "orders":[],"replayed":true
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
