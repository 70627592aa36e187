// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=4 schedule=1f1b head=divided}' --verify-diagnostics
// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=4 schedule=1f1b}' -o /dev/null

// P7: two ranks divide neither one sample nor three features, by which the head takes a square root
// of a sum.
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
    // expected-error@+1 {{head=divided, but no dimension that 2 ranks divide cuts all of the head: its products, the inputs of the backward, and the loss as a sum (P7); use head=last to run it on the last rank}}
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
