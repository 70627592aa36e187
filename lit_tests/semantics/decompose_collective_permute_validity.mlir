// RUN: stablehlo-tools opt %s -p 'decompose-collective-permute{form=collective-permute validity}' -o %t.permutes.mlir
// RUN: grep -c stablehlo.if %t.permutes.mlir | filecheck %s --check-prefix=BRANCHES
// RUN: stablehlo-tools verify %s %t.permutes.mlir --backend interpreter | filecheck %s
// RUN: stablehlo-tools opt %s -p 'decompose-collective-permute{validity}' -o %t.transfers.mlir
// RUN: stablehlo-tools verify %s %t.transfers.mlir --backend interpreter | filecheck %s
// BRANCHES: 2

// A pipeline of two stages and three microbatches, and what the last stage computed last on its way
// back: one of four transfers is skipped there, three here, and the values stay.
// CHECK: same: 2 outputs, 16 elements, bitwise

// One iteration less is seen.
// RUN: sed 's/compare *LE/compare LT/' %t.permutes.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --backend interpreter --trials 1 | filecheck %s --check-prefix=DIFFERS
// DIFFERS: differs: output 0,
module @semantics attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%in: tensor<3x2xf32>, %garbage: tensor<2xf32>) -> (tensor<3x2xf32>, tensor<2xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %two = stablehlo.constant dense<2> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %zeros = stablehlo.constant dense<0.0> : tensor<3x2xf32>
  %id = stablehlo.partition_id : tensor<ui32>
  %stage = stablehlo.convert %id : (tensor<ui32>) -> tensor<i32>
  %is_last = stablehlo.compare EQ, %stage, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
  %w:4 = stablehlo.while(%i = %zero, %arriving = %garbage, %out = %in, %back = %garbage) : tensor<i32>, tensor<2xf32>, tensor<3x2xf32>, tensor<2xf32>
  cond {
    %c = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %at = stablehlo.minimum %i, %two : tensor<i32>
    %row = stablehlo.dynamic_slice %in, %at, %zero, sizes = [1, 2] : (tensor<3x2xf32>, tensor<i32>, tensor<i32>) -> tensor<1x2xf32>
    %fed = stablehlo.reshape %row : (tensor<1x2xf32>) -> tensor<2xf32>
    %taken = stablehlo.select %is_last, %arriving, %fed : tensor<i1>, tensor<2xf32>
    %computed = stablehlo.multiply %taken, %fed : tensor<2xf32>
    %sent = "stablehlo.collective_permute"(%computed) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
    %returned = "stablehlo.collective_permute"(%computed) {channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, source_target_pairs = dense<[[1, 0]]> : tensor<1x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
    %before = stablehlo.subtract %i, %one : tensor<i32>
    %number = stablehlo.maximum %before, %zero : tensor<i32>
    %new = stablehlo.reshape %computed : (tensor<2xf32>) -> tensor<1x2xf32>
    %kept = stablehlo.dynamic_update_slice %out, %new, %number, %zero : (tensor<3x2xf32>, tensor<1x2xf32>, tensor<i32>, tensor<i32>) -> tensor<3x2xf32>
    %j = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %j, %sent, %kept, %returned : tensor<i32>, tensor<2xf32>, tensor<3x2xf32>, tensor<2xf32>
  }
  %wanted = stablehlo.select %is_last, %w#2, %zeros : tensor<i1>, tensor<3x2xf32>
  return %wanted, %w#3 : tensor<3x2xf32>, tensor<2xf32>
}
}
