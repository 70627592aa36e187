// Two collectives that nothing orders: one compiler issues the one first, another the other.

// RUN: not stablehlo-tools check-order --target none %s %s > %t.out
// RUN: filecheck %s < %t.out
// CHECK: may-deadlock: nothing orders all_gather at {{.*}}unordered.mlir:[[FIRST:[0-9]+:[0-9]+]] and all_reduce at {{.*}}unordered.mlir:[[SECOND:[0-9]+:[0-9]+]] in {{.*}}unordered.mlir, and devices 0 and 1, which take part in both, are compiled separately
// CHECK-NEXT: device 0  waits in all_reduce  for device 1  at {{.*}}:[[SECOND]]
// CHECK-NEXT: device 1  waits in all_gather  for device 0  at {{.*}}:[[FIRST]]
// CHECK-NEXT: a schedule of {{.*}} that allows it: all_reduce at {{.*}}:[[SECOND]], all_gather at {{.*}}:[[FIRST]]
// CHECK-NOT: not replayed

// RUN: not stablehlo-tools check-order --target none %s %s --json > %t.json
// RUN: python -m json.tool --compact < %t.json | filecheck %s --check-prefix=JSON
// JSON: "verdict":"may-deadlock"
// JSON-SAME: "counterexample":{"rule":"unordered",
// JSON-SAME: "devices":[0,1],
// JSON-SAME: "what":"all_reduce tensor<2xf32> -> tensor<2xf32> add"
// JSON-SAME: "orders":[{"program":0,"collectives":[1,0]}],"replayed":true}

// One program is compiled once: its devices issue alike, unless each is said to be apart.
// RUN: stablehlo-tools check-order --target none %s | filecheck %s --check-prefix=ALONE
// RUN: not stablehlo-tools check-order --target none %s --strict > %t.strict
// RUN: filecheck %s --check-prefix=STRICT < %t.strict
// ALONE: ordered: 1 program on devices 0 and 1, 2 collectives
// STRICT: may-deadlock: nothing orders all_gather

// Threaded, they are ordered, in either form of the chain.
// RUN: stablehlo-tools opt %s -p thread-tokens -o %t.barrier.mlir
// RUN: stablehlo-tools opt %s -p 'thread-tokens{form=composite}' -o %t.composite.mlir
// RUN: stablehlo-tools check-order --target none %t.barrier.mlir %t.composite.mlir | filecheck %s --check-prefix=THREADED
// THREADED: ordered: 2 programs on devices 0 and 1, 4 collectives
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
