// RUN: stablehlo-tools opt %s -p 'create-reduce-scatter{explain}' --split-input-file --verify-diagnostics >/dev/null

// A note for each all_reduce, and none for the one that is written.
func.func @explained(%x: tensor<8x3xf32>, %y: tensor<8x3xf32>) -> (tensor<4x3xf32>, tensor<8x3xf32>) {
  // expected-note@+1 {{2 all_reduces in a row became reduce_scatter over 2 and all_reduce over 2}}
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  // expected-note@+1 {{2 all_reduces in a row became reduce_scatter over 2 and all_reduce over 2}}
  %1 = "stablehlo.all_reduce"(%0) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 0, 4, 4]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %2 = stablehlo.dynamic_slice %1, %start, %zero, sizes = [4, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
  // expected-note@+1 {{all_reduce stays: func.return does not read one equal chunk per device}}
  %3 = "stablehlo.all_reduce"(%y) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  // expected-note@+1 {{all_reduce stays: its result is unused}}
  %4 = "stablehlo.all_reduce"(%y) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  return %2, %3 : tensor<4x3xf32>, tensor<8x3xf32>
}

// -----

// Each device takes a part that no other of its group takes, but that its group has.
func.func @of_another_group(%x: tensor<8x3xf32>) -> tensor<4x3xf32> {
  // expected-note@+1 {{all_reduce stays: its members do not read equal chunks, or smaller collectives would send more bytes}}
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 0, 4, 4]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [4, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
  return %1 : tensor<4x3xf32>
}

// -----

func.func @padded_with_ones(%x: tensor<8x3xf32>) -> tensor<3x3xf32> {
  // expected-note@+1 {{adds elements that are not neutral for the reducer}}
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %one = stablehlo.constant dense<1.0> : tensor<f32>
  %p = stablehlo.pad %0, %one, low = [0, 0], high = [4, 0], interior = [0, 0] : (tensor<8x3xf32>, tensor<f32>) -> tensor<12x3xf32>
  %table_start = stablehlo.constant dense<[0, 3, 6, 9]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %p, %start, %zero, sizes = [3, 3] : (tensor<12x3xf32>, tensor<i32>, tensor<i32>) -> tensor<3x3xf32>
  return %1 : tensor<3x3xf32>
}

// -----

func.func @complex(%x: tensor<8x3xcomplex<f32>>) -> tensor<2x3xcomplex<f32>> {
  // expected-note@+1 {{all_reduce stays: XLA:TPU has no reduce_scatter of complex<f32>}}
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<complex<f32>>, %b: tensor<complex<f32>>):
    %c = stablehlo.add %a, %b : tensor<complex<f32>>
    stablehlo.return %c : tensor<complex<f32>>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xcomplex<f32>>) -> tensor<8x3xcomplex<f32>>
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xcomplex<f32>>, tensor<i32>, tensor<i32>) -> tensor<2x3xcomplex<f32>>
  return %1 : tensor<2x3xcomplex<f32>>
}
