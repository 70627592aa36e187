// RUN: stablehlo-tools opt %s -p fold-pipeline -o %t.mlir
// RUN: filecheck %s < %t.mlir
// RUN: stablehlo-tools verify %s %t.mlir
// RUN: stablehlo-tools opt %s -p 'fold-pipeline,expand-pipeline{microbatches=3}' -o %t.expanded.mlir
// RUN: stablehlo-tools verify %s %t.expanded.mlir

// Each device of the axis for samples cuts its own into microbatches: in the whole batch, what is
// one microbatch lies apart. As that axis divides what lies within a microbatch, the batch of the
// loop has the samples outside of the microbatches, and each device still has its own.
// CHECK-LABEL: func.func @cut
// CHECK-SAME: (%[[W:.+]]: tensor<2x4x4xf32>, %[[X:.+]]: tensor<12x4xf32>)
// CHECK: %[[OWN:.+]] = sdy.sharding_constraint %[[X]] <@mesh, [{"data", ?}, {?}]>
// CHECK: %[[APART:.+]] = stablehlo.reshape %[[OWN]] : (tensor<12x4xf32>) -> tensor<2x3x2x4xf32>
// CHECK-NEXT: %[[OUTSIDE:.+]] = stablehlo.transpose %[[APART]], dims = [0, 2, 1, 3]
// CHECK-NEXT: %[[BATCH:.+]] = stablehlo.reshape %[[OUTSIDE]] : (tensor<2x2x3x4xf32>) -> tensor<12x4xf32>
// CHECK: %[[LOOP:.+]]:3 = stablehlo.while({{.+}} = %[[BATCH]])
// CHECK: stablehlo.dot_general
// CHECK-SAME: -> tensor<12x4xf32>
// CHECK: %[[BACK:.+]] = stablehlo.reshape %[[LOOP]]#2 : (tensor<12x4xf32>) -> tensor<2x2x3x4xf32>
// CHECK-NEXT: %[[INSIDE:.+]] = stablehlo.transpose %[[BACK]], dims = [0, 2, 1, 3]
// CHECK-NEXT: stablehlo.reshape %[[INSIDE]] : (tensor<2x3x2x4xf32>) -> tensor<12x4xf32>
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["data"=2, "stage"=2]>
func.func @cut(%w: tensor<2x4x4xf32>, %x: tensor<12x4xf32>) -> tensor<12x4xf32> {
  %0 = sdy.manual_computation(%w, %x) in_shardings=[<@mesh, [{"stage"}, {}, {}]>, <@mesh, [{"data"}, {}]>] out_shardings=[<@mesh, [{"data"}, {}]>] manual_axes={"data", "stage"} (%own: tensor<1x4x4xf32>, %samples: tensor<6x4xf32>) {
    %batch = stablehlo.reshape %samples : (tensor<6x4xf32>) -> tensor<3x2x4xf32>
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %two = stablehlo.constant dense<2> : tensor<i32>
    %ticks = stablehlo.constant dense<4> : tensor<i32>
    %unset = stablehlo.constant dense<0.0> : tensor<2x4xf32>
    %none = stablehlo.constant dense<0.0> : tensor<3x2x4xf32>
    %id = stablehlo.partition_id : tensor<ui32>
    %stages = stablehlo.constant dense<2> : tensor<ui32>
    %place_ = stablehlo.remainder %id, %stages : tensor<ui32>
    %rank = stablehlo.convert %place_ : (tensor<ui32>) -> tensor<i32>
    %first = stablehlo.compare EQ, %rank, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %last = stablehlo.compare EQ, %rank, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %ran:4 = stablehlo.while(%own_ = %own, %t = %zero, %arriving = %unset, %outputs = %none) : tensor<1x4x4xf32>, tensor<i32>, tensor<2x4xf32>, tensor<3x2x4xf32>
    cond {
      %more = stablehlo.compare LT, %t, %ticks : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    } do {
      %index = stablehlo.minimum %t, %two : tensor<i32>
      %fed = stablehlo.dynamic_slice %batch, %index, %zero, %zero, sizes = [1, 2, 4] : (tensor<3x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
      %sample = stablehlo.reshape %fed : (tensor<1x2x4xf32>) -> tensor<2x4xf32>
      %entered = stablehlo.select %first, %sample, %arriving : tensor<i1>, tensor<2x4xf32>
      %layer = stablehlo.reshape %own : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
      %h = stablehlo.dot_general %entered, %layer, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
      %y = stablehlo.tanh %h : tensor<2x4xf32>
      %place = stablehlo.subtract %t, %one : tensor<i32>
      %row = stablehlo.reshape %y : (tensor<2x4xf32>) -> tensor<1x2x4xf32>
      %written = stablehlo.dynamic_update_slice %outputs, %row, %place, %zero, %zero : (tensor<3x2x4xf32>, tensor<1x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x2x4xf32>
      %sent = "stablehlo.collective_permute"(%y) {
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>
      } : (tensor<2x4xf32>) -> tensor<2x4xf32>
      %next = stablehlo.add %t, %one : tensor<i32>
      stablehlo.return %own_, %next, %sent, %written : tensor<1x4x4xf32>, tensor<i32>, tensor<2x4xf32>, tensor<3x2x4xf32>
    }
    %kept = stablehlo.select %last, %ran#3, %none : tensor<i1>, tensor<3x2x4xf32>
    %whole = "stablehlo.all_reduce"(%kept) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) {channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<3x2x4xf32>) -> tensor<3x2x4xf32>
    %joined = stablehlo.reshape %whole : (tensor<3x2x4xf32>) -> tensor<6x4xf32>
    sdy.return %joined : tensor<6x4xf32>
  } : (tensor<2x4x4xf32>, tensor<12x4xf32>) -> tensor<12x4xf32>
  return %0 : tensor<12x4xf32>
}
}
