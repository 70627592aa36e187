// RUN: stablehlo-tools opt %s --split-input-file > %t.before.mlir
// RUN: stablehlo-tools opt %s -p bucket-collectives --split-input-file > %t.after.mlir
// RUN: diff %t.before.mlir %t.after.mlir
// RUN: filecheck %s --input-file %t.after.mlir
// RUN: stablehlo-tools opt %s -p 'bucket-collectives{explain}' --split-input-file 2>&1 >%t.explained.mlir | filecheck %s --check-prefix=EXPLAINED
// EXPLAINED: note: all_gather is not merged: they differ in mhlo.frontend_attributes _scheduling_group_id (C6)
// EXPLAINED: note: all_gather is not merged: copying its data takes {{.+}} us, more than its latency of {{.+}} us
// EXPLAINED: note: all_reduce is not merged: a mesh axis is left free around it (C10)

// What was merged stays as it is, too.
// RUN: stablehlo-tools opt %S/bucket_collectives.mlir -p bucket-collectives --split-input-file > %t.once.mlir
// RUN: stablehlo-tools opt %t.once.mlir -p bucket-collectives --split-input-file | diff %t.once.mlir -

// One leads to the other.
// CHECK-LABEL: module @dependence
// CHECK-COUNT-2: "stablehlo.all_reduce"
module @dependence attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4x2xf32>) -> (tensor<4x2xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<4x2xf32>
  %b = "stablehlo.all_reduce"(%a) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<4x2xf32>
  return %b : tensor<4x2xf32>
}
}

// -----

// They reduce differently.
// CHECK-LABEL: module @reductions
// CHECK-COUNT-2: "stablehlo.all_reduce"
module @reductions attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4x2xf32>, %y: tensor<4x2xf32>) -> (tensor<4x2xf32>, tensor<4x2xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<4x2xf32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.maximum %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<4x2xf32>
  return %a, %b : tensor<4x2xf32>, tensor<4x2xf32>
}
}

// -----

// The same devices in another order.
// CHECK-LABEL: module @groups
// CHECK-COUNT-2: "stablehlo.all_gather"
module @groups attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4x2xf32>, %y: tensor<4x2xf32>) -> (tensor<8x2xf32>, tensor<8x2xf32>) {
  %a = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<8x2xf32>
  %b = "stablehlo.all_gather"(%y) {all_gather_dim = 0 : i64, replica_groups = dense<[[1, 0]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<8x2xf32>
  return %a, %b : tensor<8x2xf32>, tensor<8x2xf32>
}
}

// -----

// Frontend attributes of one of them only.
// CHECK-LABEL: module @attributes
// CHECK-COUNT-2: "stablehlo.all_gather"
module @attributes attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4x2xf32>, %y: tensor<4x2xf32>) -> (tensor<8x2xf32>, tensor<8x2xf32>) {
  %a = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<8x2xf32>
  %b = "stablehlo.all_gather"(%y) {mhlo.frontend_attributes = {_scheduling_group_id = "1"}, all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<8x2xf32>
  return %a, %b : tensor<8x2xf32>, tensor<8x2xf32>
}
}

// -----

// To copy that much takes longer than the latency that is saved.
// CHECK-LABEL: module @large
// CHECK-COUNT-2: "stablehlo.all_gather"
module @large attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<2048x2048xf32>, %y: tensor<2048x2048xf32>) -> (tensor<4096x2048xf32>, tensor<4096x2048xf32>) {
  %a = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2048x2048xf32>) -> tensor<4096x2048xf32>
  %b = "stablehlo.all_gather"(%y) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2048x2048xf32>) -> tensor<4096x2048xf32>
  return %a, %b : tensor<4096x2048xf32>, tensor<4096x2048xf32>
}
}

// -----

// An axis of the mesh is left free: a partitioner would have to gather what is joined.
// CHECK-LABEL: module @free_axis
// CHECK-COUNT-2: "stablehlo.all_reduce"
module @free_axis attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["x"=2, "y"=2]>
func.func @main(%x: tensor<4x2xf32>, %y: tensor<4x2xf32>) -> (tensor<4x2xf32>, tensor<4x2xf32>) {
  %m:2 = sdy.manual_computation(%x, %y) in_shardings=[<@mesh, [{}, {}]>, <@mesh, [{}, {}]>] out_shardings=[<@mesh, [{}, {}]>, <@mesh, [{}, {}]>] manual_axes={"x"} (%p: tensor<4x2xf32>, %q: tensor<4x2xf32>) {
  %a = "stablehlo.all_reduce"(%p) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<4x2xf32>
  %b = "stablehlo.all_reduce"(%q) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<4x2xf32>
    sdy.return %a, %b : tensor<4x2xf32>, tensor<4x2xf32>
  } : (tensor<4x2xf32>, tensor<4x2xf32>) -> (tensor<4x2xf32>, tensor<4x2xf32>)
  return %m#0, %m#1 : tensor<4x2xf32>, tensor<4x2xf32>
}
}

// -----

// A single one.
// CHECK-LABEL: module @single
// CHECK-COUNT-1: "stablehlo.all_reduce"
module @single attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4x2xf32>) -> (tensor<4x2xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<4x2xf32>
  return %a : tensor<4x2xf32>
}
}

// -----

// Calls stay where nothing is merged.
// CHECK-LABEL: module @calls_stay
// CHECK: call @sum
module @calls_stay attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func private @sum(%x: tensor<4x2xf32>) -> tensor<4x2xf32> {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<4x2xf32>
  return %a : tensor<4x2xf32>
}
func.func @main(%x: tensor<4x2xf32>) -> (tensor<4x2xf32>) {
  %a = call @sum(%x) : (tensor<4x2xf32>) -> tensor<4x2xf32>
  return %a : tensor<4x2xf32>
}
}

// -----

// Shapes that are those of groups of two, in groups of four: no merged shape is right for both.
// CHECK-LABEL: module @unlike_groups_and_shapes
// CHECK-COUNT-2: "stablehlo.reduce_scatter"
module @unlike_groups_and_shapes attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 4 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %a = "stablehlo.reduce_scatter"(%x) <{replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, scatter_dimension = 0 : i64}> ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) : (tensor<8xf32>) -> tensor<4xf32>
  %b = "stablehlo.reduce_scatter"(%y) <{replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, scatter_dimension = 0 : i64}> ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) : (tensor<8xf32>) -> tensor<4xf32>
  return %a, %b : tensor<4xf32>, tensor<4xf32>
}
}
