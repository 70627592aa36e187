// RUN: stablehlo-tools opt %s --split-input-file > %t.before
// RUN: stablehlo-tools opt %s -p 'hierarchical-collectives{rows=2}' --split-input-file | diff -u %t.before -
// RUN: stablehlo-tools opt %s -p 'hierarchical-collectives{rows=2 explain}' --split-input-file -o /dev/null 2>&1 | filecheck %s

// Two members make no table; three make none with rows of two.
// CHECK-NOT: over 2:
// CHECK: all_gather over 3: unchanged: no rows of 2 fit
module attributes {mhlo.num_partitions = 6 : i32, mhlo.num_replicas = 1 : i32} {
func.func @few(%x: tensor<2x3xf32>) -> (tensor<4x3xf32>, tensor<6x3xf32>) {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1], [2, 3], [4, 5]]> : tensor<3x2xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<4x3xf32>
  %h = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 1, 2], [3, 4, 5]]> : tensor<2x3xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<6x3xf32>
  return %g, %h : tensor<4x3xf32>, tensor<6x3xf32>
}
}

// -----

// No dimension of a sum is of even size.
// CHECK: all_reduce over 4: unchanged: no rows of 2 fit
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @odd(%x: tensor<3x5xf32>) -> tensor<3x5xf32> {
  %y = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<3x5xf32>) -> tensor<3x5xf32>
  return %y : tensor<3x5xf32>
}
}

// -----

// CHECK: all_gather over 4: unchanged: collective_group_key steers it
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @steered(%x: tensor<2x3xf32>) -> tensor<8x3xf32> {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, mhlo.frontend_attributes = {collective_group_key = "a"}, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  return %g : tensor<8x3xf32>
}
}

// -----

// CHECK: all_gather over 4: unchanged: it has several operands
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @several(%x: tensor<2x3xf32>, %y: tensor<2x5xf32>) -> (tensor<8x3xf32>, tensor<8x5xf32>) {
  %g:2 = "stablehlo.all_gather"(%x, %y) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>, tensor<2x5xf32>) -> (tensor<8x3xf32>, tensor<8x5xf32>)
  return %g#0, %g#1 : tensor<8x3xf32>, tensor<8x5xf32>
}
}

// -----

// CHECK: all_gather over 4: unchanged: it is asynchronous: the program places its start and its done
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @async(%x: tensor<2x3xf32>) -> tensor<8x3xf32> {
  %f = "stablehlo.async_start"(%x) ({
  ^bb0(%a: tensor<2x3xf32>):
    %g = "stablehlo.all_gather"(%a) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
    stablehlo.return %g : tensor<8x3xf32>
  }) : (tensor<2x3xf32>) -> !stablehlo.future<tensor<8x3xf32>>
  %y = "stablehlo.async_done"(%f) : (!stablehlo.future<tensor<8x3xf32>>) -> tensor<8x3xf32>
  return %y : tensor<8x3xf32>
}
}

// -----

// A sum of complex numbers would be scattered; a gather of them is none.
// CHECK: all_reduce over 4: unchanged: XLA:TPU has no reduce_scatter of complex<f32>
// CHECK: reduce_scatter over 4: unchanged: XLA:TPU has no reduce_scatter of complex<f32>
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @complex(%x: tensor<8x3xcomplex<f32>>) -> (tensor<8x3xcomplex<f32>>, tensor<2x3xcomplex<f32>>) {
  %y = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<complex<f32>>, %r: tensor<complex<f32>>):
    %s = stablehlo.add %l, %r : tensor<complex<f32>>
    stablehlo.return %s : tensor<complex<f32>>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xcomplex<f32>>) -> tensor<8x3xcomplex<f32>>
  %z = "stablehlo.reduce_scatter"(%x) ({
  ^bb0(%l: tensor<complex<f32>>, %r: tensor<complex<f32>>):
    %s = stablehlo.add %l, %r : tensor<complex<f32>>
    stablehlo.return %s : tensor<complex<f32>>
  }) {scatter_dimension = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xcomplex<f32>>) -> tensor<2x3xcomplex<f32>>
  return %y, %z : tensor<8x3xcomplex<f32>>, tensor<2x3xcomplex<f32>>
}
}
