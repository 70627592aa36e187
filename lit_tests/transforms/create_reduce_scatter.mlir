// RUN: stablehlo-tools opt %s -p create-reduce-scatter --split-input-file | tee %t.once | filecheck %s --enable-var-scope

// A second run changes nothing.
// RUN: stablehlo-tools opt %s -p create-reduce-scatter,create-reduce-scatter --split-input-file | diff -u %t.once -

// What Shardy writes: an offset looked up by partition. All of it goes.
// CHECK-LABEL: func.func @offset_from_a_table
// CHECK-SAME: (%[[X:.+]]: tensor<8x3xf32>)
// CHECK-NEXT: %[[PART:.+]] = "stablehlo.reduce_scatter"(%[[X]])
// CHECK-SAME: handle = 1, type = 1
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 1, 2, 3]]>
// CHECK-SAME: scatter_dimension = 0
// CHECK-SAME: use_global_device_ids
// CHECK-NEXT: ^bb0
// CHECK-NEXT: stablehlo.add
// CHECK-NEXT: stablehlo.return
// CHECK-NEXT: (tensor<8x3xf32>) -> tensor<2x3xf32>
// CHECK-NEXT: return %[[PART]]
func.func @offset_from_a_table(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
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

// -----

// What people write: arithmetic, here through a private function and a wrap of negative indices.
// CHECK-LABEL: func.func @offset_from_arithmetic
// CHECK-NEXT: %[[PART:.+]] = "stablehlo.reduce_scatter"
// CHECK-COUNT-1: return %[[PART]]
func.func @offset_from_arithmetic(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %device = stablehlo.partition_id : tensor<ui32>
  %index = stablehlo.convert %device : (tensor<ui32>) -> tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %wrapped = call @remainder(%index, %four) : (tensor<i32>, tensor<i32>) -> tensor<i32>
  %two = stablehlo.constant dense<2> : tensor<i32>
  %product = stablehlo.multiply %wrapped, %two : tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %below = stablehlo.compare LT, %product, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
  %eight = stablehlo.constant dense<8> : tensor<i32>
  %above = stablehlo.add %product, %eight : tensor<i32>
  %start = stablehlo.select %below, %above, %product : tensor<i1>, tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

func.func private @remainder(%x: tensor<i32>, %y: tensor<i32>) -> tensor<i32> {
  %0 = stablehlo.remainder %x, %y : tensor<i32>
  return %0 : tensor<i32>
}

// -----

// Member k of the new group takes chunk k: other orders of the old one are put right.
// CHECK-LABEL: func.func @order_of_the_group
// CHECK-NEXT: "stablehlo.reduce_scatter"
// CHECK-SAME: replica_groups = dense<{{\[\[}}2, 0, 3, 1]]>
func.func @order_of_the_group(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[2, 6, 0, 4]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// An offset that is clamped counts as clamped.
// CHECK-LABEL: func.func @clamped_offsets
// CHECK-NEXT: "stablehlo.reduce_scatter"
// CHECK-NOT: stablehlo.all_reduce
func.func @clamped_offsets(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[-5, 2, 4, 100]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// Any reduction that does not mind the order.
// CHECK-LABEL: func.func @maximum
// CHECK-NEXT: "stablehlo.reduce_scatter"
// CHECK-NEXT: ^bb0
// CHECK-NEXT: stablehlo.maximum
func.func @maximum(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.maximum %a, %b : tensor<f32>
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

// Replicas in the place of partitions: no channel, no global ids, and none afterwards.
// CHECK-LABEL: func.func @replicas
// CHECK-NEXT: "stablehlo.reduce_scatter"
// CHECK-SAME: <{{[{]}}replica_groups = dense<{{\[\[}}0, 1, 2, 3]]> : tensor<1x4xi64>, scatter_dimension = 0 : i64}>
func.func @replicas(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.replica_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// Summed over two axes and cut by the slower: the other sum is of the small part. Axes stay axes.
sdy.mesh @mesh = <["x"=2, "y"=2]>
// CHECK-LABEL: func.func @one_axis_of_two
// CHECK-SAME: (%[[X:.+]]: tensor<8x3xf32>)
// CHECK-NEXT: %[[PART:.+]] = "stablehlo.reduce_scatter"(%[[X]])
// CHECK-SAME: mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">]>
// CHECK: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[PART]])
// CHECK-SAME: mesh = @mesh, axes = [#stablehlo.axis_ref<name = "y">]>
// CHECK: (tensor<4x3xf32>) -> tensor<4x3xf32>
// CHECK-NEXT: return %[[SUM]]
func.func @one_axis_of_two(%x: tensor<8x3xf32>) -> tensor<4x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">, #stablehlo.axis_ref<name = "y">]>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 0, 4, 4]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [4, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
  return %1 : tensor<4x3xf32>
}

// -----

// Cut by both axes, the faster one first: their order is turned round.
sdy.mesh @mesh = <["x"=2, "y"=2]>
// CHECK-LABEL: func.func @axes_in_another_order
// CHECK-NEXT: "stablehlo.reduce_scatter"
// CHECK-SAME: axes = [#stablehlo.axis_ref<name = "y">, #stablehlo.axis_ref<name = "x">]>
func.func @axes_in_another_order(%x: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">, #stablehlo.axis_ref<name = "y">]>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 4, 2, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// A part of an axis: there is no such axis to name, so the groups are written out.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @half_of_an_axis
// CHECK-NEXT: "stablehlo.reduce_scatter"
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2], [1, 3]]>
// CHECK: "stablehlo.all_reduce"
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 1], [2, 3]]>
func.func @half_of_an_axis(%x: tensor<8x3xf32>) -> tensor<4x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">]>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 0, 4, 4]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [4, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
  return %1 : tensor<4x3xf32>
}

// -----

// Groups over a sub-axis stay as they are.
sdy.mesh @mesh = <["x"=4, "z"=2]>
// CHECK-LABEL: func.func @sub_axis
// CHECK-NEXT: "stablehlo.reduce_scatter"
// CHECK-SAME: axes = [#stablehlo.axis_ref<name = "x", sub_axis_info = (2)2>]
func.func @sub_axis(%x: tensor<8x3xf32>) -> tensor<4x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x", sub_axis_info = (2)2>]>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 0, 4, 4, 0, 0, 4, 4]> : tensor<8xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<8xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [4, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
  return %1 : tensor<4x3xf32>
}

// -----

// Two dimensions, each cut by an axis: one reduce_scatter after the other.
sdy.mesh @mesh = <["x"=2, "y"=2]>
// CHECK-LABEL: func.func @two_dimensions
// CHECK-SAME: (%[[X:.+]]: tensor<8x6xf32>)
// CHECK-NEXT: %[[ROWS:.+]] = "stablehlo.reduce_scatter"(%[[X]])
// CHECK-SAME: axis_ref<name = "y">
// CHECK-SAME: scatter_dimension = 0
// CHECK: (tensor<8x6xf32>) -> tensor<4x6xf32>
// CHECK-NEXT: %[[BLOCK:.+]] = "stablehlo.reduce_scatter"(%[[ROWS]])
// CHECK-SAME: axis_ref<name = "x">
// CHECK-SAME: scatter_dimension = 1
// CHECK: (tensor<4x6xf32>) -> tensor<4x3xf32>
// CHECK-NEXT: return %[[BLOCK]]
func.func @two_dimensions(%x: tensor<8x6xf32>) -> tensor<4x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">, #stablehlo.axis_ref<name = "y">]>, use_global_device_ids} : (tensor<8x6xf32>) -> tensor<8x6xf32>
  %table_i = stablehlo.constant dense<[0, 4, 0, 4]> : tensor<4xi32>
  %device_i = stablehlo.partition_id : tensor<ui32>
  %row_i = stablehlo.dynamic_slice %table_i, %device_i, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %i = stablehlo.reshape %row_i : (tensor<1xi32>) -> tensor<i32>
  %table_j = stablehlo.constant dense<[0, 0, 3, 3]> : tensor<4xi32>
  %device_j = stablehlo.partition_id : tensor<ui32>
  %row_j = stablehlo.dynamic_slice %table_j, %device_j, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %j = stablehlo.reshape %row_j : (tensor<1xi32>) -> tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %i, %j, sizes = [4, 3] : (tensor<8x6xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
  return %1 : tensor<4x3xf32>
}

// -----

// What stands between the two is done on the part: layouts, exact arithmetic with uniform values.
// CHECK-LABEL: func.func @layouts_and_scale
// CHECK-SAME: (%[[X:.+]]: tensor<8x3xbf16>, %[[SCALE:.+]]: tensor<f32>)
// CHECK-NEXT: %[[PART:.+]] = "stablehlo.reduce_scatter"(%[[X]])
// CHECK: (tensor<8x3xbf16>) -> tensor<2x3xbf16>
// CHECK-NEXT: %[[WIDE:.+]] = stablehlo.convert %[[PART]] : (tensor<2x3xbf16>) -> tensor<2x3xf32>
// CHECK-NEXT: %[[ALL:.+]] = stablehlo.broadcast_in_dim %[[SCALE]], dims = [] : (tensor<f32>) -> tensor<2x3xf32>
// CHECK-NEXT: %[[SCALED:.+]] = stablehlo.multiply %[[WIDE]], %[[ALL]] : tensor<2x3xf32>
// CHECK-NEXT: %[[TURNED:.+]] = stablehlo.transpose %[[SCALED]], dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>
// CHECK-NEXT: %[[LONG:.+]] = stablehlo.reshape %[[TURNED]] : (tensor<3x2xf32>) -> tensor<3x1x2xf32>
// CHECK-NEXT: %[[HALF:.+]] = stablehlo.constant dense<5.000000e-01> : tensor<3x1x2xf32>
// CHECK-NEXT: %[[SUM:.+]] = stablehlo.add %[[LONG]], %[[HALF]] : tensor<3x1x2xf32>
// CHECK-NEXT: return %[[SUM]]
func.func @layouts_and_scale(%x: tensor<8x3xbf16>, %scale: tensor<f32>) -> tensor<3x1x2xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<bf16>, %b: tensor<bf16>):
    %c = stablehlo.add %a, %b : tensor<bf16>
    stablehlo.return %c : tensor<bf16>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xbf16>) -> tensor<8x3xbf16>
  %wide = stablehlo.convert %0 : (tensor<8x3xbf16>) -> tensor<8x3xf32>
  %all = stablehlo.broadcast_in_dim %scale, dims = [] : (tensor<f32>) -> tensor<8x3xf32>
  %scaled = stablehlo.multiply %wide, %all : tensor<8x3xf32>
  %turned = stablehlo.transpose %scaled, dims = [1, 0] : (tensor<8x3xf32>) -> tensor<3x8xf32>
  %long = stablehlo.reshape %turned : (tensor<3x8xf32>) -> tensor<3x1x8xf32>
  %half = stablehlo.constant dense<5.000000e-01> : tensor<3x1x8xf32>
  %sum = stablehlo.add %long, %half : tensor<3x1x8xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %sum, %zero, %zero, %start, sizes = [3, 1, 2] : (tensor<3x1x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x1x2xf32>
  return %1 : tensor<3x1x2xf32>
}

// -----

// Copies of a value that differs along the cut dimension are made whole, and sliced.
// CHECK-LABEL: func.func @beside_a_bias
// CHECK-NEXT: %[[PART:.+]] = "stablehlo.reduce_scatter"
// CHECK: %[[ALL:.+]] = stablehlo.broadcast_in_dim %{{.+}}, dims = [0] : (tensor<8xf32>) -> tensor<8x3xf32>
// CHECK: %[[BIAS:.+]] = stablehlo.dynamic_slice %[[ALL]]
// CHECK-NEXT: stablehlo.add %[[PART]], %[[BIAS]] : tensor<2x3xf32>
func.func @beside_a_bias(%x: tensor<8x3xf32>, %y: tensor<8xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %1 = stablehlo.broadcast_in_dim %y, dims = [0] : (tensor<8xf32>) -> tensor<8x3xf32>
  %2 = stablehlo.add %0, %1 : tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %3 = stablehlo.dynamic_slice %2, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %3 : tensor<2x3xf32>
}

// -----

// A sum that is copied along another dimension; so is its part.
// CHECK-LABEL: func.func @copied_part
// CHECK-NEXT: %[[PART:.+]] = "stablehlo.reduce_scatter"
// CHECK: %[[COPIED:.+]] = stablehlo.broadcast_in_dim %[[PART]], dims = [1] : (tensor<2xf32>) -> tensor<3x2xf32>
// CHECK-NEXT: return %[[COPIED]]
func.func @copied_part(%x: tensor<8xf32>) -> tensor<3x2xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %1 = stablehlo.broadcast_in_dim %0, dims = [1] : (tensor<8xf32>) -> tensor<3x8xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %2 = stablehlo.dynamic_slice %1, %zero, %start, sizes = [3, 2] : (tensor<3x8xf32>, tensor<i32>, tensor<i32>) -> tensor<3x2xf32>
  return %2 : tensor<3x2xf32>
}

// -----

// A value beside the sum is sliced likewise; here it is a sum itself, and scattered too.
// CHECK-LABEL: func.func @sum_of_two_sums
// CHECK-SAME: (%[[X:.+]]: tensor<8x3xf32>, %[[Y:.+]]: tensor<8x3xf32>)
// CHECK-NEXT: %[[A:.+]] = "stablehlo.reduce_scatter"(%[[X]])
// CHECK: %[[B:.+]] = "stablehlo.reduce_scatter"(%[[Y]])
// CHECK: %[[SUM:.+]] = stablehlo.add %[[A]], %[[B]] : tensor<2x3xf32>
// CHECK-NEXT: return %[[SUM]]
func.func @sum_of_two_sums(%x: tensor<8x3xf32>, %y: tensor<8x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %1 = "stablehlo.all_reduce"(%y) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %2 = stablehlo.add %0, %1 : tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %3 = stablehlo.dynamic_slice %2, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %3 : tensor<2x3xf32>
}

// -----

// A value beside the sum that is an argument is sliced where it stands.
// CHECK-LABEL: func.func @sum_beside_an_argument
// CHECK-SAME: (%[[X:.+]]: tensor<8x3xf32>, %[[Y:.+]]: tensor<3x8xf32>)
// CHECK-NEXT: %[[A:.+]] = "stablehlo.reduce_scatter"(%[[X]])
// CHECK: %[[START:.+]] = stablehlo.reshape
// CHECK: %[[TURNED:.+]] = stablehlo.transpose %[[A]], dims = [1, 0]
// CHECK: %[[B:.+]] = stablehlo.dynamic_slice %[[Y]], %{{.+}}, %[[START]], sizes = [3, 2]
// CHECK-NEXT: %[[SUM:.+]] = stablehlo.subtract %[[TURNED]], %[[B]] : tensor<3x2xf32>
// CHECK-NEXT: return %[[SUM]]
func.func @sum_beside_an_argument(%x: tensor<8x3xf32>, %y: tensor<3x8xf32>) -> tensor<3x2xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %1 = stablehlo.transpose %0, dims = [1, 0] : (tensor<8x3xf32>) -> tensor<3x8xf32>
  %2 = stablehlo.subtract %1, %y : tensor<3x8xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %3 = stablehlo.dynamic_slice %2, %zero, %start, sizes = [3, 2] : (tensor<3x8xf32>, tensor<i32>, tensor<i32>) -> tensor<3x2xf32>
  return %3 : tensor<3x2xf32>
}

// -----

// Two slices of the same part share one reduce_scatter.
// CHECK-LABEL: func.func @same_part_twice
// CHECK-NEXT: %[[PART:.+]] = "stablehlo.reduce_scatter"
// CHECK-NOT: stablehlo.reduce_scatter
// CHECK: return %[[PART]], %[[PART]]
func.func @same_part_twice(%x: tensor<8x3xf32>) -> (tensor<2x3xf32>, tensor<2x3xf32>) {
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
  %2 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1, %2 : tensor<2x3xf32>, tensor<2x3xf32>
}

// -----

// Two different parts take two, which send no more than the all_reduce did.
// CHECK-LABEL: func.func @two_parts
// CHECK-NEXT: %[[ROWS:.+]] = "stablehlo.reduce_scatter"
// CHECK-SAME: scatter_dimension = 0
// CHECK: %[[COLUMNS:.+]] = "stablehlo.reduce_scatter"
// CHECK-SAME: scatter_dimension = 1
// CHECK: return %[[ROWS]], %[[COLUMNS]]
func.func @two_parts(%x: tensor<8x4xf32>) -> (tensor<2x4xf32>, tensor<8x1xf32>) {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %table_i = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_i = stablehlo.partition_id : tensor<ui32>
  %row_i = stablehlo.dynamic_slice %table_i, %device_i, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %i = stablehlo.reshape %row_i : (tensor<1xi32>) -> tensor<i32>
  %table_j = stablehlo.constant dense<[0, 1, 2, 3]> : tensor<4xi32>
  %device_j = stablehlo.partition_id : tensor<ui32>
  %row_j = stablehlo.dynamic_slice %table_j, %device_j, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %j = stablehlo.reshape %row_j : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %i, %zero, sizes = [2, 4] : (tensor<8x4xf32>, tensor<i32>, tensor<i32>) -> tensor<2x4xf32>
  %2 = stablehlo.dynamic_slice %0, %zero, %j, sizes = [8, 1] : (tensor<8x4xf32>, tensor<i32>, tensor<i32>) -> tensor<8x1xf32>
  return %1, %2 : tensor<2x4xf32>, tensor<8x1xf32>
}

// -----

// Of an all_reduce of several operands only the sliced one leaves it.
// CHECK-LABEL: func.func @one_of_two_operands
// CHECK-SAME: (%[[X:.+]]: tensor<8x3xf32>, %[[Y:.+]]: tensor<8x3xf32>)
// CHECK-NEXT: %[[PART:.+]] = "stablehlo.reduce_scatter"(%[[X]])
// CHECK: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[Y]])
// CHECK: return %[[PART]], %[[SUM]]
func.func @one_of_two_operands(%x: tensor<8x3xf32>, %y: tensor<8x3xf32>) -> (tensor<2x3xf32>, tensor<8x3xf32>) {
  %0:2 = "stablehlo.all_reduce"(%x, %y) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>, tensor<8x3xf32>) -> (tensor<8x3xf32>, tensor<8x3xf32>)
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0#0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1, %0#1 : tensor<2x3xf32>, tensor<8x3xf32>
}

// -----

// An offset that all callers agree on, and that a loop hands on; the slice is in the loop.
func.func @offset_through_calls_and_loops(%x: tensor<8x3xf32>, %y: tensor<2x3xf32>) -> tensor<2x3xf32> {
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %0 = call @loop(%x, %y, %start) : (tensor<8x3xf32>, tensor<2x3xf32>, tensor<i32>) -> tensor<2x3xf32>
  return %0 : tensor<2x3xf32>
}

// CHECK-LABEL: func.func private @loop
// CHECK: stablehlo.while
// CHECK: do {
// CHECK: %[[PART:.+]] = "stablehlo.reduce_scatter"
// CHECK: stablehlo.add %{{.+}}, %[[PART]] : tensor<2x3xf32>
// CHECK-NOT: stablehlo.all_reduce
func.func private @loop(%x: tensor<8x3xf32>, %y: tensor<2x3xf32>, %offset: tensor<i32>) -> tensor<2x3xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %0:3 = stablehlo.while(%i = %zero, %start = %offset, %sum = %y) : tensor<i32>, tensor<i32>, tensor<2x3xf32>
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
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %start, %3 : tensor<i32>, tensor<i32>, tensor<2x3xf32>
    }
  return %0#2 : tensor<2x3xf32>
}

// -----

// A manual computation may bring the device's position in as a shard of a table.
sdy.mesh @mesh = <["x"=2, "y"=2]>
// CHECK-LABEL: func.func @position_as_a_shard
// CHECK: sdy.manual_computation
// CHECK: %[[PART:.+]] = "stablehlo.reduce_scatter"
// CHECK-NOT: stablehlo.dynamic_slice
// CHECK: sdy.return %[[PART]]
func.func @position_as_a_shard(%x: tensor<8x3xf32>) -> tensor<8x6xf32> {
  %starts = stablehlo.constant dense<[0, 4]> : tensor<2xi32>
  %0 = sdy.manual_computation(%x, %starts) in_shardings=[<@mesh, [{}, {}]>, <@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}, {"y"}]>] manual_axes={"x", "y"} (%local: tensor<8x3xf32>, %mine: tensor<1xi32>) {
    %1 = "stablehlo.all_reduce"(%local) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">]>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
    %start = stablehlo.reshape %mine : (tensor<1xi32>) -> tensor<i32>
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %2 = stablehlo.dynamic_slice %1, %start, %zero, sizes = [4, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
    sdy.return %2 : tensor<4x3xf32>
  } : (tensor<8x3xf32>, tensor<2xi32>) -> tensor<8x6xf32>
  return %0 : tensor<8x6xf32>
}

// -----

// The device's own part of an all_gather is what it put in; the gather stays where it is used otherwise.
// CHECK-LABEL: func.func @own_part_of_a_gather
// CHECK-SAME: (%[[X:.+]]: tensor<2x3xf32>, %[[Y:.+]]: tensor<2x3xf32>)
// CHECK-NEXT: %[[WHOLE:.+]] = "stablehlo.all_gather"(%[[Y]])
// CHECK-NOT: stablehlo.dynamic_slice
// CHECK: return %[[X]], %[[Y]], %[[WHOLE]]
func.func @own_part_of_a_gather(%x: tensor<2x3xf32>, %y: tensor<2x3xf32>) -> (tensor<2x3xf32>, tensor<2x3xf32>, tensor<8x3xf32>) {
  %0 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %1 = "stablehlo.all_gather"(%y) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %2 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  %3 = stablehlo.dynamic_slice %1, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %2, %3, %1 : tensor<2x3xf32>, tensor<2x3xf32>, tensor<8x3xf32>
}

// -----

// A larger part with its own in it: a gather in smaller groups.
sdy.mesh @mesh = <["x"=2, "y"=2]>
// CHECK-LABEL: func.func @larger_part_of_a_gather
// CHECK-SAME: (%[[X:.+]]: tensor<2x3xf32>)
// CHECK-NEXT: %[[PART:.+]] = "stablehlo.all_gather"(%[[X]])
// CHECK-SAME: axes = [#stablehlo.axis_ref<name = "y">]
// CHECK-SAME: (tensor<2x3xf32>) -> tensor<4x3xf32>
// CHECK-NEXT: return %[[PART]]
func.func @larger_part_of_a_gather(%x: tensor<2x3xf32>) -> tensor<4x3xf32> {
  %0 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">, #stablehlo.axis_ref<name = "y">]>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 0, 4, 4]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [4, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
  return %1 : tensor<4x3xf32>
}

// -----

// The next device's part: it alone is sent.
// CHECK-LABEL: func.func @part_of_another_device
// CHECK-SAME: (%[[X:.+]]: tensor<2x3xf32>)
// CHECK-NEXT: %[[PART:.+]] = "stablehlo.collective_permute"(%[[X]])
// CHECK-SAME: <{{[{]}}channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<{{\[\[}}1, 0], [2, 1], [3, 2], [0, 3]]> : tensor<4x2xi64>}>
// CHECK-NEXT: return %[[PART]]
func.func @part_of_another_device(%x: tensor<2x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[2, 4, 6, 0]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// An exchange and its inverse cancel, with layout ops between them.
// CHECK-LABEL: func.func @exchange_and_back
// CHECK-SAME: (%[[X:.+]]: tensor<8x3xf32>)
// CHECK-NEXT: %[[TURNED:.+]] = stablehlo.transpose %[[X]], dims = [1, 0] : (tensor<8x3xf32>) -> tensor<3x8xf32>
// CHECK-NEXT: %[[LONG:.+]] = stablehlo.reshape %[[TURNED]] : (tensor<3x8xf32>) -> tensor<3x1x8xf32>
// CHECK-NEXT: return %[[LONG]]
func.func @exchange_and_back(%x: tensor<8x3xf32>) -> tensor<3x1x8xf32> {
  %0 = "stablehlo.all_to_all"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 4 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<8x3xf32>) -> tensor<2x12xf32>
  %1 = stablehlo.transpose %0, dims = [1, 0] : (tensor<2x12xf32>) -> tensor<12x2xf32>
  %2 = stablehlo.reshape %1 : (tensor<12x2xf32>) -> tensor<12x1x2xf32>
  %3 = "stablehlo.all_to_all"(%2) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, split_dimension = 0 : i64, concat_dimension = 2 : i64, split_count = 4 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<12x1x2xf32>) -> tensor<3x1x8xf32>
  return %3 : tensor<3x1x8xf32>
}

// -----

// One constant for all elements is the same wherever it goes.
// CHECK-LABEL: func.func @constants
// CHECK-SAME: (%[[X:.+]]: tensor<2x3xf32>)
// CHECK-DAG: %[[A:.+]] = stablehlo.constant dense<1.000000e+00> : tensor<2x12xf32>
// CHECK-DAG: %[[B:.+]] = stablehlo.constant dense<true> : tensor<8xi1>
// CHECK-DAG: %[[C:.+]] = stablehlo.constant dense<7> : tensor<2xi32>
// CHECK-NOT: "stablehlo.
// CHECK: return %[[A]], %[[B]], %[[C]]
func.func @constants(%x: tensor<2x3xf32>) -> (tensor<2x12xf32>, tensor<8xi1>, tensor<2xi32>) {
  %one = stablehlo.constant dense<1.000000e+00> : tensor<f32>
  %ones = stablehlo.broadcast_in_dim %one, dims = [] : (tensor<f32>) -> tensor<8x3xf32>
  %0 = "stablehlo.all_to_all"(%ones) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 4 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<8x3xf32>) -> tensor<2x12xf32>
  %true = stablehlo.constant dense<true> : tensor<2xi1>
  %1 = "stablehlo.all_gather"(%true) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2xi1>) -> tensor<8xi1>
  %seven = stablehlo.constant dense<7> : tensor<2xi32>
  %2 = "stablehlo.collective_permute"(%seven) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2], [2, 3], [3, 0]]> : tensor<4x2xi64>} : (tensor<2xi32>) -> tensor<2xi32>
  return %0, %1, %2 : tensor<2x12xf32>, tensor<8xi1>, tensor<2xi32>
}

// -----

// A gather that is padded, and of which one device takes all: the operands go there, and nobody
// holds what is padded. Devices are told apart by where their slice begins.
// CHECK-LABEL: func.func @padded_for_one
// CHECK-SAME: (%[[X:.+]]: tensor<2x3xf32>, %[[V:.+]]: tensor<f32>)
// CHECK-NEXT: %[[X0:.+]] = "stablehlo.collective_permute"(%[[X]])
// CHECK-SAME: source_target_pairs = dense<[[0, 2]]>
// CHECK-NEXT: %[[X1:.+]] = "stablehlo.collective_permute"(%[[X]])
// CHECK-SAME: source_target_pairs = dense<[[1, 2]]>
// CHECK-NEXT: %[[X3:.+]] = "stablehlo.collective_permute"(%[[X]])
// CHECK-SAME: source_target_pairs = dense<[[3, 2]]>
// CHECK-NOT: stablehlo.all_gather
// CHECK-NOT: stablehlo.pad
// CHECK: %[[HERE:.+]] = stablehlo.compare EQ
// CHECK: %[[WHOLE:.+]] = stablehlo.concatenate %{{.+}}, %[[X0]], %[[X1]], %[[X]], %[[X3]], %{{.+}}, dim = 0
// CHECK-SAME: (tensor<1x3xf32>, tensor<2x3xf32>, tensor<2x3xf32>, tensor<2x3xf32>, tensor<2x3xf32>, tensor<3x3xf32>) -> tensor<12x3xf32>
// CHECK: stablehlo.select %[[HERE]], %[[WHOLE]]
module attributes {mhlo.num_partitions = 4 : i32} {
func.func @padded_for_one(%x: tensor<2x3xf32>, %v: tensor<f32>) -> (tensor<12x3xf32>) {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %p = stablehlo.pad %g, %v, low = [13, 0], high = [27, 0], interior = [0, 0] : (tensor<8x3xf32>, tensor<f32>) -> tensor<48x3xf32>
  %t = stablehlo.constant dense<[0, 24, 12, 36]> : tensor<4xi32>
  %d = stablehlo.partition_id : tensor<ui32>
  %r = stablehlo.dynamic_slice %t, %d, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %s = stablehlo.reshape %r : (tensor<1xi32>) -> tensor<i32>
  %z = stablehlo.constant dense<0> : tensor<i32>
  %y = stablehlo.dynamic_slice %p, %s, %z, sizes = [12, 3] : (tensor<48x3xf32>, tensor<i32>, tensor<i32>) -> tensor<12x3xf32>
  return %y : tensor<12x3xf32>
}
}

// -----

// A sum whose parts are not even: what is summed is padded first, with what sums to itself.
// CHECK-LABEL: func.func @padded_sum
// CHECK-SAME: (%[[X:.+]]: tensor<7x3xf32>)
// CHECK-NEXT: %[[ZERO:.+]] = stablehlo.constant dense<0.000000e+00> : tensor<f32>
// CHECK-NEXT: %[[PADDED:.+]] = stablehlo.pad %[[X]], %[[ZERO]], low = [0, 0], high = [1, 0], interior = [0, 0]
// CHECK-NEXT: %[[PART:.+]] = "stablehlo.reduce_scatter"(%[[PADDED]])
// CHECK-SAME: scatter_dimension = 0
// CHECK: (tensor<8x3xf32>) -> tensor<2x3xf32>
// CHECK-NEXT: return %[[PART]]
func.func @padded_sum(%x: tensor<7x3xf32>) -> tensor<2x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<7x3xf32>) -> tensor<7x3xf32>
  %nothing = stablehlo.constant dense<0.000000e+00> : tensor<f32>
  %padded = stablehlo.pad %0, %nothing, low = [0, 0], high = [1, 0], interior = [0, 0] : (tensor<7x3xf32>, tensor<f32>) -> tensor<8x3xf32>
  %table_start = stablehlo.constant dense<[0, 2, 4, 6]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %padded, %start, %zero, sizes = [2, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}

// -----

// A reshape that puts chunks of the cut dimension side by side: it comes before the sum.
// CHECK-LABEL: func.func @minor_dimension
// CHECK-SAME: (%[[X:.+]]: tensor<3x8xf32>)
// CHECK-NEXT: %[[FLAT:.+]] = stablehlo.reshape %[[X]] : (tensor<3x8xf32>) -> tensor<24xf32>
// CHECK-NEXT: %[[PART:.+]] = "stablehlo.reduce_scatter"(%[[FLAT]])
// CHECK-SAME: scatter_dimension = 0
// CHECK-NOT: slice
// CHECK: return %[[PART]] : tensor<6xf32>
func.func @minor_dimension(%x: tensor<3x8xf32>) -> tensor<6xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<3x8xf32>) -> tensor<3x8xf32>
  %r = stablehlo.reshape %0 : (tensor<3x8xf32>) -> tensor<24xf32>
  %table_start = stablehlo.constant dense<[0, 6, 12, 18]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %1 = stablehlo.dynamic_slice %r, %start, sizes = [6] : (tensor<24xf32>, tensor<i32>) -> tensor<6xf32>
  return %1 : tensor<6xf32>
}

// -----

// A middle dimension that a reshape makes. The ops after the reshape are done on the part.
// CHECK-LABEL: func.func @middle_dimension
// CHECK-SAME: (%[[X:.+]]: tensor<8x3xf32>)
// CHECK-NEXT: %[[PARTS:.+]] = stablehlo.reshape %[[X]] : (tensor<8x3xf32>) -> tensor<2x4x3xf32>
// CHECK-NEXT: %[[PART:.+]] = "stablehlo.reduce_scatter"(%[[PARTS]])
// CHECK-SAME: scatter_dimension = 1
// CHECK: (tensor<2x4x3xf32>) -> tensor<2x1x3xf32>
// CHECK-NEXT: %[[Y:.+]] = stablehlo.negate %[[PART]] : tensor<2x1x3xf32>
// CHECK-NEXT: return %[[Y]]
func.func @middle_dimension(%x: tensor<8x3xf32>) -> tensor<2x1x3xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %r = stablehlo.reshape %0 : (tensor<8x3xf32>) -> tensor<2x4x3xf32>
  %n = stablehlo.negate %r : tensor<2x4x3xf32>
  %table_start = stablehlo.constant dense<[0, 1, 2, 3]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %n, %zero, %start, %zero, sizes = [2, 1, 3] : (tensor<2x4x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<2x1x3xf32>
  return %1 : tensor<2x1x3xf32>
}

// -----

// A sum of sums, and a slice by the axis of the first: its groups scatter, the others sum the parts.
// CHECK-LABEL: func.func @slice_by_the_first_axis
// CHECK-SAME: (%[[X:.+]]: tensor<8x3xf32>)
// CHECK-NEXT: %[[PART:.+]] = "stablehlo.reduce_scatter"(%[[X]])
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2], [1, 3]]>
// CHECK: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[PART]])
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 1], [2, 3]]>
// CHECK: (tensor<4x3xf32>) -> tensor<4x3xf32>
// CHECK-NEXT: return %[[SUM]]
func.func @slice_by_the_first_axis(%x: tensor<8x3xf32>) -> tensor<4x3xf32> {
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
  return %2 : tensor<4x3xf32>
}

// -----

// A slice by the axis of the second: that one scatters, before the first.
// CHECK-LABEL: func.func @slice_by_the_second_axis
// CHECK-SAME: (%[[X:.+]]: tensor<8x3xf32>)
// CHECK-NEXT: %[[PART:.+]] = "stablehlo.reduce_scatter"(%[[X]])
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 1], [2, 3]]>
// CHECK: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[PART]])
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2], [1, 3]]>
// CHECK: return %[[SUM]]
func.func @slice_by_the_second_axis(%x: tensor<8x3xf32>) -> tensor<4x3xf32> {
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
  %table_start = stablehlo.constant dense<[0, 4, 0, 4]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %2 = stablehlo.dynamic_slice %1, %start, %zero, sizes = [4, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
  return %2 : tensor<4x3xf32>
}

// -----

// Functions that slice, called with different starts, as jax writes an index: they are inlined.
// CHECK-LABEL: func.func @sliced_in_functions
// CHECK-SAME: (%[[X:.+]]: tensor<8x3xf32>, %[[Y:.+]]: tensor<8x3xf32>)
// CHECK-NOT: call
// CHECK-NOT: all_reduce
// CHECK: "stablehlo.reduce_scatter"(%[[X]])
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 1, 2, 3]]>
// CHECK: "stablehlo.reduce_scatter"(%[[Y]])
// CHECK-SAME: replica_groups = dense<{{\[\[}}3, 2, 1, 0]]>
// CHECK-NOT: private @row
module {
  func.func @sliced_in_functions(%x: tensor<8x3xf32>, %y: tensor<8x3xf32>) -> (tensor<2x3xf32>, tensor<2x3xf32>) {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %1 = stablehlo.reshape %0 : (tensor<8x3xf32>) -> tensor<4x2x3xf32>
  %table_start = stablehlo.constant dense<[0, 1, 2, 3]> : tensor<4xi32>
  %device_start = stablehlo.partition_id : tensor<ui32>
  %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
  %2 = func.call @row(%1, %start) : (tensor<4x2x3xf32>, tensor<i32>) -> tensor<2x3xf32>
  %3 = "stablehlo.all_reduce"(%y) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %4 = stablehlo.reshape %3 : (tensor<8x3xf32>) -> tensor<4x2x3xf32>
  %table_back = stablehlo.constant dense<[3, 2, 1, 0]> : tensor<4xi32>
  %device_back = stablehlo.partition_id : tensor<ui32>
  %row_back = stablehlo.dynamic_slice %table_back, %device_back, sizes = [1] : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
  %back = stablehlo.reshape %row_back : (tensor<1xi32>) -> tensor<i32>
  %5 = func.call @row(%4, %back) : (tensor<4x2x3xf32>, tensor<i32>) -> tensor<2x3xf32>
  return %2, %5 : tensor<2x3xf32>, tensor<2x3xf32>
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
