// RUN: stablehlo-tools opt %s --split-input-file > %t.before.mlir
// RUN: stablehlo-tools opt %s -p reassociate-collectives --split-input-file > %t.after.mlir
// RUN: diff %t.before.mlir %t.after.mlir
// RUN: filecheck %s --input-file %t.after.mlir
// RUN: stablehlo-tools opt %s -p 'reassociate-collectives{explain}' --split-input-file 2>&1 >%t.explained.mlir | filecheck %s --check-prefix=EXPLAINED
// EXPLAINED: note: two reductions over devices that are combined stay separate: their process groups differ (C4)
// EXPLAINED: note: two reductions over devices that are combined stay separate: they differ in mhlo.frontend_attributes collective_group_key (C6)
// EXPLAINED: stay separate: one collective would move more bytes than both do
// EXPLAINED: stay separate: the ops on their results differ
// EXPLAINED: stay separate: they scatter along different dimensions

// Something else uses one of them: it would be reduced all the same.
// CHECK-LABEL: module @used_elsewhere
// CHECK-COUNT-2: "stablehlo.all_reduce"
module @used_elsewhere attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %c = stablehlo.add %a, %b : tensor<8xf32>
  return %c, %a : tensor<8xf32>, tensor<8xf32>
}
}

// -----

// One adds and one takes the maximum; or both do something else than the sum.
// CHECK-LABEL: module @kinds
// CHECK-COUNT-2: "stablehlo.all_reduce"
module @kinds attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<8xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.maximum %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %c = stablehlo.add %a, %b : tensor<8xf32>
  return %c : tensor<8xf32>
}
}

// -----

// The sum of two maxima is no maximum of a sum.
// CHECK-LABEL: module @maxima_added
// CHECK-COUNT-2: "stablehlo.all_reduce"
module @maxima_added attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<8xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.maximum %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.maximum %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %c = stablehlo.add %a, %b : tensor<8xf32>
  return %c : tensor<8xf32>
}
}

// -----

// Other process groups.
// CHECK-LABEL: module @groups
// CHECK-COUNT-2: "stablehlo.all_reduce"
module @groups attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<8xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0], [1]]> : tensor<2x1xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %c = stablehlo.add %a, %b : tensor<8xf32>
  return %c : tensor<8xf32>
}
}

// -----

// What keeps collectives apart for XLA keeps them apart here.
// CHECK-LABEL: module @keys
// CHECK-COUNT-2: "stablehlo.all_reduce"
module @keys attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<8xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids, mhlo.frontend_attributes = {collective_group_key = "0"}} : (tensor<8xf32>) -> tensor<8xf32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %c = stablehlo.add %a, %b : tensor<8xf32>
  return %c : tensor<8xf32>
}
}

// -----

// A sum of bytes wraps around, and that of what they are widened to does not.
// CHECK-LABEL: module @wrapping
// CHECK-COUNT-2: "stablehlo.all_reduce"
module @wrapping attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xi8>, %y: tensor<8xi8>) -> (tensor<8xi32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<i8>, %r: tensor<i8>):
    %s = stablehlo.add %l, %r : tensor<i8>
    stablehlo.return %s : tensor<i8>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xi8>) -> tensor<8xi8>
  %a1 = stablehlo.convert %a : (tensor<8xi8>) -> tensor<8xi32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<i8>, %r: tensor<i8>):
    %s = stablehlo.add %l, %r : tensor<i8>
    stablehlo.return %s : tensor<i8>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xi8>) -> tensor<8xi8>
  %b1 = stablehlo.convert %b : (tensor<8xi8>) -> tensor<8xi32>
  %c = stablehlo.add %a1, %b1 : tensor<8xi32>
  return %c : tensor<8xi32>
}
}

// -----

// A convert to integers rounds: the sum of what is rounded is another.
// CHECK-LABEL: module @lossy
// CHECK-COUNT-2: "stablehlo.all_reduce"
module @lossy attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<8xi32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %a1 = stablehlo.convert %a : (tensor<8xf32>) -> tensor<8xi32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %b1 = stablehlo.convert %b : (tensor<8xf32>) -> tensor<8xi32>
  %c = stablehlo.add %a1, %b1 : tensor<8xi32>
  return %c : tensor<8xi32>
}
}

// -----

// Padded, one would move more than both.
// CHECK-LABEL: module @padded_more
// CHECK-COUNT-2: "stablehlo.all_reduce"
module @padded_more attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<17xf32>) {
  %0 = stablehlo.constant dense<0.0> : tensor<f32>
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %a1 = stablehlo.pad %a, %0, low = [0], high = [9], interior = [0] : (tensor<8xf32>, tensor<f32>) -> tensor<17xf32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %b1 = stablehlo.pad %b, %0, low = [9], high = [0], interior = [0] : (tensor<8xf32>, tensor<f32>) -> tensor<17xf32>
  %c = stablehlo.add %a1, %b1 : tensor<17xf32>
  return %c : tensor<17xf32>
}
}

// -----

// A pad with ones would be added up over devices.
// CHECK-LABEL: module @padded_ones
// CHECK-COUNT-2: "stablehlo.all_reduce"
module @padded_ones attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<9xf32>) {
  %0 = stablehlo.constant dense<1.0> : tensor<f32>
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %a1 = stablehlo.pad %a, %0, low = [0], high = [1], interior = [0] : (tensor<8xf32>, tensor<f32>) -> tensor<9xf32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %b1 = stablehlo.pad %b, %0, low = [0], high = [1], interior = [0] : (tensor<8xf32>, tensor<f32>) -> tensor<9xf32>
  %c = stablehlo.add %a1, %b1 : tensor<9xf32>
  return %c : tensor<9xf32>
}
}

// -----

// They are divided by different numbers.
// CHECK-LABEL: module @scales
// CHECK-COUNT-2: "stablehlo.all_reduce"
module @scales attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<8xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %n = stablehlo.constant dense<2.0> : tensor<8xf32>
  %a1 = stablehlo.divide %a, %n : tensor<8xf32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %m = stablehlo.constant dense<4.0> : tensor<8xf32>
  %b1 = stablehlo.divide %b, %m : tensor<8xf32>
  %c = stablehlo.add %a1, %b1 : tensor<8xf32>
  return %c : tensor<8xf32>
}
}

// -----

// Integers that are divided are rounded.
// CHECK-LABEL: module @divided_integers
// CHECK-COUNT-2: "stablehlo.all_reduce"
module @divided_integers attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xi32>, %y: tensor<8xi32>) -> (tensor<8xi32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<i32>, %r: tensor<i32>):
    %s = stablehlo.add %l, %r : tensor<i32>
    stablehlo.return %s : tensor<i32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xi32>) -> tensor<8xi32>
  %n = stablehlo.constant dense<2> : tensor<8xi32>
  %a1 = stablehlo.divide %a, %n : tensor<8xi32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<i32>, %r: tensor<i32>):
    %s = stablehlo.add %l, %r : tensor<i32>
    stablehlo.return %s : tensor<i32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xi32>) -> tensor<8xi32>
  %b1 = stablehlo.divide %b, %n : tensor<8xi32>
  %c = stablehlo.add %a1, %b1 : tensor<8xi32>
  return %c : tensor<8xi32>
}
}

// -----

// Slices at different places, each device's own.
// CHECK-LABEL: module @offsets
// CHECK-COUNT-2: "stablehlo.all_reduce"
module @offsets attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>, %i: tensor<i32>, %j: tensor<i32>) -> (tensor<4xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %a1 = stablehlo.dynamic_slice %a, %i, sizes = [4] : (tensor<8xf32>, tensor<i32>) -> tensor<4xf32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %b1 = stablehlo.dynamic_slice %b, %j, sizes = [4] : (tensor<8xf32>, tensor<i32>) -> tensor<4xf32>
  %c = stablehlo.add %a1, %b1 : tensor<4xf32>
  return %c : tensor<4xf32>
}
}

// -----

// A term that is no collective would be added once for each device.
// CHECK-LABEL: module @one_term
// CHECK-COUNT-2: "stablehlo.all_reduce"
module @one_term attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>, %z: tensor<8xf32>) -> (tensor<8xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %b = stablehlo.add %a, %y : tensor<8xf32>
  %d = "stablehlo.all_reduce"(%z) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.maximum %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %c = stablehlo.add %b, %d : tensor<8xf32>
  return %c : tensor<8xf32>
}
}

// -----

// A square is no scale.
// CHECK-LABEL: module @square
// CHECK: "stablehlo.all_reduce"
module @square attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>) -> (tensor<8xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %b = stablehlo.multiply %a, %a : tensor<8xf32>
  %c = stablehlo.add %b, %b : tensor<8xf32>
  return %c : tensor<8xf32>
}
}

// -----

// They scatter along different dimensions.
// CHECK-LABEL: module @dimensions
// CHECK-COUNT-2: "stablehlo.reduce_scatter"
module @dimensions attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4x4xf32>, %y: tensor<4x4xf32>) -> (tensor<2x2xf32>) {
  %a = "stablehlo.reduce_scatter"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids, scatter_dimension = 0 : i64} : (tensor<4x4xf32>) -> tensor<2x4xf32>
  %a1 = stablehlo.slice %a [0:2, 0:2] : (tensor<2x4xf32>) -> tensor<2x2xf32>
  %b = "stablehlo.reduce_scatter"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids, scatter_dimension = 1 : i64} : (tensor<4x4xf32>) -> tensor<4x2xf32>
  %b1 = stablehlo.slice %b [0:2, 0:2] : (tensor<4x2xf32>) -> tensor<2x2xf32>
  %c = stablehlo.add %a1, %b1 : tensor<2x2xf32>
  return %c : tensor<2x2xf32>
}
}

// -----

// The sum with another value has another user.
module @inner_sum_is_used attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>, %own: tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %c = stablehlo.add %own, %a : tensor<8xf32>
  %d = stablehlo.add %c, %b : tensor<8xf32>
  return %c, %d : tensor<8xf32>, tensor<8xf32>
}
}
