// RUN: stablehlo-tools opt %s -p 'pipeline-collectives{direction=once}' -o %t.once.mlir
// RUN: stablehlo-tools verify %s %t.once.mlir --backend interpreter --trials 1 --rtol 1e-5 --atol 1e-5 | filecheck %s
// RUN: filecheck %s --check-prefix=WRITTEN --input-file %t.once.mlir

// A gather in front of two loops and a sum behind them give the same.
// WRITTEN: stablehlo.all_gather
// WRITTEN: stablehlo.while
// WRITTEN: stablehlo.while
// WRITTEN: "stablehlo.all_reduce"
// CHECK: same: 2 outputs, 224 elements, within

// Rows that are read in another order are seen.
// RUN: sed 's/%i, %zero, %zero, sizes = \[1, 4, 4\]/%zero, %zero, %zero, sizes = [1, 4, 4]/' %s > %t.changed.mlir
// RUN: not stablehlo-tools verify %t.changed.mlir %t.once.mlir --backend interpreter --trials 1 --rtol 1e-5 --atol 1e-5 | filecheck %s --check-prefix=DIFFERS
// DIFFERS: differs: output
module @semantics attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8x4xf32>, %w: tensor<5x2x4xf32>) -> (tensor<8x4xf32>, tensor<5x4x4xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %two = stablehlo.constant dense<2> : tensor<i32>
  %five = stablehlo.constant dense<5> : tensor<i32>
  %none = stablehlo.constant dense<0.0> : tensor<5x4x4xf32>
  %z:3 = stablehlo.while(%m = %zero, %hidden = %x, %sums = %none) : tensor<i32>, tensor<8x4xf32>, tensor<5x4x4xf32>
  cond {
    %more = stablehlo.compare LT, %m, %two : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %y:3 = stablehlo.while(%i = %zero, %h = %hidden, %g = %sums) : tensor<i32>, tensor<8x4xf32>, tensor<5x4x4xf32>
    cond {
      %more = stablehlo.compare LT, %i, %five : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    } do {
      %row = stablehlo.dynamic_slice %w, %i, %zero, %zero, sizes = [1, 2, 4] : (tensor<5x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
      %part = stablehlo.reshape %row : (tensor<1x2x4xf32>) -> tensor<2x4xf32>
      %weight = "stablehlo.all_gather"(%part) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x4xf32>) -> tensor<4x4xf32>
      %d = stablehlo.dot_general %h, %weight, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
      %next = stablehlo.tanh %d : tensor<8x4xf32>
      %local = stablehlo.dot_general %h, %next, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
      %all = "stablehlo.all_reduce"(%local) ({
      ^bb0(%l: tensor<f32>, %q: tensor<f32>):
        %s = stablehlo.add %l, %q : tensor<f32>
        stablehlo.return %s : tensor<f32>
      }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x4xf32>) -> tensor<4x4xf32>
      %term = stablehlo.reshape %all : (tensor<4x4xf32>) -> tensor<1x4x4xf32>
      %old = stablehlo.dynamic_slice %g, %i, %zero, %zero, sizes = [1, 4, 4] : (tensor<5x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
      %new = stablehlo.add %old, %term : tensor<1x4x4xf32>
      %added = stablehlo.dynamic_update_slice %g, %new, %i, %zero, %zero : (tensor<5x4x4xf32>, tensor<1x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<5x4x4xf32>
      %n = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %n, %next, %added : tensor<i32>, tensor<8x4xf32>, tensor<5x4x4xf32>
    }
    %n = stablehlo.add %m, %one : tensor<i32>
    stablehlo.return %n, %y#1, %y#2 : tensor<i32>, tensor<8x4xf32>, tensor<5x4x4xf32>
  }
  return %z#1, %z#2 : tensor<8x4xf32>, tensor<5x4x4xf32>
}
}
