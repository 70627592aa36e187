// RUN: stablehlo-tools opt %s -p fold-pipeline --split-input-file 2>%t.warnings | filecheck %s
// RUN: filecheck %s --check-prefix=WARNED --input-file %t.warnings
// WARNED-COUNT-3: warning: fold-pipeline: nothing is folded: no loop sends its results to the next device by collective_permute
// RUN: stablehlo-tools opt %S/fold_pipeline.mlir -p fold-pipeline --split-input-file -o %t.once.mlir
// RUN: stablehlo-tools opt %S/fold_pipeline.mlir -p fold-pipeline,fold-pipeline --split-input-file -o %t.twice.mlir 2>%t.again
// RUN: diff %t.once.mlir %t.twice.mlir
// RUN: filecheck %s --check-prefix=AGAIN --input-file %t.again
// AGAIN-COUNT-3: warning: fold-pipeline: nothing is folded: no loop sends its results

// A loop over layers already, which shifts the sequence in each.
// CHECK-LABEL: func.func @layers
// CHECK: stablehlo.while
// CHECK: stablehlo.concatenate
func.func @layers(%w: tensor<3x4x4xf32>, %x: tensor<6x4xf32>) -> tensor<6x4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %none = stablehlo.constant dense<0.0> : tensor<1x4xf32>
  %0:2 = stablehlo.while(%i = %zero, %h = %x) : tensor<i32>, tensor<6x4xf32>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %taken = stablehlo.dynamic_slice %w, %i, %zero, %zero, sizes = [1, 4, 4] : (tensor<3x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
    %layer = stablehlo.reshape %taken : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
    %earlier = stablehlo.slice %h [0:5, 0:4] : (tensor<6x4xf32>) -> tensor<5x4xf32>
    %shifted = stablehlo.concatenate %none, %earlier, dim = 0 : (tensor<1x4xf32>, tensor<5x4xf32>) -> tensor<6x4xf32>
    %mixed = stablehlo.add %h, %shifted : tensor<6x4xf32>
    %y = stablehlo.dot_general %mixed, %layer, contracting_dims = [1] x [0] : (tensor<6x4xf32>, tensor<4x4xf32>) -> tensor<6x4xf32>
    %next = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %next, %y : tensor<i32>, tensor<6x4xf32>
  }
  return %0#1 : tensor<6x4xf32>
}

// -----

// Each rank adds up what goes around a ring: nothing that it computes goes on.
// CHECK-LABEL: func.func @ring
// CHECK: sdy.manual_computation
// CHECK: stablehlo.collective_permute
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["stage"=2]>
func.func @ring(%x: tensor<2x4xf32>) -> tensor<2x4xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"stage"}, {}]>] out_shardings=[<@mesh, [{"stage"}, {}]>] manual_axes={"stage"} (%own: tensor<1x4xf32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %two = stablehlo.constant dense<2> : tensor<i32>
    %none = stablehlo.constant dense<0.0> : tensor<1x4xf32>
    %1:3 = stablehlo.while(%i = %zero, %block = %own, %sum = %none) : tensor<i32>, tensor<1x4xf32>, tensor<1x4xf32>
    cond {
      %more = stablehlo.compare LT, %i, %two : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    } do {
      %y = stablehlo.multiply %own, %block : tensor<1x4xf32>
      %added = stablehlo.add %sum, %y : tensor<1x4xf32>
      %sent = "stablehlo.collective_permute"(%block) {
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
      } : (tensor<1x4xf32>) -> tensor<1x4xf32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %sent, %added : tensor<i32>, tensor<1x4xf32>, tensor<1x4xf32>
    }
    sdy.return %1#2 : tensor<1x4xf32>
  } : (tensor<2x4xf32>) -> tensor<2x4xf32>
  return %0 : tensor<2x4xf32>
}
}

// -----

// No loop at all; a call stays a call.
// CHECK-LABEL: func.func public @main
// CHECK: call @twice
func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @twice(%x) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func private @twice(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %x, %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}
