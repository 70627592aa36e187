// A loop over layers in a manual computation over "data": devices have their samples, and terms of
// the sum of the gradients. Without the axis these are all samples, and the sum; the all_reduce goes.
// What one program does not compute is refused where it stands.
// RUN: stablehlo-tools opt %s -p 'expand-pipeline{axis=stage microbatches=2}' -o %t.after.mlir
// RUN: filecheck %s < %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir | filecheck %s --check-prefix=SAME
// RUN: sed "/sdy.return/s/, %%sum/, %%gram/" %s > %t.term.mlir
// RUN: not stablehlo-tools opt %t.term.mlir -p 'expand-pipeline{axis=stage microbatches=2}' -o %t.none.mlir 2>&1 | filecheck %s --check-prefix=TERM
// RUN: not ls %t.none.mlir

// CHECK: sdy.sharding_constraint %arg0 <@mesh, [{"data", ?}, {?}]> : tensor<8x4xf32>
// CHECK: sdy.manual_computation{{.*}}manual_axes={"stage"}
// CHECK: "stablehlo.collective_permute"
// CHECK: "stablehlo.all_reduce"{{.*}}replica_groups = dense<{{\[\[}}0, 1], [2, 3]]>
// CHECK-NOT: stablehlo.all_reduce
// CHECK: contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
// CHECK-NOT: stablehlo.all_reduce
// SAME: identical in exact arithmetic: 2 outputs
// TERM: error: expand-pipeline: this loop over layers is in a manual computation whose axis "data" cannot be left to the partitioner (P2): stablehlo.dot_general: each device holds a term of a sum that no all_reduce completes

module @layers attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=2, "stage"=2]>
  func.func public @main(%arg0: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}, %arg1: tensor<2x4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"stage"}, {}, {}]>}) -> (tensor<8x4xf32>, tensor<4x4xf32>) {
    %0:2 = sdy.manual_computation(%arg0, %arg1) in_shardings=[<@mesh, [{"data"}, {}]>, <@mesh, [{}, {}, {}]>] out_shardings=[<@mesh, [{"data"}, {}]>, <@mesh, [{}, {}]>] manual_axes={"data"} (%x: tensor<4x4xf32>, %w: tensor<2x4x4xf32>) {
      %zero = stablehlo.constant dense<0> : tensor<i32>
      %one = stablehlo.constant dense<1> : tensor<i32>
      %two = stablehlo.constant dense<2> : tensor<i32>
      %1:3 = stablehlo.while(%ws = %w, %i = %zero, %h = %x) : tensor<2x4x4xf32>, tensor<i32>, tensor<4x4xf32>
      cond {
        %c = stablehlo.compare LT, %i, %two : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %c : tensor<i1>
      } do {
        %row = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 4, 4] : (tensor<2x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
        %own = stablehlo.reshape %row : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
        %p = stablehlo.dot_general %h, %own, contracting_dims = [1] x [0] : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
        %t = stablehlo.tanh %p : tensor<4x4xf32>
        %n = stablehlo.add %i, %one : tensor<i32>
        stablehlo.return %ws, %n, %t : tensor<2x4x4xf32>, tensor<i32>, tensor<4x4xf32>
      }
      %y = stablehlo.negate %1#2 : tensor<4x4xf32>
      %gram = stablehlo.dot_general %y, %y, contracting_dims = [0] x [0] : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
      %sum = "stablehlo.all_reduce"(%gram) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, replica_groups = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>, use_global_device_ids}> ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %s = stablehlo.add %a, %b : tensor<f32>
        %k = sdy.sharding_constraint %s <@mesh, []> : tensor<f32>
        stablehlo.return %k : tensor<f32>
      }) : (tensor<4x4xf32>) -> tensor<4x4xf32>
      sdy.return %y, %sum : tensor<4x4xf32>, tensor<4x4xf32>
    } : (tensor<8x4xf32>, tensor<2x4x4xf32>) -> (tensor<8x4xf32>, tensor<4x4xf32>)
    return %0#0, %0#1 : tensor<8x4xf32>, tensor<4x4xf32>
  }
}
