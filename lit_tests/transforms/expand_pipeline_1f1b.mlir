// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=4 schedule=1f1b}' | filecheck %s
// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=4 schedule=1f1b explain=true}' 2>&1 >/dev/null | filecheck %s --check-prefix=TOLD
// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=4 schedule=1f1b repeats=2 explain=true}' 2>&1 >/dev/null | filecheck %s --check-prefix=INTERLEAVED
// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=4 schedule=1f1b skip=false explain=true}' 2>&1 >/dev/null | filecheck %s --check-prefix=TOGETHER

// Forward and backward are one loop of ticks: a forward chunk, the loss of a microbatch that has
// passed the last rank, a backward chunk, and a permute each way. What a forward leaves is kept for
// two microbatches, as many as there are ranks, and not for four.
// CHECK-LABEL: func.func @main
// CHECK: sdy.manual_computation
// CHECK-NOT: sdy.manual_computation
// CHECK: %[[TICKS:[^ :]+]]:{{[0-9]+}} = stablehlo.while(%{{.+}}tensor<2x2x1x1x3xf32>
// CHECK: %[[AHEAD:[^ :]+]]:3 = stablehlo.while(%[[LAYER:[^ :]+]] = {{.+}}, %{{.+}} = {{.+}}, %[[KEPT:[^ :]+]] = {{.+}}) : tensor<i32>, tensor<1x3xf32>, tensor<2x2x1x1x3xf32>
// CHECK: stablehlo.compare LT, %[[LAYER]], %{{[0-9]+}} :
// CHECK: stablehlo.dynamic_update_slice %[[KEPT]], %{{.+}}, %{{.+}}, %[[LAYER]]
// CHECK: %[[HEAD:[^ :]+]]:2 = "stablehlo.if"
// CHECK: stablehlo.multiply
// CHECK: stablehlo.reduce
// CHECK: stablehlo.while
// CHECK: stablehlo.dynamic_slice %[[AHEAD]]#2
// CHECK: stablehlo.dot_general {{.+}}contracting_dims = [0] x [0]
// CHECK: "stablehlo.collective_permute"(%[[AHEAD]]#1)
// CHECK: stablehlo.collective_permute
// CHECK: "stablehlo.all_reduce"(%[[TICKS]]#{{[0-9]+}})
// CHECK: (tensor<f32>) -> tensor<f32>
// CHECK: sdy.return

// TOLD: note: expand-pipeline: 1f1b: 4 iterations on 2 ranks, 1 chunks of 2 on each; 4 microbatches in 10 ticks, 16 chunks run, 0.800 a rank and tick; 2 chunks' activations kept on a rank
// INTERLEAVED: note: expand-pipeline: interleaved-1f1b: 4 iterations on 2 ranks, 2 chunks of 1 on each; 4 microbatches in 18 ticks

// Without skip a tick computes a forward and a backward wherever there is work for one, so that
// they share ticks.
// TOGETHER: note: expand-pipeline: eager-1f1b: 4 iterations on 2 ranks, 1 chunks of 2 on each; 4 microbatches in 6 ticks
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @main(%w: tensor<4x3x3xf32>, %x: tensor<4x3xf32>) -> (tensor<f32>, tensor<4x3x3xf32>) {
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
