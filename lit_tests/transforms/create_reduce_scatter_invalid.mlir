// RUN: stablehlo-tools opt %s -p create-reduce-scatter --split-input-file --verify-diagnostics
// RUN: not stablehlo-tools opt %s -p 'create-reduce-scatter{share-gathers=false memory-limit=8}' --split-input-file 2>&1 | filecheck %s --check-prefix=ALONE
// RUN: not stablehlo-tools opt %s -p 'create-reduce-scatter{memory-limit=-8}' --split-input-file 2>&1 | filecheck %s --check-prefix=NEGATIVE

// P1: every communicating op is of a dialect that is understood.
func.func @mhlo_collective_p1(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-error@+1 {{mhlo.collective_permute communicates in a dialect that cannot be rewritten here}}
  %0 = "mhlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

// P2: replica groups of what could be rewritten name processes and mesh axes that the module
// has, none of them twice.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @unknown_process_p2(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  // expected-error@+1 {{id 2 is not one of the 2 flattened_ids processes of the module}}
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}
}

// -----

sdy.mesh @mesh = <["x"=4]>
func.func @axis_twice_p2(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  // expected-error@+1 {{axis 'x' of size 4 is named twice}}
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">, #stablehlo.axis_ref<name = "x">]>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

sdy.mesh @mesh = <["x"=4]>
func.func @unknown_axis_p2(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  // expected-error@+1 {{axis 'z' is not in the mesh, or named twice}}
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "z">]>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// P3: `memory-limit` goes with `share-gathers`, and is not negative.
// ALONE-NOT: Traceback
// ALONE: error: create-reduce-scatter: memory-limit needs share-gathers, which is off: remove one of the two options (P3)
// NEGATIVE-NOT: Traceback
// NEGATIVE: error: create-reduce-scatter: memory-limit is a number of bytes, not negative (P3)
func.func @limit_without_sharing_p3(%x: tensor<2x3xf32>) -> tensor<8x3xf32> {
  %0 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  return %0 : tensor<8x3xf32>
}
