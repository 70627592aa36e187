// RUN: stablehlo-tools check-order --target none %s %s | filecheck %s
// RUN: stablehlo-tools check-order --target none %s %s --json | python -m json.tool --compact \
// RUN:   | sed 's/},{/},\n{/g' | filecheck %s --check-prefix=JSON
// RUN: stablehlo-tools check-order --target none %s | filecheck %s --check-prefix=ALONE
// RUN: stablehlo-tools check-order --target none %s --strict | filecheck %s --check-prefix=STRICT

// A token orders the first two, a value the third; what nobody uses is no part of it.

// CHECK: ordered: 2 programs on devices 0 and 1, 6 collectives
// CHECK-NEXT: every participant issues every collective, equally often
// CHECK-NEXT: run once in text order, all 3 meetings take place
// CHECK-NEXT: every other order that tokens and dataflow allow ends the same way

// JSON: {"verdict":"ordered","programs":[{"name":"{{.*}}ordered.mlir","devices":[0],"collectives":3,"deleted":["{{.*}}ordered.mlir:{{[0-9]+:15}}"]},
// JSON-NEXT: {"name":"{{.*}}","devices":[1],"collectives":3,
// JSON: "step":"agreement","communicators":[{"members":[0,1],"collectives":3}]
// JSON: "step":"run","meetings":3,"order":[{"kind":"all_gather","members":[0,1],"collectives":{"0":0,"1":0}},
// JSON-NEXT: {"kind":"all_reduce","members":[0,1],"collectives":{"0":1,"1":1}},
// JSON-NEXT: {"kind":"collective_permute","members":[0,1],"collectives":{"0":2,"1":2}}]},
// JSON-NEXT: {"step":"no-hazard","unordered_neighbours":0}

// ALONE: ordered: 1 program on devices 0 and 1, 3 collectives
// ALONE-NEXT: one program, compiled once: every device issues in the same order

// STRICT: ordered: 2 programs on devices 0 and 1, 6 collectives
module attributes {mhlo.num_replicas = 2 : i32, mhlo.num_partitions = 1 : i32} {
  func.func @main(%x: tensor<4xf32>, %y: tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>) {
    %t0 = stablehlo.create_token : !stablehlo.token
    %x1:2 = stablehlo.optimization_barrier %x, %t0 : tensor<4xf32>, !stablehlo.token
    %g = "stablehlo.all_gather"(%x1#0) {
      all_gather_dim = 0 : i64,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<4xf32>) -> tensor<8xf32>
    %g1:2 = stablehlo.optimization_barrier %g, %x1#1 : tensor<8xf32>, !stablehlo.token
    %y1:2 = stablehlo.optimization_barrier %y, %g1#1 : tensor<8xf32>, !stablehlo.token
    %r = "stablehlo.all_reduce"(%y1#0) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<8xf32>) -> tensor<8xf32>
    %h = stablehlo.tanh %r : tensor<8xf32>
    %p = "stablehlo.collective_permute"(%h) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<8xf32>) -> tensor<8xf32>
    %unused = "stablehlo.collective_permute"(%y) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<8xf32>) -> tensor<8xf32>
    return %g1#0, %p : tensor<8xf32>, tensor<8xf32>
  }
}
