// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=2 layout=pipeline}' --split-input-file --verify-diagnostics
// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=2}' --split-input-file -o /dev/null

// P8: all chunks have as many layers. In the order of the layers both programs can be had.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @uneven_p8(%w: tensor<5x3x3xf32>, %x: tensor<4x3xf32>) -> tensor<4x3xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<5> : tensor<i32>
    // expected-error@+1 {{layout=pipeline cannot cut 5 layers into 2 equal chunks, 1 on each of 2 ranks (P8); layout=layers allows chunks of different lengths}}
    %loop:3 = stablehlo.while(%i = %zero, %ws = %w, %h = %x) : tensor<i32>, tensor<5x3x3xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %1 = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<5x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %3 = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %out = stablehlo.tanh %3 : tensor<4x3xf32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %ws, %out : tensor<i32>, tensor<5x3x3xf32>, tensor<4x3xf32>
    }
    return %loop#2 : tensor<4x3xf32>
  }
}

// -----

// Nothing takes a single layer out of a stack.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @single_layer_p8(%w: tensor<4x3x3xf32>, %x: tensor<4x3xf32>) -> (tensor<4x3xf32>, tensor<1x3x3xf32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
    // expected-note@+1 {{the 4 layers of this loop}}
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
    // expected-error@+1 {{stablehlo.slice needs single layers, or their order (P8)}}
    %first = stablehlo.slice %w [0:1, 0:3, 0:3] : (tensor<4x3x3xf32>) -> tensor<1x3x3xf32>
    return %loop#2, %first : tensor<4x3xf32>, tensor<1x3x3xf32>
  }
}
