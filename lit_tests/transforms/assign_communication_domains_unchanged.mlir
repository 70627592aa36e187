// RUN: stablehlo-tools opt %s --split-input-file > %t.before
// RUN: stablehlo-tools opt %s -p 'assign-communication-domains{against=text}' --split-input-file | diff -u %t.before -
// RUN: stablehlo-tools opt %s -p 'assign-communication-domains{against=text explain}' --split-input-file -o /dev/null 2>&1 | filecheck %s
// On a torus, and where devices have one kind of link, nothing is done.
// RUN: stablehlo-tools opt %s -p 'assign-communication-domains{against=text hardware=tpu-v5e}' --split-input-file | diff -u %t.before -

// CHECK: all collectives stay unchanged: no collective leaves NVLink
module attributes {mhlo.num_partitions = 16 : i32, mhlo.num_replicas = 1 : i32} {
func.func @within(%x: tensor<2x3xf32>) -> (tensor<16x3xf32>) {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]> : tensor<2x8xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<16x3xf32>
  return %g : tensor<16x3xf32>
}
}

// -----

// CHECK: all_gather: unchanged: it leaves NVLink
// CHECK: all collectives stay unchanged: no collective within NVLink can be in a domain
module attributes {mhlo.num_partitions = 16 : i32, mhlo.num_replicas = 1 : i32} {
func.func @across(%x: tensor<2x3xf32>) -> (tensor<2x3xf32>, tensor<4x3xf32>) {
  %c = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 9, type = 1>, replica_groups = dense<[[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]> : tensor<8x2xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<4x3xf32>
  return %x, %c : tensor<2x3xf32>, tensor<4x3xf32>
}
}

// -----

// CHECK: all_gather: unchanged: collective_group_key steers it
module attributes {mhlo.num_partitions = 16 : i32, mhlo.num_replicas = 1 : i32} {
func.func @steered(%x: tensor<2x3xf32>) -> (tensor<16x3xf32>, tensor<4x3xf32>) {
  %c = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 9, type = 1>, replica_groups = dense<[[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]> : tensor<8x2xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<4x3xf32>
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, mhlo.frontend_attributes = {collective_group_key = "a"}, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]> : tensor<2x8xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<16x3xf32>
  return %g, %c : tensor<16x3xf32>, tensor<4x3xf32>
}
}

// -----

// CHECK: all_gather: unchanged: XLA computes it without sending anything
module attributes {mhlo.num_partitions = 16 : i32, mhlo.num_replicas = 1 : i32} {
func.func @constant(%x: tensor<2x3xf32>) -> (tensor<16x3xf32>, tensor<4x3xf32>) {
  %c = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 9, type = 1>, replica_groups = dense<[[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]> : tensor<8x2xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<4x3xf32>
  %one = stablehlo.constant dense<1.0> : tensor<2x3xf32>
  %g = "stablehlo.all_gather"(%one) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]> : tensor<2x8xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<16x3xf32>
  return %g, %c : tensor<16x3xf32>, tensor<4x3xf32>
}
}

// -----

// CHECK: all_gather: unchanged: XLA reshapes it for the stablehlo.gather that reads it
module attributes {mhlo.num_partitions = 16 : i32, mhlo.num_replicas = 1 : i32} {
func.func @indices(%x: tensor<2x3xf32>, %i: tensor<4x2x1xi32>, %table: tensor<9x3xf32>) -> (tensor<4x16x3xf32>, tensor<4x3xf32>) {
  %c = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 9, type = 1>, replica_groups = dense<[[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]> : tensor<8x2xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<4x3xf32>
  %g = "stablehlo.all_gather"(%i) {all_gather_dim = 1 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]> : tensor<2x8xi64>, use_global_device_ids} : (tensor<4x2x1xi32>) -> tensor<4x16x1xi32>
  %r = "stablehlo.gather"(%table, %g) {dimension_numbers = #stablehlo.gather<offset_dims = [2], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 2>, slice_sizes = array<i64: 1, 3>} : (tensor<9x3xf32>, tensor<4x16x1xi32>) -> tensor<4x16x3xf32>
  return %r, %c : tensor<4x16x3xf32>, tensor<4x3xf32>
}
}

// -----

// CHECK: all_to_all: unchanged: it has several operands
module attributes {mhlo.num_partitions = 16 : i32, mhlo.num_replicas = 1 : i32} {
func.func @several(%x: tensor<2x3xf32>, %y: tensor<2x4xf32>) -> (tensor<1x6xf32>, tensor<4x3xf32>) {
  %c = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 9, type = 1>, replica_groups = dense<[[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]> : tensor<8x2xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<4x3xf32>
  %g:2 = "stablehlo.all_to_all"(%x, %y) {split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 2 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]> : tensor<8x2xi64>} : (tensor<2x3xf32>, tensor<2x4xf32>) -> (tensor<1x6xf32>, tensor<1x8xf32>)
  return %g#0, %c : tensor<1x6xf32>, tensor<4x3xf32>
}
}

// -----

// CHECK: all_gather: unchanged: it is asynchronous: the program places its start and its done
module attributes {mhlo.num_partitions = 16 : i32, mhlo.num_replicas = 1 : i32} {
func.func @async(%x: tensor<2x3xf32>) -> (tensor<16x3xf32>, tensor<4x3xf32>) {
  %c = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 9, type = 1>, replica_groups = dense<[[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]> : tensor<8x2xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<4x3xf32>
  %f = "stablehlo.async_start"(%x) ({
  ^bb0(%a: tensor<2x3xf32>):
    %g = "stablehlo.all_gather"(%a) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]> : tensor<2x8xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<16x3xf32>
    stablehlo.return %g : tensor<16x3xf32>
  }) : (tensor<2x3xf32>) -> !stablehlo.future<tensor<16x3xf32>>
  %y = "stablehlo.async_done"(%f) : (!stablehlo.future<tensor<16x3xf32>>) -> tensor<16x3xf32>
  return %y, %c : tensor<16x3xf32>, tensor<4x3xf32>
}
}
