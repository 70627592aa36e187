// RUN: stablehlo-tools opt %s -p 'pipeline-collectives{direction=prefetch hold=false}' -o %t.ahead.mlir
// RUN: stablehlo-tools opt %s -p 'pipeline-collectives{direction=delay distance=2}' -o %t.late.mlir
// RUN: stablehlo-tools verify %s %t.ahead.mlir --backend interpreter --trials 1 | filecheck %s
// RUN: stablehlo-tools verify %s %t.late.mlir --backend interpreter --trials 1 | filecheck %s
// RUN: filecheck %s --check-prefix=WRITTEN --input-file %t.ahead.mlir
// RUN: filecheck %s --check-prefix=WRITTEN --input-file %t.late.mlir

// A gather that goes ahead and a sum that ends late give the same, bit for bit.
// WRITTEN: stablehlo.while
// WRITTEN: }
// WRITTEN: stablehlo.dot_general
// CHECK: same: 2 outputs, 384 elements, bitwise

// Another begin of the loop is seen.
// RUN: sed 's/stablehlo.constant dense<1> : tensor<i32>/stablehlo.constant dense<2> : tensor<i32>/' %t.ahead.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --backend interpreter --trials 1 | filecheck %s --check-prefix=DIFFERS
// DIFFERS: differs: output
module @semantics attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%arg: tensor<4x8xf32>, %k: tensor<5x2x8xf32>, %v: tensor<8x8xf32>, %p: tensor<5x4x8xf32>) -> (tensor<4x8xf32>, tensor<5x4x8xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %r:3 = stablehlo.while(%i = %zero, %x = %arg, %dst = %p) : tensor<i32>, tensor<4x8xf32>, tensor<5x4x8xf32>
  cond {
    %more = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %k, %i, %zero, %zero, sizes = [1, 2, 8] : (tensor<5x2x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x8xf32>
    %part = stablehlo.reshape %row : (tensor<1x2x8xf32>) -> tensor<2x8xf32>
    %g = "stablehlo.all_gather"(%part) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x8xf32>) -> tensor<4x8xf32>
    %d = stablehlo.dot_general %x, %v, contracting_dims = [1] x [0] : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
    %y = stablehlo.add %d, %g : tensor<4x8xf32>
    %h = "stablehlo.all_reduce"(%d) ({
    ^bb0(%l: tensor<f32>, %q: tensor<f32>):
      %s = stablehlo.add %l, %q : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<4x8xf32>
    %put = stablehlo.reshape %h : (tensor<4x8xf32>) -> tensor<1x4x8xf32>
    %new = stablehlo.dynamic_update_slice %dst, %put, %i, %zero, %zero : (tensor<5x4x8xf32>, tensor<1x4x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<5x4x8xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %y, %new : tensor<i32>, tensor<4x8xf32>, tensor<5x4x8xf32>
  }
  return %r#1, %r#2 : tensor<4x8xf32>, tensor<5x4x8xf32>
}
}
