// RUN: stablehlo-tools opt %s -p hold-collectives | tee %t.after.mlir | filecheck %s --check-prefix=HELD
// RUN: stablehlo-tools verify %s %t.after.mlir --backend interpreter | filecheck %s
// RUN: stablehlo-tools opt %t.after.mlir -p hold-collectives | diff %t.after.mlir -

// Two sums of a loop, each in its place, with the values of before; a second run changes nothing.
// HELD-LABEL: stablehlo.while
// HELD: do {
// HELD: %[[A:.*]] = "stablehlo.reduce_scatter"
// HELD: %[[A1:.*]] = stablehlo.optimization_barrier %[[A]] : tensor<2xf32>
// HELD: %[[WAIT:.*]]:2 = stablehlo.optimization_barrier %{{.*}}, %[[A]] : tensor<4xf32>, tensor<2xf32>
// HELD: %[[B:.*]] = "stablehlo.all_reduce"(%[[WAIT]]#0)
// HELD: %[[B1:.*]] = stablehlo.optimization_barrier %[[B]] : tensor<4xf32>
// HELD: stablehlo.dynamic_update_slice %{{.*}}, %[[A1]]
// HELD: stablehlo.add %{{.*}}, %[[B1]]
// CHECK: same: 2 outputs, 24 elements, bitwise

module @semantics attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
func.func @main(%x: tensor<4xf32>) -> (tensor<8xf32>, tensor<4xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %two = stablehlo.constant dense<2> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %none = stablehlo.constant dense<0.0> : tensor<8xf32>
  %out:3 = stablehlo.while(%i = %zero, %rows = %none, %y = %x) : tensor<i32>, tensor<8xf32>, tensor<4xf32>
  cond {
    %more = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %u = stablehlo.cosine %y : tensor<4xf32>
    %a = "stablehlo.reduce_scatter"(%u) ({
    ^bb0(%l: tensor<f32>, %r: tensor<f32>):
      %s = stablehlo.add %l, %r : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, scatter_dimension = 0 : i64} : (tensor<4xf32>) -> tensor<2xf32>
    %v = stablehlo.sine %y : tensor<4xf32>
    %b = "stablehlo.all_reduce"(%v) ({
    ^bb0(%l: tensor<f32>, %r: tensor<f32>):
      %s = stablehlo.add %l, %r : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
    %at = stablehlo.multiply %i, %two : tensor<i32>
    %stored = stablehlo.dynamic_update_slice %rows, %a, %at : (tensor<8xf32>, tensor<2xf32>, tensor<i32>) -> tensor<8xf32>
    %z = stablehlo.add %y, %b : tensor<4xf32>
    %next = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %next, %stored, %z : tensor<i32>, tensor<8xf32>, tensor<4xf32>
  }
  return %out#1, %out#2 : tensor<8xf32>, tensor<4xf32>
}
}
