// RUN: stablehlo-tools opt %s -p fold-pipeline --split-input-file | filecheck %s
// RUN: stablehlo-tools opt %s -p 'fold-pipeline{explain}' --split-input-file -o %t.mlir 2>&1 | filecheck %s --check-prefix=EXPLAIN
// EXPLAIN-COUNT-3: note: fold-pipeline: a pipeline of 2 stages

// A shift register between devices: the microbatches become one batch, the ranks a loop.
// CHECK-LABEL: func.func @shifted
// CHECK-SAME: (%[[W:.+]]: tensor<2x4x4xf32>, %[[X:.+]]: tensor<3x2x4xf32>)
// CHECK-NOT: sdy.manual_computation
// CHECK: %[[BATCH:.+]] = stablehlo.reshape %[[X]] : (tensor<3x2x4xf32>) -> tensor<6x4xf32>
// CHECK: %[[LOOP:.+]]:3 = stablehlo.while(%[[STACK:.+]] = %[[W]], %[[I:.+]] = %{{.+}}, %[[H:.+]] = %[[BATCH]])
// CHECK: %[[BOUND:.+]] = stablehlo.constant dense<2> : tensor<i32>
// CHECK: stablehlo.compare LT, %[[I]], %[[BOUND]]
// CHECK: %[[OWN:.+]] = stablehlo.dynamic_slice %[[STACK]], %[[I]],
// CHECK-SAME: sizes = [1, 4, 4]
// CHECK: %[[LAYER:.+]] = stablehlo.reshape %[[OWN]]
// CHECK: %[[DOT:.+]] = stablehlo.dot_general %[[H]], %[[LAYER]]
// CHECK-SAME: -> tensor<6x4xf32>
// CHECK: %[[Y:.+]] = stablehlo.tanh %[[DOT]] : tensor<6x4xf32>
// CHECK: stablehlo.return %[[STACK]], %{{.+}}, %[[Y]]
// CHECK: %[[OUT:.+]] = stablehlo.reshape %[[LOOP]]#2 : (tensor<6x4xf32>) -> tensor<3x2x4xf32>
// CHECK: return %[[OUT]]
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["stage"=2]>
func.func @shifted(%w: tensor<2x4x4xf32>, %x: tensor<3x2x4xf32>) -> tensor<3x2x4xf32> {
  %0 = sdy.manual_computation(%w, %x) in_shardings=[<@mesh, [{"stage"}, {}, {}]>, <@mesh, [{}, {}, {}]>] out_shardings=[<@mesh, [{}, {}, {}]>] manual_axes={"stage"} (%own: tensor<1x4x4xf32>, %batch: tensor<3x2x4xf32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %two = stablehlo.constant dense<2> : tensor<i32>
    %ticks = stablehlo.constant dense<4> : tensor<i32>
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

// -----

// All stages in one program, the state rolled along a dimension: that dimension goes.
// CHECK-LABEL: func.func @rolled
// CHECK-SAME: (%[[W:.+]]: tensor<2x4x4xf32>, %[[X:.+]]: tensor<3x2x4xf32>)
// CHECK: %[[BATCH:.+]] = stablehlo.reshape %[[X]] : (tensor<3x2x4xf32>) -> tensor<1x6x4xf32>
// CHECK: stablehlo.while(
// CHECK-NOT: stablehlo.concatenate
// CHECK: stablehlo.dot_general
// CHECK-SAME: (tensor<1x6x4xf32>, tensor<1x4x4xf32>) -> tensor<1x6x4xf32>
// CHECK: stablehlo.reshape %{{.+}} : (tensor<1x6x4xf32>) -> tensor<3x2x4xf32>
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["stage"=2]>
func.func @rolled(%w: tensor<2x4x4xf32>, %x: tensor<3x2x4xf32>) -> tensor<3x2x4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %two = stablehlo.constant dense<2> : tensor<i32>
  %ticks = stablehlo.constant dense<4> : tensor<i32>
  %unset = stablehlo.constant dense<0.0> : tensor<2x2x4xf32>
  %none = stablehlo.constant dense<0.0> : tensor<3x2x4xf32>
  %ran:3 = stablehlo.while(%t = %zero, %state = %unset, %outputs = %none) : tensor<i32>, tensor<2x2x4xf32>, tensor<3x2x4xf32>
  cond {
    %more = stablehlo.compare LT, %t, %ticks : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %index = stablehlo.minimum %t, %two : tensor<i32>
    %fed = stablehlo.dynamic_slice %x, %index, %zero, %zero, sizes = [1, 2, 4] : (tensor<3x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
    %before = stablehlo.slice %state [0:1, 0:2, 0:4] : (tensor<2x2x4xf32>) -> tensor<1x2x4xf32>
    %entered = stablehlo.concatenate %fed, %before, dim = 0 : (tensor<1x2x4xf32>, tensor<1x2x4xf32>) -> tensor<2x2x4xf32>
    %h = stablehlo.dot_general %entered, %w, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<2x2x4xf32>, tensor<2x4x4xf32>) -> tensor<2x2x4xf32>
    %y = stablehlo.tanh %h : tensor<2x2x4xf32>
    %row = stablehlo.slice %y [1:2, 0:2, 0:4] : (tensor<2x2x4xf32>) -> tensor<1x2x4xf32>
    %place = stablehlo.subtract %t, %one : tensor<i32>
    %written = stablehlo.dynamic_update_slice %outputs, %row, %place, %zero, %zero : (tensor<3x2x4xf32>, tensor<1x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x2x4xf32>
    %next = stablehlo.add %t, %one : tensor<i32>
    stablehlo.return %next, %y, %written : tensor<i32>, tensor<2x2x4xf32>, tensor<3x2x4xf32>
  }
  return %ran#2 : tensor<3x2x4xf32>
}
}

// -----

// A stage that takes the samples of a microbatch together: the microbatches follow each other.
// CHECK-LABEL: func.func @apart
// CHECK: stablehlo.while(
// CHECK: stablehlo.constant dense<3>
// CHECK: %[[OWN:.+]] = stablehlo.dynamic_slice
// CHECK-SAME: -> tensor<1x2x4xf32>
// CHECK: stablehlo.while(
// CHECK: stablehlo.constant dense<2>
// CHECK: stablehlo.reduce
// CHECK: stablehlo.dot_general
// CHECK-SAME: -> tensor<2x4xf32>
// CHECK: stablehlo.dynamic_update_slice
// CHECK-SAME: -> tensor<3x2x4xf32>
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["stage"=2]>
func.func @apart(%w: tensor<2x4x4xf32>, %x: tensor<3x2x4xf32>) -> tensor<3x2x4xf32> {
  %0 = sdy.manual_computation(%w, %x) in_shardings=[<@mesh, [{"stage"}, {}, {}]>, <@mesh, [{}, {}, {}]>] out_shardings=[<@mesh, [{}, {}, {}]>] manual_axes={"stage"} (%own: tensor<1x4x4xf32>, %batch: tensor<3x2x4xf32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %two = stablehlo.constant dense<2> : tensor<i32>
    %ticks = stablehlo.constant dense<4> : tensor<i32>
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
      %nought = stablehlo.constant dense<0.0> : tensor<f32>
      %total = stablehlo.reduce(%entered init: %nought) applies stablehlo.add across dimensions = [0] : (tensor<2x4xf32>, tensor<f32>) -> tensor<4xf32>
      %mean = stablehlo.broadcast_in_dim %total, dims = [1] : (tensor<4xf32>) -> tensor<2x4xf32>
      %centred = stablehlo.subtract %entered, %mean : tensor<2x4xf32>
      %y = stablehlo.dot_general %centred, %layer, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
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
