// RUN: stablehlo-tools opt %s -p thread-tokens -o %t.threaded.mlir
// RUN: stablehlo-tools opt %t.threaded.mlir -p partition | filecheck %s
// RUN: stablehlo-tools opt %t.threaded.mlir -p partition -o %t.mlir
// RUN: stablehlo-tools verify %s %t.mlir | filecheck %s --check-prefix=SAME
// RUN: stablehlo-tools check-order %t.mlir %t.mlir --target none | filecheck %s --check-prefix=ORDER

// Tokens order the collectives of two manual computations, one of them in a loop. They pass
// through the ops between, which `partition` divides. The chain stays one chain.

// SAME: identical in exact arithmetic: 2 outputs
// ORDER: ordered: 2 programs on devices 0 to 3

// CHECK-LABEL: func.func public @main
// CHECK: sdy.manual_computation
// CHECK-NOT: sdy.manual_computation
// CHECK: %[[START:.*]] = stablehlo.after_all
// CHECK: %[[LOOP:.*]]:3 = stablehlo.while({{.*}}, %[[CARRIED:.*]] = %[[START]])
// CHECK: stablehlo.optimization_barrier {{.*}} %[[CARRIED]]
// CHECK: "stablehlo.collective_permute"
// CHECK: stablehlo.multiply {{.*}} : tensor<2x4xf32>
// CHECK: stablehlo.optimization_barrier {{.*}} %[[LOOP]]#2
// CHECK: "stablehlo.all_reduce"
sdy.mesh @mesh = <["x"=4]>
func.func public @main(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> (tensor<8x4xf32>, tensor<f32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %loop:2 = stablehlo.while(%i = %zero, %rows = %x) : tensor<i32>, tensor<8x4xf32>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %next = stablehlo.add %i, %one : tensor<i32>
    %moved = sdy.manual_computation(%rows) in_shardings=[<@mesh, [{"x"}, {}]>] out_shardings=[<@mesh, [{"x"}, {}]>] manual_axes={"x"} (%shard: tensor<2x4xf32>) {
      %got = "stablehlo.collective_permute"(%shard) {
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
        source_target_pairs = dense<[[0, 1], [1, 2], [2, 3], [3, 0]]> : tensor<4x2xi64>
      } : (tensor<2x4xf32>) -> tensor<2x4xf32>
      sdy.return %got : tensor<2x4xf32>
    } : (tensor<8x4xf32>) -> tensor<8x4xf32>
    stablehlo.return %next, %moved : tensor<i32>, tensor<8x4xf32>
  }
  %square = stablehlo.multiply %loop#1, %loop#1 : tensor<8x4xf32>
  %sum = sdy.manual_computation(%square) in_shardings=[<@mesh, [{"x"}, {}]>] out_shardings=[<@mesh, []>] manual_axes={"x"} (%shard: tensor<2x4xf32>) {
    %init = stablehlo.constant dense<0.0> : tensor<f32>
    %part = stablehlo.reduce(%shard init: %init) applies stablehlo.add across dimensions = [0, 1] : (tensor<2x4xf32>, tensor<f32>) -> tensor<f32>
    %all = "stablehlo.all_reduce"(%part) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %added = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %added : tensor<f32>
    }) {
      channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>,
      replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>,
      use_global_device_ids
    } : (tensor<f32>) -> tensor<f32>
    sdy.return %all : tensor<f32>
  } : (tensor<8x4xf32>) -> tensor<f32>
  return %square, %sum : tensor<8x4xf32>, tensor<f32>
}
