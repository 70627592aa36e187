// RUN: stablehlo-tools opt %s -p fold-pipeline 2>%t.warnings | filecheck %s
// RUN: filecheck %s --check-prefix=WARNED --input-file %t.warnings
// WARNED: warning: fold-pipeline: nothing is folded: no loop sends its results to the next device by collective_permute

// The loop of a pipeline, with a bound of 0 ticks: it hands nothing on, and stays as it is.
// CHECK-LABEL: func.func @never_runs
// CHECK: %[[TICKS:.+]] = stablehlo.constant dense<0> : tensor<i32>
// CHECK: stablehlo.while
// CHECK: "stablehlo.collective_permute"
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["stage"=2]>
func.func @never_runs(%w: tensor<2x4x4xf32>, %x: tensor<3x2x4xf32>) -> tensor<3x2x4xf32> {
  %0 = sdy.manual_computation(%w, %x) in_shardings=[<@mesh, [{"stage"}, {}, {}]>, <@mesh, [{}, {}, {}]>] out_shardings=[<@mesh, [{}, {}, {}]>] manual_axes={"stage"} (%own: tensor<1x4x4xf32>, %batch: tensor<3x2x4xf32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %two = stablehlo.constant dense<2> : tensor<i32>
    %ticks = stablehlo.constant dense<0> : tensor<i32>
    %unset = stablehlo.constant dense<0.0> : tensor<2x4xf32>
    %none = stablehlo.constant dense<0.0> : tensor<3x2x4xf32>
    %id = stablehlo.partition_id : tensor<ui32>
    %rank = stablehlo.convert %id : (tensor<ui32>) -> tensor<i32>
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
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
      } : (tensor<2x4xf32>) -> tensor<2x4xf32>
      %next = stablehlo.add %t, %one : tensor<i32>
      stablehlo.return %own_, %next, %sent, %written : tensor<1x4x4xf32>, tensor<i32>, tensor<2x4xf32>, tensor<3x2x4xf32>
    }
    %kept = stablehlo.select %last, %ran#3, %none : tensor<i1>, tensor<3x2x4xf32>
    %whole = "stablehlo.all_reduce"(%kept) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) {channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids} : (tensor<3x2x4xf32>) -> tensor<3x2x4xf32>
    sdy.return %whole : tensor<3x2x4xf32>
  } : (tensor<2x4x4xf32>, tensor<3x2x4xf32>) -> tensor<3x2x4xf32>
  return %0 : tensor<3x2x4xf32>
}
}
