// RUN: stablehlo-tools opt %s -p fold-pipeline --split-input-file --verify-diagnostics

// P1: no op does more than compute.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["stage"=2]>
func.func @effect_p1(%w: tensor<2x4x4xf32>, %x: tensor<3x2x4xf32>) -> tensor<3x2x4xf32> {
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
      // expected-error@+1 {{fold-pipeline: stablehlo.custom_call in a pipeline has a side effect, and also runs in ticks whose results are unused (P1)}}
      %y = stablehlo.custom_call @shown(%h) {has_side_effect = true} : (tensor<2x4xf32>) -> tensor<2x4xf32>
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

// P1: there is no token either.
func.func @token_p1(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error@+1 {{stablehlo.after_all has a token, and tokens fix an order that fold-pipeline changes: run fold-pipeline before thread-tokens, or strip-tokens first (P1)}}
  %t = stablehlo.after_all : !stablehlo.token
  return %x : tensor<4xf32>
}

// -----

// P2: it is known how often the loop runs.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["stage"=2]>
func.func @bound_p2(%w: tensor<2x4x4xf32>, %x: tensor<3x2x4xf32>, %n: tensor<i32>) -> tensor<3x2x4xf32> {
  %0 = sdy.manual_computation(%w, %x, %n) in_shardings=[<@mesh, [{"stage"}, {}, {}]>, <@mesh, [{}, {}, {}]>, <@mesh, []>] out_shardings=[<@mesh, [{}, {}, {}]>] manual_axes={"stage"} (%own: tensor<1x4x4xf32>, %batch: tensor<3x2x4xf32>, %until: tensor<i32>) {
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
    // expected-error@+1 {{fold-pipeline: the number of iterations of the loop is unknown: the bound of its counter is not known before the run (P2)}}
    %ran:4 = stablehlo.while(%own_ = %own, %t = %zero, %arriving = %unset, %outputs = %none) : tensor<1x4x4xf32>, tensor<i32>, tensor<2x4xf32>, tensor<3x2x4xf32>
    cond {
      %more = stablehlo.compare LT, %t, %until : (tensor<i32>, tensor<i32>) -> tensor<i1>
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
  } : (tensor<2x4x4xf32>, tensor<3x2x4xf32>, tensor<i32>) -> tensor<3x2x4xf32>
  return %0 : tensor<3x2x4xf32>
}
}

// -----

// P3: a stage takes nothing from others in the midst of a tick.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["stage"=2]>
func.func @joined_p3(%w: tensor<2x4x4xf32>, %x: tensor<3x2x4xf32>) -> tensor<3x2x4xf32> {
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
      // expected-error@+1 {{fold-pipeline: it combines values of several ranks by another reduction than a sum (P3)}}
      %most = "stablehlo.all_reduce"(%h) ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %c = stablehlo.maximum %a, %b : tensor<f32>
        stablehlo.return %c : tensor<f32>
      }) {channel_handle = #stablehlo.channel_handle<handle = 3, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids} : (tensor<2x4xf32>) -> tensor<2x4xf32>
      %y = stablehlo.tanh %most : tensor<2x4xf32>
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

// P3: the same where all stages are in one program.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["stage"=2]>
func.func @summed_p3(%w: tensor<2x4x4xf32>, %x: tensor<3x2x4xf32>) -> tensor<3x2x4xf32> {
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
    %nought = stablehlo.constant dense<0.0> : tensor<f32>
    // expected-error@+1 {{fold-pipeline: stablehlo.reduce combines the states of several stages; each stage of a pipeline must compute with its own state only, as under jax.vmap (P3)}}
    %total = stablehlo.reduce(%h init: %nought) applies stablehlo.add across dimensions = [0] : (tensor<2x2x4xf32>, tensor<f32>) -> tensor<2x4xf32>
    %all = stablehlo.broadcast_in_dim %total, dims = [1, 2] : (tensor<2x4xf32>) -> tensor<2x2x4xf32>
    %y = stablehlo.add %h, %all : tensor<2x2x4xf32>
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

// P4: only the last stage's outputs leave; here the first one's garbage does too.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["stage"=2]>
func.func @unmasked_p4(%w: tensor<2x4x4xf32>, %x: tensor<3x2x4xf32>) -> tensor<3x2x4xf32> {
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
    %kept = stablehlo.reshape %ran#3 : (tensor<3x2x4xf32>) -> tensor<3x2x4xf32>
    // expected-error@+1 {{fold-pipeline: it adds values of several ranks: mask with jnp.where, as zero times NaN is NaN (P4)}}
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

// P5: a stage has the same weights for every microbatch.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["stage"=2]>
func.func @weights_p5(%w: tensor<4x4x4xf32>, %x: tensor<3x2x4xf32>) -> tensor<3x2x4xf32> {
  %0 = sdy.manual_computation(%w, %x) in_shardings=[<@mesh, [{}, {}, {}]>, <@mesh, [{}, {}, {}]>] out_shardings=[<@mesh, [{}, {}, {}]>] manual_axes={"stage"} (%own: tensor<4x4x4xf32>, %batch: tensor<3x2x4xf32>) {
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
    %ran:4 = stablehlo.while(%own_ = %own, %t = %zero, %arriving = %unset, %outputs = %none) : tensor<4x4x4xf32>, tensor<i32>, tensor<2x4xf32>, tensor<3x2x4xf32>
    cond {
      %more = stablehlo.compare LT, %t, %ticks : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    } do {
      %index = stablehlo.minimum %t, %two : tensor<i32>
      %fed = stablehlo.dynamic_slice %batch, %index, %zero, %zero, sizes = [1, 2, 4] : (tensor<3x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
      %sample = stablehlo.reshape %fed : (tensor<1x2x4xf32>) -> tensor<2x4xf32>
      %entered = stablehlo.select %first, %sample, %arriving : tensor<i1>, tensor<2x4xf32>
      %taken = stablehlo.dynamic_slice %own_, %t, %zero, %zero, sizes = [1, 4, 4] : (tensor<4x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
      %layer = stablehlo.reshape %taken : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
      %h = stablehlo.dot_general %entered, %layer, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
      // expected-error@+1 {{fold-pipeline: an operand of a stage depends on both the stage and the microbatch: the stages are not layers of one loop (P5)}}
      %y = stablehlo.tanh %h : tensor<2x4xf32>
      %place = stablehlo.subtract %t, %one : tensor<i32>
      %row = stablehlo.reshape %y : (tensor<2x4xf32>) -> tensor<1x2x4xf32>
      %written = stablehlo.dynamic_update_slice %outputs, %row, %place, %zero, %zero : (tensor<3x2x4xf32>, tensor<1x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x2x4xf32>
      %sent = "stablehlo.collective_permute"(%y) {
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
      } : (tensor<2x4xf32>) -> tensor<2x4xf32>
      %next = stablehlo.add %t, %one : tensor<i32>
      stablehlo.return %own_, %next, %sent, %written : tensor<4x4x4xf32>, tensor<i32>, tensor<2x4xf32>, tensor<3x2x4xf32>
    }
    %kept = stablehlo.select %last, %ran#3, %none : tensor<i1>, tensor<3x2x4xf32>
    %whole = "stablehlo.all_reduce"(%kept) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) {channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids} : (tensor<3x2x4xf32>) -> tensor<3x2x4xf32>
    sdy.return %whole : tensor<3x2x4xf32>
  } : (tensor<4x4x4xf32>, tensor<3x2x4xf32>) -> tensor<3x2x4xf32>
  return %0 : tensor<3x2x4xf32>
}
}

// -----

// P6: a backward takes from each stage what it left, not sums of what the last one computed.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["stage"=2]>
func.func @trained_p6(%w: tensor<2x4x4xf32>, %x: tensor<3x2x4xf32>) -> (tensor<3x2x4xf32>, tensor<2x4xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %two = stablehlo.constant dense<2> : tensor<i32>
  %ticks = stablehlo.constant dense<4> : tensor<i32>
  %unset = stablehlo.constant dense<0.0> : tensor<2x2x4xf32>
  %empty = stablehlo.constant dense<0.0> : tensor<4x2x2x4xf32>
  %none = stablehlo.constant dense<0.0> : tensor<3x2x4xf32>
  // expected-note@+1 {{the pipeline is here}}
  %ran:4 = stablehlo.while(%t = %zero, %state = %unset, %outputs = %none, %stack = %empty) : tensor<i32>, tensor<2x2x4xf32>, tensor<3x2x4xf32>, tensor<4x2x2x4xf32>
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
    %residual = stablehlo.reshape %y : (tensor<2x2x4xf32>) -> tensor<1x2x2x4xf32>
    %stacked = stablehlo.dynamic_update_slice %stack, %residual, %t, %zero, %zero, %zero : (tensor<4x2x2x4xf32>, tensor<1x2x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x2x2x4xf32>
    stablehlo.return %next, %y, %written, %stacked : tensor<i32>, tensor<2x2x4xf32>, tensor<3x2x4xf32>, tensor<4x2x2x4xf32>
  }
  %start = stablehlo.constant dense<3> : tensor<i32>
  %gradient = stablehlo.constant dense<0.0> : tensor<2x4xf32>
  // expected-note@+1 {{its backward}}
  %back:3 = stablehlo.while(%t = %start, %residuals = %ran#3, %sum = %gradient) : tensor<i32>, tensor<4x2x2x4xf32>, tensor<2x4xf32>
  cond {
    %more = stablehlo.compare GE, %t, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %taken = stablehlo.dynamic_slice %residuals, %t, %one, %zero, %zero, sizes = [1, 1, 2, 4] : (tensor<4x2x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x1x2x4xf32>
    // expected-error@+1 {{fold-pipeline: a pipeline and its backward are not understood: no stage reads the result of another one (P6); fold the forward program before it is differentiated}}
    %own = stablehlo.reshape %taken : (tensor<1x1x2x4xf32>) -> tensor<2x4xf32>
    %added = stablehlo.add %sum, %own : tensor<2x4xf32>
    %next = stablehlo.subtract %t, %one : tensor<i32>
    stablehlo.return %next, %residuals, %added : tensor<i32>, tensor<4x2x2x4xf32>, tensor<2x4xf32>
  }
  return %ran#2, %back#2 : tensor<3x2x4xf32>, tensor<2x4xf32>
}
}
