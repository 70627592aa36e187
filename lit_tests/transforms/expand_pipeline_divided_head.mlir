// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=2 schedule=1f1b head=divided}' | filecheck %s
// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=2 schedule=1f1b head=divided explain=true}' 2>&1 >/dev/null | filecheck %s --check-prefix=TOLD
// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=2 schedule=1f1b}' | filecheck %s --check-prefix=LAST
// RUN: not stablehlo-tools opt %s -p 'expand-pipeline{microbatches=2 head=last}' 2>&1 | filecheck %s --check-prefix=BEHIND

// Which microbatch is at the head in a tick is one row for all ranks, so that all come to its
// all_reduces. Each takes 2 of the 4 tokens of what the last rank has.
// CHECK-LABEL: func.func @main
// CHECK: sdy.manual_computation
// CHECK: %[[TABLE:.+]] = stablehlo.constant dense<[{{.*}}]> : tensor<6xi32>
// CHECK: %[[AT:.+]] = stablehlo.dynamic_slice %[[TABLE]], %{{.+}}, sizes = [1]
// CHECK: %[[NUMBER:.+]] = stablehlo.reshape %[[AT]]
// CHECK: %[[DUE:.+]] = stablehlo.compare GE, %[[NUMBER]], %{{.+}}
// CHECK: "stablehlo.if"(%{{.+}}) ({
// CHECK: stablehlo.select {{.+}} tensor<2x4x3xf32>
// CHECK: "stablehlo.all_reduce"
// CHECK: stablehlo.dynamic_slice {{.+}} sizes = [2, 1, 1, 2, 3] : (tensor<2x1x2x2x3xf32>
// CHECK: stablehlo.dot_general {{.+}} (tensor<2x2x3xf32>, tensor<3x6xf32>) -> tensor<2x2x6xf32>
// CHECK: stablehlo.dot_general {{.+}} (tensor<2x2x3xf32>, tensor<2x2x6xf32>) -> tensor<3x6xf32>
// CHECK: stablehlo.dynamic_update_slice {{.+}} (tensor<2x1x2x2x3xf32>, tensor<2x1x1x2x3xf32>
// CHECK: "stablehlo.all_reduce"
// CHECK: stablehlo_tools_mean_runs = "0.333333"

// TOLD: note: expand-pipeline: 1f1b: {{.+}}; each rank runs the head on 2 of 4 along dimension 1 of the last layer's result

// It is too small for that to be worth its all_reduces.
// LAST: stablehlo.dot_general {{.+}} (tensor<2x4x3xf32>, tensor<3x6xf32>) -> tensor<2x4x6xf32>

// BEHIND: error: expand-pipeline: head=last with schedule=gpipe, which runs the head after the pipeline: use schedule=1f1b or schedule=eager-1f1b (P5)
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @main(%w: tensor<4x3x3xf32>, %words: tensor<3x6xf32>, %x: tensor<4x4x3xf32>) -> (tensor<f32>, tensor<4x3x3xf32>, tensor<3x6xf32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %last = stablehlo.constant dense<3> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
    %nothing = stablehlo.constant dense<0.0> : tensor<f32>
    %no_kept = stablehlo.constant dense<0.0> : tensor<4x4x4x3xf32>
    %no_gradient = stablehlo.constant dense<0.0> : tensor<4x3x3xf32>
    %forward:4 = stablehlo.while(%i = %zero, %ws = %w, %kept = %no_kept, %h = %x) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x4x3xf32>, tensor<4x4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %slice = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %weight = stablehlo.reshape %slice : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %2 = stablehlo.reshape %h : (tensor<4x4x3xf32>) -> tensor<1x4x4x3xf32>
      %3 = stablehlo.dynamic_update_slice %kept, %2, %i, %zero, %zero, %zero : (tensor<4x4x4x3xf32>, tensor<1x4x4x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x4x4x3xf32>
      %4 = stablehlo.dot_general %h, %weight, contracting_dims = [2] x [0] : (tensor<4x4x3xf32>, tensor<3x3xf32>) -> tensor<4x4x3xf32>
      %5 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %5, %ws, %3, %4 : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x4x3xf32>, tensor<4x4x3xf32>
    }
    %logits = stablehlo.dot_general %forward#3, %words, contracting_dims = [2] x [0] : (tensor<4x4x3xf32>, tensor<3x6xf32>) -> tensor<4x4x6xf32>
    %square = stablehlo.multiply %logits, %logits : tensor<4x4x6xf32>
    %loss = stablehlo.reduce(%square init: %nothing) applies stablehlo.add across dimensions = [0, 1, 2] : (tensor<4x4x6xf32>, tensor<f32>) -> tensor<f32>
    %twice = stablehlo.add %logits, %logits : tensor<4x4x6xf32>
    %of_words = stablehlo.dot_general %forward#3, %twice, contracting_dims = [0, 1] x [0, 1] : (tensor<4x4x3xf32>, tensor<4x4x6xf32>) -> tensor<3x6xf32>
    %slope = stablehlo.dot_general %twice, %words, contracting_dims = [2] x [1] : (tensor<4x4x6xf32>, tensor<3x6xf32>) -> tensor<4x4x3xf32>
    %backward:5 = stablehlo.while(%i = %zero, %ws = %w, %kept = %forward#2, %g = %slope, %gradient = %no_gradient) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x4x3xf32>, tensor<4x4x3xf32>, tensor<4x3x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %place = stablehlo.subtract %last, %i : tensor<i32>
      %slice = stablehlo.dynamic_slice %ws, %place, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %weight = stablehlo.reshape %slice : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %2 = stablehlo.dynamic_slice %kept, %place, %zero, %zero, %zero, sizes = [1, 4, 4, 3] : (tensor<4x4x4x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4x3xf32>
      %3 = stablehlo.reshape %2 : (tensor<1x4x4x3xf32>) -> tensor<4x4x3xf32>
      %4 = stablehlo.dot_general %3, %g, contracting_dims = [0, 1] x [0, 1] : (tensor<4x4x3xf32>, tensor<4x4x3xf32>) -> tensor<3x3xf32>
      %5 = stablehlo.reshape %4 : (tensor<3x3xf32>) -> tensor<1x3x3xf32>
      %6 = stablehlo.dynamic_update_slice %gradient, %5, %place, %zero, %zero : (tensor<4x3x3xf32>, tensor<1x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x3x3xf32>
      %7 = stablehlo.dot_general %g, %weight, contracting_dims = [2] x [1] : (tensor<4x4x3xf32>, tensor<3x3xf32>) -> tensor<4x4x3xf32>
      %8 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %8, %ws, %kept, %7, %6 : tensor<i32>, tensor<4x3x3xf32>, tensor<4x4x4x3xf32>, tensor<4x4x3xf32>, tensor<4x3x3xf32>
    }
    return %loss, %backward#4, %of_words : tensor<f32>, tensor<4x3x3xf32>, tensor<3x6xf32>
  }
}
