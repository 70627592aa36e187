// RUN: stablehlo-tools opt %s -p 'hierarchical-collectives{rows=2}' --split-input-file | filecheck %s
// RUN: stablehlo-tools opt %s -p 'hierarchical-collectives{rows=2 explain}' --split-input-file -o /dev/null 2>&1 | filecheck %s --check-prefix=SAID

// A gather goes along the rows of two, in the order of the group, and then along the columns; the
// second has a channel of its own.
// CHECK-LABEL: func.func @gather
// CHECK: %[[ROW:.*]] = "stablehlo.all_gather"(%arg0) <{all_gather_dim = 1 : i64, channel_handle = #stablehlo.channel_handle<handle = [[ONE:.*]], type = 1>, replica_groups = dense<{{\[\[}}0, 2], [1, 3]]> : tensor<2x2xi64>, use_global_device_ids}> : (tensor<3x2xf32>) -> tensor<3x4xf32>
// CHECK-NEXT: %[[ALL:.*]] = "stablehlo.all_gather"(%[[ROW]]) <{all_gather_dim = 1 : i64
// CHECK-NOT: handle = [[ONE]],
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 1], [2, 3]]> : tensor<2x2xi64>, use_global_device_ids}> : (tensor<3x4xf32>) -> tensor<3x8xf32>
// CHECK-NEXT: return %[[ALL]]
// SAID: hierarchical-collectives: all_gather over 4: over 2 and 2 in
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @gather(%x: tensor<3x2xf32>) -> tensor<3x8xf32> {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 1 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 2, 1, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<3x2xf32>) -> tensor<3x8xf32>
  return %g : tensor<3x8xf32>
}
}

// -----

// A scatter goes along the columns first: then each device has the part that it had.
// CHECK-LABEL: func.func @scatter
// CHECK: %[[PART:.*]] = "stablehlo.reduce_scatter"(%arg0) <{
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4], [1, 3, 5]]>
// CHECK-SAME: scatter_dimension = 0 : i64
// CHECK: stablehlo.maximum
// CHECK: (tensor<12x5xi32>) -> tensor<4x5xi32>
// CHECK: "stablehlo.reduce_scatter"(%[[PART]]) <{
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 1], [2, 3], [4, 5]]>
// CHECK: stablehlo.maximum
// CHECK: (tensor<4x5xi32>) -> tensor<2x5xi32>
// SAID: hierarchical-collectives: reduce_scatter over 6: over 3 and 2 in
module attributes {mhlo.num_partitions = 6 : i32, mhlo.num_replicas = 1 : i32} {
func.func @scatter(%x: tensor<12x5xi32>) -> tensor<2x5xi32> {
  %y = "stablehlo.reduce_scatter"(%x) ({
  ^bb0(%l: tensor<i32>, %r: tensor<i32>):
    %s = stablehlo.maximum %l, %r : tensor<i32>
    stablehlo.return %s : tensor<i32>
  }) {scatter_dimension = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5]]> : tensor<1x6xi64>, use_global_device_ids} : (tensor<12x5xi32>) -> tensor<2x5xi32>
  return %y : tensor<2x5xi32>
}
}

// -----

// A sum is scattered along the rows, summed along the columns, and gathered; by the first dimension
// that the rows divide.
// CHECK-LABEL: func.func @sum
// CHECK: %[[PART:.*]] = "stablehlo.reduce_scatter"(%arg0) <{
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 1], [2, 3]]>
// CHECK-SAME: scatter_dimension = 1 : i64
// CHECK: (tensor<3x6xf32>) -> tensor<3x3xf32>
// CHECK: %[[SUM:.*]] = "stablehlo.all_reduce"(%[[PART]]) <{
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2], [1, 3]]>
// CHECK: (tensor<3x3xf32>) -> tensor<3x3xf32>
// CHECK: "stablehlo.all_gather"(%[[SUM]]) <{all_gather_dim = 1 : i64
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 1], [2, 3]]>
// CHECK-SAME: (tensor<3x3xf32>) -> tensor<3x6xf32>
// SAID: hierarchical-collectives: all_reduce over 4: over 2 and 2 and 2 in
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @sum(%x: tensor<3x6xf32>) -> tensor<3x6xf32> {
  %y = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<3x6xf32>) -> tensor<3x6xf32>
  return %y : tensor<3x6xf32>
}
}

// -----

// Groups by the axes of a mesh stay so; in a loop as elsewhere.
// CHECK-LABEL: func.func @axes
// CHECK: "stablehlo.all_gather"({{.*}}axes = [#stablehlo.axis_ref<name = "b">]
// CHECK: "stablehlo.all_gather"({{.*}}axes = [#stablehlo.axis_ref<name = "a">]
module attributes {mhlo.num_partitions = 6 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["a"=3, "b"=2]>
func.func @axes(%n: tensor<i32>, %x: tensor<2x12xf32>) -> tensor<2x12xf32> {
  %one = stablehlo.constant dense<1> : tensor<i32>
  %0:2 = stablehlo.while(%i = %n, %h = %x) : tensor<i32>, tensor<2x12xf32>
  cond {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %c = stablehlo.compare GT, %i, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %p = stablehlo.slice %h [0:2, 0:2] : (tensor<2x12xf32>) -> tensor<2x2xf32>
    %g = "stablehlo.all_gather"(%p) {all_gather_dim = 1 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "a">, #stablehlo.axis_ref<name = "b">]>, use_global_device_ids} : (tensor<2x2xf32>) -> tensor<2x12xf32>
    %j = stablehlo.subtract %i, %one : tensor<i32>
    stablehlo.return %j, %g : tensor<i32>, tensor<2x12xf32>
  }
  return %0#1 : tensor<2x12xf32>
}
}
