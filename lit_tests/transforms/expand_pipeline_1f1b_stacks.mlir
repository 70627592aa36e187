// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=4 schedule=1f1b}' | filecheck %s
// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=4 schedule=1f1b explain}' 2>&1 >/dev/null | filecheck %s --check-prefix=TOLD

// Two stacks of layers, one behind the other, are one loop of ticks: each stack's layers forward and
// backward, with the sine between the two, and its derivative, on the rank that begins the second.
// Activations of both go round one ring each way. A rank keeps what four microbatches leave of the
// first stack, and two of the second.
// CHECK-LABEL: func.func @main
// CHECK: sdy.manual_computation
// CHECK-NOT: sdy.manual_computation
// CHECK: stablehlo.while({{.+}}tensor<4x2x1x1x3xf32>, tensor<2x1x1x1x3xf32>
// CHECK: %[[FIRST:[^ :]+]]:3 = stablehlo.while({{.+}}) : tensor<i32>, tensor<1x3xf32>, tensor<4x2x1x1x3xf32>
// CHECK: %[[JOIN:[^ :]+]]:2 = "stablehlo.if"(%[[BEGINS:[^ :]+]])
// CHECK: stablehlo.sine
// CHECK: stablehlo.cosine
// CHECK: stablehlo.select %[[BEGINS]], %[[JOIN]]#1
// CHECK: %[[START:[^ :]+]] = stablehlo.select %{{.+}}, %{{.+}}, %[[JOIN]]#0
// CHECK: %[[SECOND:[^ :]+]]:3 = stablehlo.while({{.+}} = %[[START]], {{.+}}) : tensor<i32>, tensor<1x3xf32>, tensor<2x1x1x1x3xf32>
// CHECK: "stablehlo.if"
// CHECK: stablehlo.reduce
// CHECK: %[[BACK:[^ :]+]]:3 = stablehlo.while
// CHECK: stablehlo.dynamic_slice %[[SECOND]]#2
// CHECK: stablehlo.while
// CHECK: stablehlo.dynamic_slice %[[FIRST]]#2
// CHECK: %[[STEEP:[^ :]+]] = "stablehlo.if"(%[[ENDS:[^ :]+]])
// CHECK: stablehlo.multiply %[[BACK]]#1
// CHECK: %[[AHEAD:[^ :]+]] = stablehlo.select %{{.+}}, %[[SECOND]]#1, %[[FIRST]]#1
// CHECK: "stablehlo.collective_permute"(%[[AHEAD]])
// CHECK: %[[BEHIND:[^ :]+]] = stablehlo.select %[[ENDS]], %[[STEEP]]
// CHECK: "stablehlo.collective_permute"(%[[BEHIND]])
// CHECK-NOT: stablehlo.collective_permute
// CHECK: sdy.return

// TOLD: note: expand-pipeline: interleaved-1f1b: 4 iterations on 2 ranks, 1 chunks of 2 on each and 2 iterations on 2 ranks, 1 chunks of 1 on each; 4 microbatches in 18 ticks, 32 chunks run, 0.889 a rank and tick; 4 and 2 chunks' activations kept on a rank
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @main(%a: tensor<4x3x3xf32>, %b: tensor<2x3x3xf32>, %x: tensor<4x3xf32>) -> (tensor<f32>, tensor<4x3x3xf32>, tensor<2x3x3xf32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %nothing = stablehlo.constant dense<0.0> : tensor<f32>
    %two = stablehlo.constant dense<2.0> : tensor<4x3xf32>
    %layers_4 = stablehlo.constant dense<4> : tensor<i32>
    %last_4 = stablehlo.constant dense<3> : tensor<i32>
    %no_kept_4 = stablehlo.constant dense<0.0> : tensor<4x4x3xf32>
    %no_gradient_4 = stablehlo.constant dense<0.0> : tensor<4x3x3xf32>
    %layers_2 = stablehlo.constant dense<2> : tensor<i32>
    %last_2 = stablehlo.constant dense<1> : tensor<i32>
    %no_kept_2 = stablehlo.constant dense<0.0> : tensor<2x4x3xf32>
    %no_gradient_2 = stablehlo.constant dense<0.0> : tensor<2x3x3xf32>
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
    %bent = stablehlo.sine %first#3 : tensor<4x3xf32>
    %second:4 = stablehlo.while(%i = %zero, %ws = %b, %kept = %no_kept_2, %h = %bent) : tensor<i32>, tensor<2x3x3xf32>, tensor<2x4x3xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers_2 : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %slice = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<2x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %weight = stablehlo.reshape %slice : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %2 = stablehlo.reshape %h : (tensor<4x3xf32>) -> tensor<1x4x3xf32>
      %3 = stablehlo.dynamic_update_slice %kept, %2, %i, %zero, %zero : (tensor<2x4x3xf32>, tensor<1x4x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<2x4x3xf32>
      %4 = stablehlo.dot_general %h, %weight, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %5 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %5, %ws, %3, %4 : tensor<i32>, tensor<2x3x3xf32>, tensor<2x4x3xf32>, tensor<4x3xf32>
    }
    %square = stablehlo.multiply %second#3, %second#3 : tensor<4x3xf32>
    %loss = stablehlo.reduce(%square init: %nothing) applies stablehlo.add across dimensions = [0, 1] : (tensor<4x3xf32>, tensor<f32>) -> tensor<f32>
    %slope = stablehlo.multiply %second#3, %two : tensor<4x3xf32>
    %second_back:5 = stablehlo.while(%i = %zero, %ws = %b, %kept = %second#2, %g = %slope, %gradient = %no_gradient_2) : tensor<i32>, tensor<2x3x3xf32>, tensor<2x4x3xf32>, tensor<4x3xf32>, tensor<2x3x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers_2 : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %place = stablehlo.subtract %last_2, %i : tensor<i32>
      %slice = stablehlo.dynamic_slice %ws, %place, %zero, %zero, sizes = [1, 3, 3] : (tensor<2x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %weight = stablehlo.reshape %slice : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %2 = stablehlo.dynamic_slice %kept, %place, %zero, %zero, sizes = [1, 4, 3] : (tensor<2x4x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x3xf32>
      %3 = stablehlo.reshape %2 : (tensor<1x4x3xf32>) -> tensor<4x3xf32>
      %4 = stablehlo.dot_general %3, %g, contracting_dims = [0] x [0] : (tensor<4x3xf32>, tensor<4x3xf32>) -> tensor<3x3xf32>
      %5 = stablehlo.reshape %4 : (tensor<3x3xf32>) -> tensor<1x3x3xf32>
      %6 = stablehlo.dynamic_update_slice %gradient, %5, %place, %zero, %zero : (tensor<2x3x3xf32>, tensor<1x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<2x3x3xf32>
      %7 = stablehlo.dot_general %g, %weight, contracting_dims = [1] x [1] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %8 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %8, %ws, %kept, %7, %6 : tensor<i32>, tensor<2x3x3xf32>, tensor<2x4x3xf32>, tensor<4x3xf32>, tensor<2x3x3xf32>
    }
    %steep = stablehlo.cosine %first#3 : tensor<4x3xf32>
    %cotangent = stablehlo.multiply %second_back#3, %steep : tensor<4x3xf32>
    %first_back:5 = stablehlo.while(%i = %zero, %ws = %a, %kept = %first#2, %g = %cotangent, %gradient = %no_gradient_4) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x3xf32>, tensor<4x3xf32>, tensor<4x3x3xf32>
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
    return %loss, %first_back#4, %second_back#4 : tensor<f32>, tensor<4x3x3xf32>, tensor<2x3x3xf32>
  }
}
