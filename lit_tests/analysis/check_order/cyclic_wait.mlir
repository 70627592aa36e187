// Four programs in a ring, each two neighbours in one group: each waits for the next.

// Devices 0 and 2 take the one pairing first, devices 1 and 3 the other.
// RUN: sed 's/dense<0>/dense<[[1, 2], [3, 0]]>/; s/dense<1>/dense<[[0, 1], [2, 3]]>/' %s > %t.odd.mlir
// RUN: sed 's/dense<0>/dense<[[0, 1], [2, 3]]>/; s/dense<1>/dense<[[1, 2], [3, 0]]>/' %s > %t.even.mlir
// RUN: not stablehlo-tools check-order --target none %t.even.mlir %t.odd.mlir %t.even.mlir %t.odd.mlir > %t.out
// RUN: filecheck %s < %t.out
// CHECK: may-deadlock: the programs issue all_gather at {{.*}}even.mlir:[[FIRST:[0-9:]+]] and all_gather at {{.*}}odd.mlir:[[FIRST]] and all_gather at {{.*}}even.mlir:[[FIRST]]{{.*}} in conflicting orders
// CHECK-NEXT: device 0  waits in all_gather  for device 1  at {{.*}}even.mlir:[[FIRST]]
// CHECK-NEXT: device 1  waits in all_gather  for device 2  at {{.*}}odd.mlir:[[FIRST]]
// CHECK-NEXT: device 2  waits in all_gather  for device 3  at {{.*}}even.mlir:[[FIRST]]
// CHECK-NEXT: device 3  waits in all_gather  for device 0  at {{.*}}odd.mlir:[[FIRST]]

// RUN: not stablehlo-tools check-order --target none %t.even.mlir %t.odd.mlir %t.even.mlir %t.odd.mlir --json > %t.json
// RUN: filecheck %s --check-prefix=JSON < %t.json
// JSON: "rule": "cyclic-wait"
// JSON: "replayed": true

// All in one order.
// RUN: stablehlo-tools check-order --target none %t.even.mlir %t.even.mlir %t.even.mlir %t.even.mlir | filecheck %s --check-prefix=ALIKE
// ALIKE: ordered: 4 programs on devices 0 to 3, 8 collectives

// With nothing that orders the two of each, some schedule closes the ring.
// RUN: sed 's/(%h)/(%y)/' %t.even.mlir > %t.loose.mlir
// RUN: not stablehlo-tools check-order --target none %t.loose.mlir %t.loose.mlir %t.loose.mlir %t.loose.mlir > %t.out
// RUN: filecheck %s --check-prefix=LOOSE < %t.out
// LOOSE: may-deadlock: unordered collectives can close a cycle of waits
// LOOSE-NOT: not replayed
module attributes {mhlo.num_replicas = 4 : i32, mhlo.num_partitions = 1 : i32} {
  func.func @main(%x: tensor<2xf32>, %y: tensor<2xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
    %g = "stablehlo.all_gather"(%x) {
      all_gather_dim = 0 : i64, replica_groups = dense<0> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<4xf32>
    %half = stablehlo.slice %g [0:2] : (tensor<4xf32>) -> tensor<2xf32>
    %h = stablehlo.add %half, %y : tensor<2xf32>
    %k = "stablehlo.all_gather"(%h) {
      all_gather_dim = 0 : i64, replica_groups = dense<1> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<4xf32>
    return %g, %k : tensor<4xf32>, tensor<4xf32>
  }
}
