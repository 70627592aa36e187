// RUN: stablehlo-tools opt %s -p reassociate-collectives --split-input-file | tee %t.once.mlir | filecheck %s
// RUN: stablehlo-tools opt %s -p 'reassociate-collectives{explain}' --split-input-file 2>&1 >%t.mlir | filecheck %s --check-prefix=EXPLAINED
// EXPLAINED: note: two reductions over devices that are combined became one

// A second run changes nothing.
// RUN: stablehlo-tools opt %t.once.mlir -p reassociate-collectives --split-input-file | diff %t.once.mlir -

// The sum of two is the all_reduce of a sum; its channel is the first one's.
// CHECK-LABEL: module @two
// CHECK: %[[XY:.+]] = stablehlo.add %arg0, %arg1
// CHECK-NEXT: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[XY]])
// CHECK-SAME: handle = 1
// CHECK-NOT: stablehlo.all_reduce
// CHECK: return %[[SUM]]
module @two attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
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
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %c = stablehlo.add %a, %b : tensor<8xf32>
  return %c : tensor<8xf32>
}
}

// -----

// Chains and trees of sums: the tree stays, on each device.
// CHECK-LABEL: module @chain
// CHECK: %[[XY:.+]] = stablehlo.add %arg0, %arg1
// CHECK-NEXT: %[[ZW:.+]] = stablehlo.add %arg2, %arg3
// CHECK-NEXT: %[[ALL:.+]] = stablehlo.add %[[XY]], %[[ZW]]
// CHECK-NEXT: "stablehlo.all_reduce"(%[[ALL]])
// CHECK-NOT: stablehlo.all_reduce
module @chain attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>, %z: tensor<8xf32>, %w: tensor<8xf32>) -> (tensor<8xf32>) {
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
  %c = "stablehlo.all_reduce"(%z) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %d = "stablehlo.all_reduce"(%w) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %e = stablehlo.add %a, %b : tensor<8xf32>
  %f = stablehlo.add %c, %d : tensor<8xf32>
  %g = stablehlo.add %e, %f : tensor<8xf32>
  return %g : tensor<8xf32>
}
}

// -----

// Other reductions, each with its own op.
// CHECK-LABEL: module @maximum
// CHECK: %[[XY:.+]] = stablehlo.maximum %arg0, %arg1
// CHECK-NEXT: "stablehlo.all_reduce"(%[[XY]])
// CHECK: stablehlo.maximum
// CHECK-NOT: stablehlo.all_reduce
module @maximum attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
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
  %c = stablehlo.maximum %a, %b : tensor<8xf32>
  return %c : tensor<8xf32>
}
}

// -----

// A reduce_scatter too.
// CHECK-LABEL: module @reduce_scatter
// CHECK: %[[XY:.+]] = stablehlo.add %arg0, %arg1
// CHECK-NEXT: "stablehlo.reduce_scatter"(%[[XY]])
// CHECK: (tensor<8xf32>) -> tensor<4xf32>
// CHECK-NOT: stablehlo.reduce_scatter
module @reduce_scatter attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<4xf32>) {
  %a = "stablehlo.reduce_scatter"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids, scatter_dimension = 0 : i64} : (tensor<8xf32>) -> tensor<4xf32>
  %b = "stablehlo.reduce_scatter"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids, scatter_dimension = 0 : i64} : (tensor<8xf32>) -> tensor<4xf32>
  %c = stablehlo.add %a, %b : tensor<4xf32>
  return %c : tensor<4xf32>
}
}

// -----

// What moves all elements alike comes first: less is reduced, and it may differ.
// CHECK-LABEL: module @slices
// CHECK: %[[X:.+]] = stablehlo.slice %arg0 [0:4]
// CHECK: %[[Y:.+]] = stablehlo.slice %arg1 [4:8]
// CHECK: %[[XY:.+]] = stablehlo.add %[[X]], %[[Y]] : tensor<4xf32>
// CHECK-NEXT: "stablehlo.all_reduce"(%[[XY]])
module @slices attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<4xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %a1 = stablehlo.slice %a [0:4] : (tensor<8xf32>) -> tensor<4xf32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %b1 = stablehlo.slice %b [4:8] : (tensor<8xf32>) -> tensor<4xf32>
  %c = stablehlo.add %a1, %b1 : tensor<4xf32>
  return %c : tensor<4xf32>
}
}

// -----

// What is added in a wider type is reduced in it.
// CHECK-LABEL: module @widened
// CHECK: %[[X:.+]] = stablehlo.convert %arg0
// CHECK: %[[Y:.+]] = stablehlo.convert %arg1
// CHECK: %[[XY:.+]] = stablehlo.add %[[X]], %[[Y]] : tensor<8xf32>
// CHECK-NEXT: "stablehlo.all_reduce"(%[[XY]])
// CHECK: stablehlo.add %{{.+}}, %{{.+}} : tensor<f32>
module @widened attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xbf16>, %y: tensor<8xbf16>) -> (tensor<8xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<bf16>, %r: tensor<bf16>):
    %s = stablehlo.add %l, %r : tensor<bf16>
    stablehlo.return %s : tensor<bf16>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xbf16>) -> tensor<8xbf16>
  %a1 = stablehlo.convert %a : (tensor<8xbf16>) -> tensor<8xf32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<bf16>, %r: tensor<bf16>):
    %s = stablehlo.add %l, %r : tensor<bf16>
    stablehlo.return %s : tensor<bf16>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xbf16>) -> tensor<8xbf16>
  %b1 = stablehlo.convert %b : (tensor<8xbf16>) -> tensor<8xf32>
  %c = stablehlo.add %a1, %b1 : tensor<8xf32>
  return %c : tensor<8xf32>
}
}

// -----

// Of a reduce_scatter all that it takes is widened.
// CHECK-LABEL: module @widened_scatter
// CHECK: stablehlo.convert %arg0 : (tensor<8xbf16>) -> tensor<8xf32>
// CHECK: "stablehlo.reduce_scatter"
// CHECK: (tensor<8xf32>) -> tensor<4xf32>
module @widened_scatter attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xbf16>, %y: tensor<8xbf16>) -> (tensor<4xf32>) {
  %a = "stablehlo.reduce_scatter"(%x) ({
  ^bb0(%l: tensor<bf16>, %r: tensor<bf16>):
    %s = stablehlo.add %l, %r : tensor<bf16>
    stablehlo.return %s : tensor<bf16>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids, scatter_dimension = 0 : i64} : (tensor<8xbf16>) -> tensor<4xbf16>
  %a1 = stablehlo.convert %a : (tensor<4xbf16>) -> tensor<4xf32>
  %b = "stablehlo.reduce_scatter"(%y) ({
  ^bb0(%l: tensor<bf16>, %r: tensor<bf16>):
    %s = stablehlo.add %l, %r : tensor<bf16>
    stablehlo.return %s : tensor<bf16>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids, scatter_dimension = 0 : i64} : (tensor<8xbf16>) -> tensor<4xbf16>
  %b1 = stablehlo.convert %b : (tensor<4xbf16>) -> tensor<4xf32>
  %c = stablehlo.add %a1, %b1 : tensor<4xf32>
  return %c : tensor<4xf32>
}
}

// -----

// The division of a mean stays behind, once; so does a slice that a device chooses.
// CHECK-LABEL: module @means
// CHECK: %[[XY:.+]] = stablehlo.add %arg0, %arg1
// CHECK-NEXT: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[XY]])
// CHECK: %[[MEAN:.+]] = stablehlo.divide %[[SUM]], %{{.+}}
// CHECK-NEXT: %[[OWN:.+]] = stablehlo.dynamic_slice %[[MEAN]], %arg2
// CHECK-NEXT: return %[[OWN]]
module @means attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>, %i: tensor<i32>) -> (tensor<4xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %n = stablehlo.constant dense<2.0> : tensor<8xf32>
  %a1 = stablehlo.divide %a, %n : tensor<8xf32>
  %a2 = stablehlo.dynamic_slice %a1, %i, sizes = [4] : (tensor<8xf32>, tensor<i32>) -> tensor<4xf32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %m = stablehlo.constant dense<2.0> : tensor<8xf32>
  %b1 = stablehlo.divide %b, %m : tensor<8xf32>
  %b2 = stablehlo.dynamic_slice %b1, %i, sizes = [4] : (tensor<8xf32>, tensor<i32>) -> tensor<4xf32>
  %c = stablehlo.add %a2, %b2 : tensor<4xf32>
  return %c : tensor<4xf32>
}
}

// -----

// A pad with what the reduction ignores comes first, where no more is moved for it.
// CHECK-LABEL: module @padded
// CHECK: %[[X:.+]] = stablehlo.pad %arg0
// CHECK: %[[Y:.+]] = stablehlo.pad %arg1
// CHECK: %[[XY:.+]] = stablehlo.add %[[X]], %[[Y]] : tensor<12xf32>
// CHECK-NEXT: "stablehlo.all_reduce"(%[[XY]])
module @padded attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<12xf32>) {
  %0 = stablehlo.constant dense<0.0> : tensor<f32>
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %a1 = stablehlo.pad %a, %0, low = [0], high = [4], interior = [0] : (tensor<8xf32>, tensor<f32>) -> tensor<12xf32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %b1 = stablehlo.pad %b, %0, low = [4], high = [0], interior = [0] : (tensor<8xf32>, tensor<f32>) -> tensor<12xf32>
  %c = stablehlo.add %a1, %b1 : tensor<12xf32>
  return %c : tensor<12xf32>
}
}

// -----

// With which others one of them is scheduled says nothing of a sum.
// CHECK-LABEL: module @scheduling_group
// CHECK: "stablehlo.all_reduce"
// CHECK-NOT: _scheduling_group_id
// CHECK-NOT: stablehlo.all_reduce
module @scheduling_group attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<8xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids, mhlo.frontend_attributes = {_scheduling_group_id = "0"}} : (tensor<8xf32>) -> tensor<8xf32>
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

// Calls are inlined where something is merged.
// CHECK-LABEL: module @calls
// CHECK: "stablehlo.all_reduce"
// CHECK-NOT: stablehlo.all_reduce
module @calls attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func private @total(%x: tensor<8xf32>) -> tensor<8xf32> {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  return %a : tensor<8xf32>
}
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<8xf32>) {
  %a = call @total(%x) : (tensor<8xf32>) -> tensor<8xf32>
  %b = call @total(%y) : (tensor<8xf32>) -> tensor<8xf32>
  %c = stablehlo.add %a, %b : tensor<8xf32>
  return %c : tensor<8xf32>
}
}

// -----

// In the body of a loop as elsewhere.
// CHECK-LABEL: module @loop
// CHECK: stablehlo.while
// CHECK: %[[XY:.+]] = stablehlo.add %{{.+}}, %arg1
// CHECK: "stablehlo.all_reduce"(%[[XY]])
// CHECK-NOT: stablehlo.all_reduce
module @loop attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<8xf32>) {
  %z = stablehlo.constant dense<0> : tensor<i32>
  %n = stablehlo.constant dense<4> : tensor<i32>
  %l:2 = stablehlo.while(%i = %z, %v = %x) : tensor<i32>, tensor<8xf32> cond {
    %p = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
  %a = "stablehlo.all_reduce"(%v) ({
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
    %one = stablehlo.constant dense<1> : tensor<i32>
    %j = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %j, %c : tensor<i32>, tensor<8xf32>
  }
  return %l#1 : tensor<8xf32>
}
}

// -----

// Another value is between the terms, as the gradient of a residual is between those of two gathers
// of one table.
// CHECK-LABEL: module @with_another_value
// CHECK: %[[XY:.+]] = stablehlo.add %arg0, %arg1
// CHECK-NEXT: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[XY]])
// CHECK-NOT: stablehlo.all_reduce
// CHECK: %[[ALL:.+]] = stablehlo.add %arg2, %[[SUM]]
// CHECK: return %[[ALL]]
module @with_another_value attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>, %own: tensor<8xf32>) -> (tensor<8xf32>) {
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
  return %d : tensor<8xf32>
}
}
