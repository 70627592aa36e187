// Near misses: nothing changes, to the byte.
// RUN: stablehlo-tools opt %s --split-input-file > %t.before
// RUN: stablehlo-tools opt %s -p create-reduce-scatter --split-input-file | diff -u %t.before -

// One device takes a chunk that another takes too.
func.func @chunk_taken_twice(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4, 4]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// The whole is used as well.
func.func @other_use(%x: tensor<8x3xf32>) -> (tensor<2x3xf32>, tensor<8x3xf32>) {
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
  return %1, %0 : tensor<2x3xf32>, tensor<8x3xf32>
}

// -----

// One part is by partition, the other the same everywhere.
func.func @static_slice(%x: tensor<8x3xf32>) -> (tensor<2x3xf32>, tensor<2x3xf32>) {
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
  %2 = stablehlo.slice %0 [0:2, 0:3] : (tensor<8x3xf32>) -> tensor<2x3xf32>
  return %1, %2 : tensor<2x3xf32>, tensor<2x3xf32>
}

// -----

// Half of a chunk.
func.func @half_a_chunk(%x: tensor<8x3xf32>) -> tensor<1x3xf32> {
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
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [1, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<1x3xf32>
  return %1 : tensor<1x3xf32>
}

// -----

// Starts that are no multiples of the size.
func.func @unaligned(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[1, 3, 5, 7]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// The offset of one chunk is clamped to that of another.
func.func @clamped_to_another(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 2, 8, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// A negative offset is clamped to zero, which is taken already.
func.func @negative_offset(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 2, -4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// Chunks that do not divide the dimension.
func.func @unequal_chunks(%x: tensor<7x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2]]> : tensor<1x3xi64>, use_global_device_ids} : (tensor<7x3xf32>) -> tensor<7x3xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4]> : tensor<3xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<3xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<7x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// A slice in a branch.
func.func @slice_in_a_branch(%x: tensor<8x3xf32>, %y: tensor<2x3xf32>, %p: tensor<i1>) -> tensor<2x3xf32> {
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
  %1 = "stablehlo.if"(%p) ({
    %2 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
    stablehlo.return %2 : tensor<2x3xf32>
  }, {
    stablehlo.return %y : tensor<2x3xf32>
  }) : (tensor<i1>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// Three parts: three reduce_scatters would send more than the all_reduce.
func.func @three_parts(%x: tensor<4x4x4xf32>) -> (tensor<1x4x4xf32>, tensor<4x1x4xf32>, tensor<4x4x1xf32>) {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<4x4x4xf32>) -> tensor<4x4x4xf32>
  %table_start = stablehlo.constant dense<[0, 1, 2, 3]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, %zero, sizes = [1, 4, 4] : (tensor<4x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
  %2 = stablehlo.dynamic_slice %0, %zero, %start, %zero, sizes = [4, 1, 4] : (tensor<4x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x1x4xf32>
  %3 = stablehlo.dynamic_slice %0, %zero, %zero, %start, sizes = [4, 4, 1] : (tensor<4x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x4x1xf32>
  return %1, %2, %3 : tensor<1x4x4xf32>, tensor<4x1x4xf32>, tensor<4x4x1xf32>
}

// -----

// A value beside the sum, of which the offset in another shape says nothing.
func.func @beside_in_another_shape(%x: tensor<8x3xf32>, %y: tensor<8x3xf32>) -> tensor<6xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %1 = stablehlo.add %0, %y : tensor<8x3xf32>
  %2 = stablehlo.reshape %1 : (tensor<8x3xf32>) -> tensor<24xf32>
  %table_start = stablehlo.constant dense<[0, 6, 12, 18]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %3 = stablehlo.dynamic_slice %2, %start, sizes = [6] : (tensor<24xf32>, tensor<i32>) -> tensor<6xf32>
  return %3 : tensor<6xf32>
}

// -----

// Each device takes its copy of a sum that all need whole.
func.func @copies(%x: tensor<1x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<1x3xf32>) -> tensor<1x3xf32>
  %1 = stablehlo.broadcast_in_dim %0, dims = [0, 1] : (tensor<1x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %2 = stablehlo.dynamic_slice %1, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %2 : tensor<2x3xf32>
}

// -----

// Cut by an axis that is not summed over.
sdy.mesh @mesh = <["x"=2, "y"=2]>
func.func @another_axis(%x: tensor<8x3xf32>) -> tensor<4x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "y">]>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 0, 4, 4]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [4, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
  return %1 : tensor<4x3xf32>
}

// -----

// Groups of different sizes, one padded.
func.func @uneven_groups(%x: tensor<8x3xf32>) -> tensor<4x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2], [3, -1, -1]]> : tensor<2x3xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 4, 0, 4]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [4, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
  return %1 : tensor<4x3xf32>
}

// -----

// A device in no group.
module attributes {mhlo.num_partitions = 3 : i32, mhlo.num_replicas = 1 : i32} {
func.func @device_left_out(%x: tensor<8x3xf32>) -> tensor<4x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 4, 0]> : tensor<3xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<3xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [4, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
  return %1 : tensor<4x3xf32>
}
}

// -----

// Groups of one device.
func.func @groups_of_one(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0], [1], [2], [3]]> : tensor<4x1xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// Without a channel the groups are of replicas, and a partition is the same in all of them.
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 4 : i32} {
func.func @replicas_cut_by_partition(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<8x3xf32>) -> tensor<8x3xf32>
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

// Groups of replicas and partitions, whose order the specification and XLA do not agree on.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 2 : i32} {
func.func @mixed_groups(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %replica = stablehlo.replica_id : tensor<ui32>
  %partition = stablehlo.partition_id : tensor<ui32>
  %two = stablehlo.constant dense<2> : tensor<ui32>
  %four = stablehlo.constant dense<4> : tensor<ui32>
  %major = stablehlo.multiply %partition, %four : tensor<ui32>
  %minor = stablehlo.multiply %replica, %two : tensor<ui32>
  %start = stablehlo.add %major, %minor : tensor<ui32>
  %zero = stablehlo.constant dense<0> : tensor<ui32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<ui32>, tensor<ui32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}
}

// -----

// Offsets that overflow their type: 128 is -128, and clamped to zero.
func.func @overflow(%x: tensor<256xf32>) -> tensor<64xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<256xf32>) -> tensor<256xf32>
  %device = stablehlo.partition_id : tensor<ui32>
  %index = stablehlo.convert %device : (tensor<ui32>) -> tensor<i8>
  %size = stablehlo.constant dense<64> : tensor<i8>
  %start = stablehlo.multiply %index, %size : tensor<i8>
  %1 = stablehlo.dynamic_slice %0, %start, sizes = [64] : (tensor<256xf32>, tensor<i8>) -> tensor<64xf32>
  return %1 : tensor<64xf32>
}

// -----

// Unsigned bytes overflow too: 256 is 0.
func.func @overflow_of_unsigned(%x: tensor<512xf32>) -> tensor<128xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<512xf32>) -> tensor<512xf32>
  %device = stablehlo.partition_id : tensor<ui32>
  %index = stablehlo.convert %device : (tensor<ui32>) -> tensor<ui8>
  %size = stablehlo.constant dense<128> : tensor<ui8>
  %start = stablehlo.multiply %index, %size : tensor<ui8>
  %1 = stablehlo.dynamic_slice %0, %start, sizes = [128] : (tensor<512xf32>, tensor<ui8>) -> tensor<128xf32>
  return %1 : tensor<128xf32>
}

// -----

// A barrier in between.
func.func @barrier(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %b = stablehlo.optimization_barrier %0 : tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %b, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// An op in between that mixes the chunks.
func.func @reversed(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %r = stablehlo.reverse %0, dims = [0] : tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %r, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// The sum times itself: both operands are followed.
func.func @square(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %s = stablehlo.multiply %0, %0 : tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %s, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// An op that compilers may round otherwise on a part.
func.func @tanh(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %t = stablehlo.tanh %0 : tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %t, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// An offset that depends on data.
func.func @data(%x: tensor<8x3xf32>, %start: tensor<i32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// A reduction that is more than one op, or takes one side twice.
func.func @custom_reduction(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %twice = stablehlo.add %a, %a : tensor<f32>
    %c = stablehlo.add %twice, %b : tensor<f32>
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

func.func @one_side(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %a : tensor<f32>
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

// -----

// Callers that pass different offsets.
func.func @callers_differ(%x: tensor<8x3xf32>) -> (tensor<2x3xf32>, tensor<2x3xf32>) {
  %table_i = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_i = stablehlo.partition_id : tensor<ui32>
  %row_i = stablehlo.dynamic_slice %table_i, %device_i, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %i = stablehlo.reshape %row_i : (tensor<1xi32>) -> tensor<i32>
  %table_j = stablehlo.constant dense<[6, 4, 2, 0]> : tensor<4xi32>
  %device_j = stablehlo.partition_id : tensor<ui32>
  %row_j = stablehlo.dynamic_slice %table_j, %device_j, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %j = stablehlo.reshape %row_j : (tensor<1xi32>) -> tensor<i32>
  %0 = call @sliced(%x, %i) : (tensor<8x3xf32>, tensor<i32>) -> tensor<2x3xf32>
  %1 = call @sliced(%x, %j) : (tensor<8x3xf32>, tensor<i32>) -> tensor<2x3xf32>
  return %0, %1 : tensor<2x3xf32>, tensor<2x3xf32>
}

func.func private @sliced(%x: tensor<8x3xf32>, %start: tensor<i32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// Summed in the loop, cut after it.
func.func @sum_in_a_loop(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %v = %x) : tensor<i32>, tensor<8x3xf32>
    cond {
      %go = stablehlo.compare LT, %i, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %go : tensor<i1>
    } do {
      %1 = "stablehlo.all_reduce"(%v) ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %c = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %c : tensor<f32>
      }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %1 : tensor<i32>, tensor<8x3xf32>
    }
  %2 = stablehlo.dynamic_slice %0#1, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %2 : tensor<2x3xf32>
}

// -----

// An offset that changes from iteration to iteration.
func.func @offset_of_an_iteration(%x: tensor<8x3xf32>, %y: tensor<2x3xf32>) -> tensor<2x3xf32> {
  %table_first = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_first = stablehlo.partition_id : tensor<ui32>
  %row_first = stablehlo.dynamic_slice %table_first, %device_first, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %first = stablehlo.reshape %row_first : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %two = stablehlo.constant dense<2> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %0:3 = stablehlo.while(%i = %zero, %start = %first, %sum = %y) : tensor<i32>, tensor<i32>, tensor<2x3xf32>
    cond {
      %go = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %go : tensor<i1>
    } do {
      %1 = "stablehlo.all_reduce"(%x) ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %c = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %c : tensor<f32>
      }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
      %2 = stablehlo.dynamic_slice %1, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
      %3 = stablehlo.add %sum, %2 : tensor<2x3xf32>
      %next = stablehlo.add %i, %two : tensor<i32>
      %later = stablehlo.add %start, %two : tensor<i32>
      stablehlo.return %next, %later, %3 : tensor<i32>, tensor<i32>, tensor<2x3xf32>
    }
  return %0#2 : tensor<2x3xf32>
}

// -----

// A part of a gather that all devices take from the first.
func.func @gather_from_one(%x: tensor<2x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 0, 0, 0]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// A gather cut along another dimension, and one of less than an operand.
func.func @gather_cut_elsewhere(%x: tensor<2x4xf32>, %y: tensor<2x4xf32>) -> (tensor<8x1xf32>, tensor<1x4xf32>) {
  %0 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x4xf32>) -> tensor<8x4xf32>
  %1 = "stablehlo.all_gather"(%y) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x4xf32>) -> tensor<8x4xf32>
  %table_i = stablehlo.constant dense<[0, 1, 2, 3]> : tensor<4xi32>
  %device_i = stablehlo.partition_id : tensor<ui32>
  %row_i = stablehlo.dynamic_slice %table_i, %device_i, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %i = stablehlo.reshape %row_i : (tensor<1xi32>) -> tensor<i32>
  %table_j = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_j = stablehlo.partition_id : tensor<ui32>
  %row_j = stablehlo.dynamic_slice %table_j, %device_j, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %j = stablehlo.reshape %row_j : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %2 = stablehlo.dynamic_slice %0, %zero, %i, sizes = [8, 1] : (tensor<8x4xf32>, tensor<i32>, tensor<i32>) -> tensor<8x1xf32>
  %3 = stablehlo.dynamic_slice %1, %j, %zero, sizes = [1, 4] : (tensor<8x4xf32>, tensor<i32>, tensor<i32>) -> tensor<1x4xf32>
  return %2, %3 : tensor<8x1xf32>, tensor<1x4xf32>
}

// -----

// A larger part of a gather that is used as well: the slice costs nothing.
sdy.mesh @mesh = <["x"=2, "y"=2]>
func.func @gather_used_otherwise(%x: tensor<2x3xf32>) -> (tensor<4x3xf32>, tensor<8x3xf32>) {
  %0 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">, #stablehlo.axis_ref<name = "y">]>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 0, 4, 4]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [4, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
  return %1, %0 : tensor<4x3xf32>, tensor<8x3xf32>
}

// -----

// The same exchange again, which is not its inverse.
func.func @exchanged_twice(%x: tensor<16x16xf32>) -> tensor<1x256xf32> {
  %0 = "stablehlo.all_to_all"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 4 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<16x16xf32>) -> tensor<4x64xf32>
  %1 = "stablehlo.all_to_all"(%0) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 4 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<4x64xf32>) -> tensor<1x256xf32>
  return %1 : tensor<1x256xf32>
}

// -----

// An exchange back in another order of the group.
func.func @exchanged_back_otherwise(%x: tensor<16x16xf32>) -> tensor<16x16xf32> {
  %0 = "stablehlo.all_to_all"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 4 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<16x16xf32>) -> tensor<4x64xf32>
  %1 = "stablehlo.all_to_all"(%0) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, split_dimension = 1 : i64, concat_dimension = 0 : i64, split_count = 4 : i64, replica_groups = dense<[[1, 0, 2, 3]]> : tensor<1x4xi64>} : (tensor<4x64xf32>) -> tensor<16x16xf32>
  return %1 : tensor<16x16xf32>
}

// -----

// A reshape in between that is no transpose.
func.func @exchanged_and_reshaped(%x: tensor<8x3xf32>) -> tensor<3x8xf32> {
  %0 = "stablehlo.all_to_all"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 4 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<8x3xf32>) -> tensor<2x12xf32>
  %1 = stablehlo.reshape %0 : (tensor<2x12xf32>) -> tensor<12x2xf32>
  %2 = "stablehlo.all_to_all"(%1) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 4 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<12x2xf32>) -> tensor<3x8xf32>
  return %2 : tensor<3x8xf32>
}

// -----

// An offset that is said to be the same along an axis and is not.
sdy.mesh @mesh = <["x"=2, "y"=2]>
func.func @false_replication(%x: tensor<8x3xf32>) -> tensor<8x3xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{}, {}]>] out_shardings=[<@mesh, [{"x"}, {}]>] manual_axes={"x"} (%local: tensor<8x3xf32>) {
    %1 = "stablehlo.all_reduce"(%local) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">]>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
    %start = sdy.manual_computation() in_shardings=[] out_shardings=[<@mesh, []>] manual_axes={"y"} () {
      %table_inner = stablehlo.constant dense<[0, 4, 4, 0]> : tensor<4xi32>
      %device_inner = stablehlo.partition_id : tensor<ui32>
      %row_inner = stablehlo.dynamic_slice %table_inner, %device_inner, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
      %inner = stablehlo.reshape %row_inner : (tensor<1xi32>) -> tensor<i32>
      sdy.return %inner : tensor<i32>
    } : () -> tensor<i32>
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %2 = stablehlo.dynamic_slice %1, %start, %zero, sizes = [4, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
    sdy.return %2 : tensor<4x3xf32>
  } : (tensor<8x3xf32>) -> tensor<8x3xf32>
  return %0 : tensor<8x3xf32>
}

// -----

// A device that no other sends to gets zeros, not the constant; not all elements are alike.
func.func @other_constants() -> (tensor<2xi32>, tensor<8xi32>) {
  %seven = stablehlo.constant dense<7> : tensor<2xi32>
  %0 = "stablehlo.collective_permute"(%seven) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2], [2, 3]]> : tensor<3x2xi64>} : (tensor<2xi32>) -> tensor<2xi32>
  %two = stablehlo.constant dense<[7, 8]> : tensor<2xi32>
  %1 = "stablehlo.all_gather"(%two) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2xi32>) -> tensor<8xi32>
  return %0, %1 : tensor<2xi32>, tensor<8xi32>
}

// -----

// A complex constant, whose elements the bindings do not hand out.
func.func @complex_constant() -> tensor<8xcomplex<f32>> {
  %0 = stablehlo.constant dense<(1.0, 2.0)> : tensor<2xcomplex<f32>>
  %1 = "stablehlo.all_gather"(%0) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2xcomplex<f32>>) -> tensor<8xcomplex<f32>>
  return %1 : tensor<8xcomplex<f32>>
}

// -----

// Padded, and taken by two devices of a group.
module attributes {mhlo.num_partitions = 4 : i32} {
func.func @padded_for_two(%x: tensor<2x3xf32>, %v: tensor<f32>) -> (tensor<12x3xf32>) {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %p = stablehlo.pad %g, %v, low = [0, 0], high = [40, 0], interior = [0, 0] : (tensor<8x3xf32>, tensor<f32>) -> tensor<48x3xf32>
  %t = stablehlo.constant dense<[0, 0, 12, 24]> : tensor<4xi32>
  %d = stablehlo.partition_id : tensor<ui32>
  %r = stablehlo.dynamic_slice %t, %d, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %s = stablehlo.reshape %r : (tensor<1xi32>) -> tensor<i32>
  %z = stablehlo.constant dense<0> : tensor<i32>
  %y = stablehlo.dynamic_slice %p, %s, %z, sizes = [12, 3] : (tensor<48x3xf32>, tensor<i32>, tensor<i32>) -> tensor<12x3xf32>
  return %y : tensor<12x3xf32>
}
}

// -----

// Padded, and cut in the midst of what was gathered.
module attributes {mhlo.num_partitions = 4 : i32} {
func.func @padded_cut(%x: tensor<2x3xf32>, %v: tensor<f32>) -> (tensor<4x3xf32>) {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %p = stablehlo.pad %g, %v, low = [0, 0], high = [8, 0], interior = [0, 0] : (tensor<8x3xf32>, tensor<f32>) -> tensor<16x3xf32>
  %t = stablehlo.constant dense<[0, 4, 8, 12]> : tensor<4xi32>
  %d = stablehlo.partition_id : tensor<ui32>
  %r = stablehlo.dynamic_slice %t, %d, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %s = stablehlo.reshape %r : (tensor<1xi32>) -> tensor<i32>
  %z = stablehlo.constant dense<0> : tensor<i32>
  %y = stablehlo.dynamic_slice %p, %s, %z, sizes = [4, 3] : (tensor<16x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
  return %y : tensor<4x3xf32>
}
}

// -----

// Padded between the elements.
module attributes {mhlo.num_partitions = 4 : i32} {
func.func @padded_between(%x: tensor<2x3xf32>, %v: tensor<f32>) -> (tensor<18x3xf32>) {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %p = stablehlo.pad %g, %v, low = [0, 0], high = [3, 0], interior = [1, 0] : (tensor<8x3xf32>, tensor<f32>) -> tensor<18x3xf32>
  %t = stablehlo.constant dense<[0, 1, 2, 3]> : tensor<4xi32>
  %d = stablehlo.partition_id : tensor<ui32>
  %r = stablehlo.dynamic_slice %t, %d, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %s = stablehlo.reshape %r : (tensor<1xi32>) -> tensor<i32>
  %z = stablehlo.constant dense<0> : tensor<i32>
  %y = stablehlo.dynamic_slice %p, %s, %z, sizes = [18, 3] : (tensor<18x3xf32>, tensor<i32>, tensor<i32>) -> tensor<18x3xf32>
  return %y : tensor<18x3xf32>
}
}

// -----

// What is padded is used whole, too.
module attributes {mhlo.num_partitions = 4 : i32} {
func.func @padded_used(%x: tensor<2x3xf32>, %v: tensor<f32>) -> (tensor<12x3xf32>, tensor<48x3xf32>) {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %p = stablehlo.pad %g, %v, low = [0, 0], high = [40, 0], interior = [0, 0] : (tensor<8x3xf32>, tensor<f32>) -> tensor<48x3xf32>
  %t = stablehlo.constant dense<[0, 12, 24, 36]> : tensor<4xi32>
  %d = stablehlo.partition_id : tensor<ui32>
  %r = stablehlo.dynamic_slice %t, %d, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %s = stablehlo.reshape %r : (tensor<1xi32>) -> tensor<i32>
  %z = stablehlo.constant dense<0> : tensor<i32>
  %y = stablehlo.dynamic_slice %p, %s, %z, sizes = [12, 3] : (tensor<48x3xf32>, tensor<i32>, tensor<i32>) -> tensor<12x3xf32>
  return %y, %p : tensor<12x3xf32>, tensor<48x3xf32>
}
}

// -----

// XLA:TPU refuses a reduce_scatter of complex numbers.
module attributes {mhlo.num_partitions = 4 : i32} {
func.func @complex(%x: tensor<32x64xcomplex<f32>>) -> (tensor<8x64xcomplex<f32>>) {
  %r = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<complex<f32>>, %b: tensor<complex<f32>>):
    %e = stablehlo.add %a, %b : tensor<complex<f32>>
    stablehlo.return %e : tensor<complex<f32>>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<32x64xcomplex<f32>>) -> tensor<32x64xcomplex<f32>>
  %t = stablehlo.constant dense<[0, 8, 16, 24]> : tensor<4xi32>
  %d = stablehlo.partition_id : tensor<ui32>
  %q = stablehlo.dynamic_slice %t, %d, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %s = stablehlo.reshape %q : (tensor<1xi32>) -> tensor<i32>
  %z = stablehlo.constant dense<0> : tensor<i32>
  %y = stablehlo.dynamic_slice %r, %s, %z, sizes = [8, 64] : (tensor<32x64xcomplex<f32>>, tensor<i32>, tensor<i32>) -> tensor<8x64xcomplex<f32>>
  return %y : tensor<8x64xcomplex<f32>>
}
}

// -----

// Padding of ones, of which four devices would make fours.
module attributes {mhlo.num_partitions = 4 : i32} {
func.func @padded_by_ones(%x: tensor<7x3xf32>) -> (tensor<2x3xf32>) {
  %r = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %e = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %e : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<7x3xf32>) -> tensor<7x3xf32>
  %n = stablehlo.constant dense<1.000000e+00> : tensor<f32>
  %p = stablehlo.pad %r, %n, low = [0, 0], high = [1, 0], interior = [0, 0] : (tensor<7x3xf32>, tensor<f32>) -> tensor<8x3xf32>
  %t = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %d = stablehlo.partition_id : tensor<ui32>
  %q = stablehlo.dynamic_slice %t, %d, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %s = stablehlo.reshape %q : (tensor<1xi32>) -> tensor<i32>
  %z = stablehlo.constant dense<0> : tensor<i32>
  %y = stablehlo.dynamic_slice %p, %s, %z, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %y : tensor<2x3xf32>
}
}

// -----

// A pad with what does not sum to itself, before a slice that otherwise scatters.
func.func @padded_with_ones(%x: tensor<8x3xf32>) -> tensor<3x3xf32> {
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

// A maximum of sums is not one reduction.
func.func @maximum_of_sums(%x: tensor<8x3xf32>) -> tensor<4x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %1 = "stablehlo.all_reduce"(%0) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.maximum %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 0, 4, 4]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %2 = stablehlo.dynamic_slice %1, %start, %zero, sizes = [4, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
  return %2 : tensor<4x3xf32>
}

// -----

// The first sum is used by itself, too.
func.func @sum_of_a_used_sum(%x: tensor<8x3xf32>) -> (tensor<4x3xf32>, tensor<8x3xf32>) {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
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
  return %2, %0 : tensor<4x3xf32>, tensor<8x3xf32>
}

// -----

// Sums over the same groups twice count each device twice.
func.func @sum_of_the_same_sum(%x: tensor<8x3xf32>) -> tensor<4x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
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
  return %2 : tensor<4x3xf32>
}

// -----

// A function that slices where data says: the call stays.
module {
  func.func @sliced_by_data(%x: tensor<8x3xf32>, %i: tensor<i32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %1 = stablehlo.reshape %0 : (tensor<8x3xf32>) -> tensor<4x2x3xf32>
  %2 = func.call @row(%1, %i) : (tensor<4x2x3xf32>, tensor<i32>) -> tensor<2x3xf32>
  return %2 : tensor<2x3xf32>
  }
  func.func private @row(%v: tensor<4x2x3xf32>, %i: tensor<i32>) -> tensor<2x3xf32> {
    %r = func.call @part(%v, %i) : (tensor<4x2x3xf32>, tensor<i32>) -> tensor<1x2x3xf32>
    %s = stablehlo.reshape %r : (tensor<1x2x3xf32>) -> tensor<2x3xf32>
    return %s : tensor<2x3xf32>
  }
  func.func private @part(%v: tensor<4x2x3xf32>, %i: tensor<i32>) -> tensor<1x2x3xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %r = stablehlo.dynamic_slice %v, %i, %zero, %zero, sizes = [1, 2, 3] : (tensor<4x2x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x3xf32>
    return %r : tensor<1x2x3xf32>
  }
}
