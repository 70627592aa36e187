// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=2 schedule=1f1b}' --split-input-file --verify-diagnostics
// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=2}' --split-input-file -o /dev/null

// P7: there is a backward loop. Two pipelines can be had of all of these.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @forward_only_p7(%w: tensor<4x3x3xf32>, %x: tensor<4x3xf32>) -> tensor<4x3xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
    // expected-error@+1 {{schedule=1f1b needs a backward loop for each forward loop over layers, but no loop reads residuals that another one writes (P7); use schedule=gpipe or schedule=circular, which run each loop separately}}
    %loop:3 = stablehlo.while(%i = %zero, %ws = %w, %h = %x) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %1 = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %3 = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %out = stablehlo.tanh %3 : tensor<4x3xf32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %ws, %out : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    }
    return %loop#2 : tensor<4x3xf32>
  }
}

// -----

// The loss of a microbatch does not hang on other microbatches.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @whole_loss_p7(%w: tensor<4x3x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"stage"}, {}, {}]>}, %x: tensor<4x3xf32>) -> (tensor<f32>, tensor<4x3x3xf32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %last = stablehlo.constant dense<3> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
    %nothing = stablehlo.constant dense<0.0> : tensor<f32>
    %two = stablehlo.constant dense<2.0> : tensor<4x3xf32>
    %no_kept = stablehlo.constant dense<0.0> : tensor<4x4x3xf32>
    %no_gradient = stablehlo.constant dense<0.0> : tensor<4x3x3xf32>
    %forward:4 = stablehlo.while(%i = %zero, %ws = %w, %kept = %no_kept, %h = %x) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x3xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %slice = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %weight = stablehlo.reshape %slice : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %2 = stablehlo.reshape %h : (tensor<4x3xf32>) -> tensor<1x4x3xf32>
      %3 = stablehlo.dynamic_update_slice %kept, %2, %i, %zero, %zero : (tensor<4x4x3xf32>, tensor<1x4x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x4x3xf32>
      %4 = stablehlo.dot_general %h, %weight, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %5 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %5, %ws, %3, %4 : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x3xf32>, tensor<4x3xf32>
    }
    // expected-error@+1 {{stablehlo.reduce combines all samples of the batch, and the backward loop depends on its result: the loss is not a sum over microbatches, so no backward can begin before all forwards are done (P7); use schedule=gpipe or schedule=circular}}
    %loss = stablehlo.reduce(%forward#3 init: %nothing) applies stablehlo.add across dimensions = [0, 1] : (tensor<4x3xf32>, tensor<f32>) -> tensor<f32>
    %all = stablehlo.broadcast_in_dim %loss, dims = [] : (tensor<f32>) -> tensor<4x3xf32>
    %slope = stablehlo.multiply %forward#3, %all : tensor<4x3xf32>
    // expected-note@+1 {{the backward loop}}
    %backward:5 = stablehlo.while(%i = %zero, %ws = %w, %kept = %forward#2, %g = %slope, %gradient = %no_gradient) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x3xf32>, tensor<4x3xf32>, tensor<4x3x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %place = stablehlo.subtract %last, %i : tensor<i32>
      %slice = stablehlo.dynamic_slice %ws, %place, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %weight = stablehlo.reshape %slice : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %2 = stablehlo.dynamic_slice %kept, %place, %zero, %zero, sizes = [1, 4, 3] : (tensor<4x4x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x3xf32>
      %3 = stablehlo.reshape %2 : (tensor<1x4x3xf32>) -> tensor<4x3xf32>
      %4 = stablehlo.dot_general %3, %g, contracting_dims = [0] x [0] : (tensor<4x3xf32>, tensor<4x3xf32>) -> tensor<3x3xf32>
      %5 = stablehlo.reshape %4 : (tensor<3x3xf32>) -> tensor<1x3x3xf32>
      %6 = stablehlo.dynamic_update_slice %gradient, %5, %place, %zero, %zero : (tensor<4x3x3xf32>, tensor<1x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x3x3xf32>
      %7 = stablehlo.dot_general %g, %weight, contracting_dims = [1] x [1] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %8 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %8, %ws, %kept, %7, %6 : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x3xf32>, tensor<4x3xf32>, tensor<4x3x3xf32>
    }
    return %loss, %backward#4 : tensor<f32>, tensor<4x3x3xf32>
  }
}

// -----

// Both loops go through the layers, one of them in reverse.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @one_direction_p7(%w: tensor<4x3x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"stage"}, {}, {}]>}, %x: tensor<4x3xf32>) -> (tensor<f32>, tensor<4x3x3xf32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %last = stablehlo.constant dense<3> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
    %nothing = stablehlo.constant dense<0.0> : tensor<f32>
    %two = stablehlo.constant dense<2.0> : tensor<4x3xf32>
    %no_kept = stablehlo.constant dense<0.0> : tensor<4x4x3xf32>
    %no_gradient = stablehlo.constant dense<0.0> : tensor<4x3x3xf32>
    %forward:4 = stablehlo.while(%i = %zero, %ws = %w, %kept = %no_kept, %h = %x) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x3xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %slice = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %weight = stablehlo.reshape %slice : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %2 = stablehlo.reshape %h : (tensor<4x3xf32>) -> tensor<1x4x3xf32>
      %3 = stablehlo.dynamic_update_slice %kept, %2, %i, %zero, %zero : (tensor<4x4x3xf32>, tensor<1x4x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x4x3xf32>
      %4 = stablehlo.dot_general %h, %weight, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %5 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %5, %ws, %3, %4 : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x3xf32>, tensor<4x3xf32>
    }
    %square = stablehlo.multiply %forward#3, %forward#3 : tensor<4x3xf32>
    %loss = stablehlo.reduce(%square init: %nothing) applies stablehlo.add across dimensions = [0, 1] : (tensor<4x3xf32>, tensor<f32>) -> tensor<f32>
    %slope = stablehlo.multiply %forward#3, %two : tensor<4x3xf32>
    // expected-error@+1 {{both loops of a pair run in the same direction (P7)}}
    %backward:5 = stablehlo.while(%i = %zero, %ws = %w, %kept = %forward#2, %g = %slope, %gradient = %no_gradient) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x3xf32>, tensor<4x3xf32>, tensor<4x3x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %place = stablehlo.add %zero, %i : tensor<i32>
      %slice = stablehlo.dynamic_slice %ws, %place, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %weight = stablehlo.reshape %slice : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %2 = stablehlo.dynamic_slice %kept, %place, %zero, %zero, sizes = [1, 4, 3] : (tensor<4x4x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x3xf32>
      %3 = stablehlo.reshape %2 : (tensor<1x4x3xf32>) -> tensor<4x3xf32>
      %4 = stablehlo.dot_general %3, %g, contracting_dims = [0] x [0] : (tensor<4x3xf32>, tensor<4x3xf32>) -> tensor<3x3xf32>
      %5 = stablehlo.reshape %4 : (tensor<3x3xf32>) -> tensor<1x3x3xf32>
      %6 = stablehlo.dynamic_update_slice %gradient, %5, %place, %zero, %zero : (tensor<4x3x3xf32>, tensor<1x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x3x3xf32>
      %7 = stablehlo.dot_general %g, %weight, contracting_dims = [1] x [1] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %8 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %8, %ws, %kept, %7, %6 : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x3xf32>, tensor<4x3xf32>, tensor<4x3x3xf32>
    }
    return %loss, %backward#4 : tensor<f32>, tensor<4x3x3xf32>
  }
}

// -----

// Backward loops run in the reverse order of the forward ones.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @same_order_p7(%a: tensor<4x3x3xf32>, %b: tensor<4x3x3xf32>, %x: tensor<4x3xf32>) -> (tensor<4x3x3xf32>, tensor<4x3x3xf32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %nothing = stablehlo.constant dense<0.0> : tensor<f32>
    %two = stablehlo.constant dense<2.0> : tensor<4x3xf32>
    %layers_4 = stablehlo.constant dense<4> : tensor<i32>
    %last_4 = stablehlo.constant dense<3> : tensor<i32>
    %no_kept_4 = stablehlo.constant dense<0.0> : tensor<4x4x3xf32>
    %no_gradient_4 = stablehlo.constant dense<0.0> : tensor<4x3x3xf32>
    %first:4 = stablehlo.while(%i = %zero, %ws = %a, %kept = %no_kept_4, %h = %x) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x3xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers_4 : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %slice = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %weight = stablehlo.reshape %slice : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %2 = stablehlo.reshape %h : (tensor<4x3xf32>) -> tensor<1x4x3xf32>
      %3 = stablehlo.dynamic_update_slice %kept, %2, %i, %zero, %zero : (tensor<4x4x3xf32>, tensor<1x4x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x4x3xf32>
      %4 = stablehlo.dot_general %h, %weight, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %5 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %5, %ws, %3, %4 : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x3xf32>, tensor<4x3xf32>
    }
    %second:4 = stablehlo.while(%i = %zero, %ws = %b, %kept = %no_kept_4, %h = %x) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x3xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers_4 : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %slice = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %weight = stablehlo.reshape %slice : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %2 = stablehlo.reshape %h : (tensor<4x3xf32>) -> tensor<1x4x3xf32>
      %3 = stablehlo.dynamic_update_slice %kept, %2, %i, %zero, %zero : (tensor<4x4x3xf32>, tensor<1x4x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x4x3xf32>
      %4 = stablehlo.dot_general %h, %weight, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %5 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %5, %ws, %3, %4 : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x3xf32>, tensor<4x3xf32>
    }
    %both = stablehlo.add %first#3, %second#3 : tensor<4x3xf32>
    %slope = stablehlo.multiply %both, %two : tensor<4x3xf32>
    %first_back:5 = stablehlo.while(%i = %zero, %ws = %a, %kept = %first#2, %g = %slope, %gradient = %no_gradient_4) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x3xf32>, tensor<4x3xf32>, tensor<4x3x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers_4 : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %place = stablehlo.subtract %last_4, %i : tensor<i32>
      %slice = stablehlo.dynamic_slice %ws, %place, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %weight = stablehlo.reshape %slice : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %2 = stablehlo.dynamic_slice %kept, %place, %zero, %zero, sizes = [1, 4, 3] : (tensor<4x4x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x3xf32>
      %3 = stablehlo.reshape %2 : (tensor<1x4x3xf32>) -> tensor<4x3xf32>
      %4 = stablehlo.dot_general %3, %g, contracting_dims = [0] x [0] : (tensor<4x3xf32>, tensor<4x3xf32>) -> tensor<3x3xf32>
      %5 = stablehlo.reshape %4 : (tensor<3x3xf32>) -> tensor<1x3x3xf32>
      %6 = stablehlo.dynamic_update_slice %gradient, %5, %place, %zero, %zero : (tensor<4x3x3xf32>, tensor<1x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x3x3xf32>
      %7 = stablehlo.dot_general %g, %weight, contracting_dims = [1] x [1] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %8 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %8, %ws, %kept, %7, %6 : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x3xf32>, tensor<4x3xf32>, tensor<4x3x3xf32>
    }
    // expected-error@+1 {{the 2 pairs of loops are not nested in each other (P7)}}
    %second_back:5 = stablehlo.while(%i = %zero, %ws = %b, %kept = %second#2, %g = %slope, %gradient = %no_gradient_4) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x3xf32>, tensor<4x3xf32>, tensor<4x3x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers_4 : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %place = stablehlo.subtract %last_4, %i : tensor<i32>
      %slice = stablehlo.dynamic_slice %ws, %place, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %weight = stablehlo.reshape %slice : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %2 = stablehlo.dynamic_slice %kept, %place, %zero, %zero, sizes = [1, 4, 3] : (tensor<4x4x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x3xf32>
      %3 = stablehlo.reshape %2 : (tensor<1x4x3xf32>) -> tensor<4x3xf32>
      %4 = stablehlo.dot_general %3, %g, contracting_dims = [0] x [0] : (tensor<4x3xf32>, tensor<4x3xf32>) -> tensor<3x3xf32>
      %5 = stablehlo.reshape %4 : (tensor<3x3xf32>) -> tensor<1x3x3xf32>
      %6 = stablehlo.dynamic_update_slice %gradient, %5, %place, %zero, %zero : (tensor<4x3x3xf32>, tensor<1x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x3x3xf32>
      %7 = stablehlo.dot_general %g, %weight, contracting_dims = [1] x [1] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %8 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %8, %ws, %kept, %7, %6 : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x3xf32>, tensor<4x3xf32>, tensor<4x3x3xf32>
    }
    return %first_back#4, %second_back#4 : tensor<4x3x3xf32>, tensor<4x3x3xf32>
  }
}
