// RUN: stablehlo-tools opt %s -p hold-collectives | filecheck %s

// A manual computation is part of the loop around it; a sum of several operands waits with its
// first, and all its results are held. What already waits for a barrier's result stays.
// CHECK: sdy.manual_computation
// CHECK: %[[A:.*]]:2 = "stablehlo.all_reduce"
// CHECK: %[[A1:.*]]:2 = stablehlo.optimization_barrier %[[A]]#0, %[[A]]#1
// CHECK: %[[U:.*]] = stablehlo.add %[[A1]]#0, %[[A1]]#1
// CHECK: %[[WAIT:.*]]:2 = stablehlo.optimization_barrier %[[U]], %[[A]]#0
// CHECK: %[[B:.*]] = "stablehlo.all_reduce"(%[[WAIT]]#0)
// CHECK: %[[B1:.*]] = stablehlo.optimization_barrier %[[B]]
// CHECK: sdy.return %[[B1]]
module @manual attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["data"=2]>
func.func public @main(%x: tensor<8xf32>, %n: tensor<i32>) -> (tensor<8xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %i, %out = stablehlo.while(%k = %zero, %y = %x) : tensor<i32>, tensor<8xf32>
  cond {
    %more = stablehlo.compare LT, %k, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %z = sdy.manual_computation(%y) in_shardings=[<@mesh, [{"data"}]>] out_shardings=[<@mesh, [{"data"}]>] manual_axes={"data"} (%p: tensor<4xf32>) {
      %q = stablehlo.cosine %p : tensor<4xf32>
      %a:2 = "stablehlo.all_reduce"(%p, %q) ({
      ^bb0(%l: tensor<f32>, %r: tensor<f32>):
        %s = stablehlo.add %l, %r : tensor<f32>
        stablehlo.return %s : tensor<f32>
      }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids} : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
      %u = stablehlo.add %a#0, %a#1 : tensor<4xf32>
      %b = "stablehlo.all_reduce"(%u) ({
      ^bb0(%l: tensor<f32>, %r: tensor<f32>):
        %s = stablehlo.add %l, %r : tensor<f32>
        stablehlo.return %s : tensor<f32>
      }) {channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids} : (tensor<4xf32>) -> tensor<4xf32>
      sdy.return %b : tensor<4xf32>
    } : (tensor<8xf32>) -> tensor<8xf32>
    %next = stablehlo.add %k, %one : tensor<i32>
    stablehlo.return %next, %z : tensor<i32>, tensor<8xf32>
  }
  return %out : tensor<8xf32>
}
}
