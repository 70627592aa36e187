// RUN: stablehlo-tools opt %s --split-input-file > %t.before
// RUN: stablehlo-tools opt %s -p 'collective-matmul{rings=all}' --split-input-file | diff -u %t.before -

// Nothing is multiplied.
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @no_product(%x: tensor<2x3xf32>) -> tensor<8x3xf32> {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %y = stablehlo.tanh %g : tensor<8x3xf32>
  return %y : tensor<8x3xf32>
}
}

// -----

// The maximum of products is no sum of theirs.
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @maximum(%a: tensor<8x3xf32>, %w: tensor<3x5xf32>) -> tensor<2x5xf32> {
  %p = stablehlo.dot_general %a, %w, contracting_dims = [1] x [0] : (tensor<8x3xf32>, tensor<3x5xf32>) -> tensor<8x5xf32>
  %y = "stablehlo.reduce_scatter"(%p) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.maximum %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {scatter_dimension = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x5xf32>) -> tensor<2x5xf32>
  return %y : tensor<2x5xf32>
}
}

// -----

// The product is used whole, too.
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @used_twice(%a: tensor<8x3xf32>, %w: tensor<3x5xf32>) -> (tensor<2x5xf32>, tensor<8x5xf32>) {
  %p = stablehlo.dot_general %a, %w, contracting_dims = [1] x [0] : (tensor<8x3xf32>, tensor<3x5xf32>) -> tensor<8x5xf32>
  %y = "stablehlo.reduce_scatter"(%p) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {scatter_dimension = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x5xf32>) -> tensor<2x5xf32>
  return %y, %p : tensor<2x5xf32>, tensor<8x5xf32>
}
}

// -----

// Complex numbers, and several replicas of several partitions.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @complex(%x: tensor<2x3xcomplex<f32>>, %w: tensor<3x5xcomplex<f32>>) -> tensor<4x5xcomplex<f32>> {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids} : (tensor<2x3xcomplex<f32>>) -> tensor<4x3xcomplex<f32>>
  %y = stablehlo.dot_general %g, %w, contracting_dims = [1] x [0] : (tensor<4x3xcomplex<f32>>, tensor<3x5xcomplex<f32>>) -> tensor<4x5xcomplex<f32>>
  return %y : tensor<4x5xcomplex<f32>>
}
}

// -----

module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 2 : i32} {
func.func @replicas(%x: tensor<2x3xf32>, %w: tensor<3x5xf32>) -> tensor<4x5xf32> {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<4x3xf32>
  %y = stablehlo.dot_general %g, %w, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x5xf32>) -> tensor<4x5xf32>
  return %y : tensor<4x5xf32>
}
}

// -----

// Nothing to multiply between the two.
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @nothing_between(%x: tensor<4x2x3xf32>) -> tensor<4x2x3xf32> {
  %t = "stablehlo.all_to_all"(%x) {split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 4 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<4x2x3xf32>) -> tensor<1x8x3xf32>
  %a = stablehlo.tanh %t : tensor<1x8x3xf32>
  %y = "stablehlo.all_to_all"(%a) {split_dimension = 1 : i64, concat_dimension = 0 : i64, split_count = 4 : i64, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<1x8x3xf32>) -> tensor<4x2x3xf32>
  return %y : tensor<4x2x3xf32>
}
}

// -----

// Complex numbers.
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @complex_tokens(%x: tensor<4x2xcomplex<f32>>, %w: tensor<8x3xcomplex<f32>>) -> tensor<1x3xcomplex<f32>> {
  %t = "stablehlo.all_to_all"(%x) {split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 4 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<4x2xcomplex<f32>>) -> tensor<1x8xcomplex<f32>>
  %y = stablehlo.dot_general %t, %w, contracting_dims = [1] x [0] : (tensor<1x8xcomplex<f32>>, tensor<8x3xcomplex<f32>>) -> tensor<1x3xcomplex<f32>>
  return %y : tensor<1x3xcomplex<f32>>
}
}
