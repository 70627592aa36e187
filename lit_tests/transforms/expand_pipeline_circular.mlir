// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=2 repeats=2 schedule=circular skip=true}' --split-input-file | filecheck %s
// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=2 repeats=2 schedule=circular explain=true}' --split-input-file 2>&1 | filecheck %s --check-prefix=TOLD

// Four chunks of one layer lie on two ranks, and every microbatch passes each rank twice, so that
// there are as many ticks as chunks and microbatches, and one more. A rank without work runs no
// layer, as the limit of its loop comes from the table.
// TOLD: note: expand-pipeline: circular-forward: 4 iterations on 2 ranks, 2 chunks of 1 on each; 2 microbatches in 5 ticks, 8 chunks run, 0.800 a rank and tick
// CHECK-LABEL: func.func @forward
// CHECK: stablehlo.constant {{.+}} : tensor<2x5x{{[0-9]+}}xi32>
// CHECK: stablehlo.reshape {{.+}} -> tensor<2x2x1x1x3x3xf32>
// CHECK: sdy.manual_computation
// CHECK-SAME: tensor<2x1x1x1x3x3xf32>
// CHECK: stablehlo.constant dense<5> : tensor<i32>
// CHECK: stablehlo.while(%[[LAYER:[^ :]+]] = %{{[^ ]+}}, %{{[^ ]+}} = %{{[^ ]+}}) : tensor<i32>, tensor<2x3xf32>
// CHECK: stablehlo.compare LT, %[[LAYER]], %{{[0-9]+}} :
// CHECK: stablehlo.collective_permute
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @forward(%w: tensor<4x3x3xf32>, %x: tensor<4x3xf32>) -> tensor<4x3xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
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

// The chunks of a backward are visited from the last to the first.
// TOLD: note: expand-pipeline: circular-forward: 4 iterations on 2 ranks
// TOLD: note: expand-pipeline: circular-backward: 4 iterations on 2 ranks
// CHECK-LABEL: func.func @step
// CHECK: sdy.manual_computation
// CHECK: stablehlo.constant dense<5> : tensor<i32>
// CHECK: stablehlo.collective_permute
// CHECK: sdy.manual_computation
// CHECK: stablehlo.constant dense<5> : tensor<i32>
// CHECK: stablehlo.collective_permute
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @step(%w: tensor<4x3x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"stage"}, {}, {}]>}, %x: tensor<4x3xf32>) -> (tensor<f32>, tensor<4x3x3xf32>) {
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
