// RUN: stablehlo-tools opt %s -p 'pipeline-collectives{direction=once explain}' --split-input-file >%t.mlir 2>%t.notes
// RUN: filecheck %s --input-file %t.mlir
// RUN: filecheck %s --check-prefix=EXPLAINED --input-file %t.notes

// A branch gathers weights in some iterations, and adds up what it reduces: gathered once, and what
// each device has of its own added up where there is something to add.
// EXPLAINED: note: all_gather runs once, before the loop that repeats it
// EXPLAINED: note: all_reduce runs once, after the loop that repeats it
// CHECK-LABEL: module @head attributes
// CHECK: %[[ALL:.+]] = "stablehlo.all_gather"(%arg1)
// CHECK: %[[LOOP:.+]]:2 = stablehlo.while(%{{.+}}, %[[OWN:.+]] = %{{.+}}) : tensor<i32>, tensor<4x4xf32>
// CHECK: "stablehlo.if"
// CHECK-NOT: all_gather
// CHECK: %[[GRADIENT:.+]] = stablehlo.dot_general %{{.+}}, %[[ALL]]
// CHECK-NOT: all_reduce
// CHECK: %[[WIDE:.+]] = stablehlo.convert %[[GRADIENT]]
// CHECK: %[[SUM:.+]] = stablehlo.add %[[OWN]], %[[WIDE]]
// CHECK: stablehlo.return %[[SUM]]
// CHECK: }, {
// CHECK-NEXT: stablehlo.return %[[OWN]]
// CHECK: "stablehlo.all_reduce"(%[[LOOP]]#1)
module @head attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4x4xbf16>, %w: tensor<2x4xbf16>) -> tensor<4x4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %five = stablehlo.constant dense<5> : tensor<i32>
  %table = stablehlo.constant dense<[0, 1, 1, 0, 1]> : tensor<5xi32>
  %none = stablehlo.constant dense<0.0> : tensor<4x4xf32>
  %z:2 = stablehlo.while(%i = %zero, %sum = %none) : tensor<i32>, tensor<4x4xf32>
  cond {
    %more = stablehlo.compare LT, %i, %five : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %entry = stablehlo.dynamic_slice %table, %i, sizes = [1] : (tensor<5xi32>, tensor<i32>) -> tensor<1xi32>
    %flag = stablehlo.reshape %entry : (tensor<1xi32>) -> tensor<i32>
    %due = stablehlo.compare EQ, %flag, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %next_sum = "stablehlo.if"(%due) ({
      %all = "stablehlo.all_gather"(%w) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x4xbf16>) -> tensor<4x4xbf16>
      %gradient = stablehlo.dot_general %x, %all, contracting_dims = [0] x [0] : (tensor<4x4xbf16>, tensor<4x4xbf16>) -> tensor<4x4xbf16>
      %reduced = "stablehlo.all_reduce"(%gradient) ({
      ^bb0(%l: tensor<bf16>, %r: tensor<bf16>):
        %s = stablehlo.add %l, %r : tensor<bf16>
        stablehlo.return %s : tensor<bf16>
      }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, use_global_device_ids} : (tensor<4x4xbf16>) -> tensor<4x4xbf16>
      %wide = stablehlo.convert %reduced : (tensor<4x4xbf16>) -> tensor<4x4xf32>
      %added = stablehlo.add %sum, %wide : tensor<4x4xf32>
      stablehlo.return %added : tensor<4x4xf32>
    }, {
      stablehlo.return %sum : tensor<4x4xf32>
    }) : (tensor<i1>) -> tensor<4x4xf32>
    %next = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %next, %next_sum : tensor<i32>, tensor<4x4xf32>
  }
  return %z#1 : tensor<4x4xf32>
}
}

// -----

// The other branch does not keep the sum, and what is gathered follows from the iteration.
// EXPLAINED: note: a collective in a branch stays in its iteration, with the branch
// CHECK-LABEL: module @kept attributes
// CHECK: stablehlo.while
// CHECK: "stablehlo.if"
// CHECK: "stablehlo.all_gather"
// CHECK: "stablehlo.all_reduce"
// CHECK: }, {
module @kept attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4x4xf32>, %w: tensor<5x2x4xf32>) -> tensor<4x4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %five = stablehlo.constant dense<5> : tensor<i32>
  %none = stablehlo.constant dense<0.0> : tensor<4x4xf32>
  %z:2 = stablehlo.while(%i = %zero, %sum = %none) : tensor<i32>, tensor<4x4xf32>
  cond {
    %more = stablehlo.compare LT, %i, %five : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %w, %i, %zero, %zero, sizes = [1, 2, 4] : (tensor<5x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
    %part = stablehlo.reshape %row : (tensor<1x2x4xf32>) -> tensor<2x4xf32>
    %due = stablehlo.compare GT, %i, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %next_sum = "stablehlo.if"(%due) ({
      %all = "stablehlo.all_gather"(%part) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x4xf32>) -> tensor<4x4xf32>
      %reduced = "stablehlo.all_reduce"(%all) ({
      ^bb0(%l: tensor<f32>, %r: tensor<f32>):
        %s = stablehlo.add %l, %r : tensor<f32>
        stablehlo.return %s : tensor<f32>
      }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, use_global_device_ids} : (tensor<4x4xf32>) -> tensor<4x4xf32>
      %added = stablehlo.add %sum, %reduced : tensor<4x4xf32>
      stablehlo.return %added : tensor<4x4xf32>
    }, {
      stablehlo.return %x : tensor<4x4xf32>
    }) : (tensor<i1>) -> tensor<4x4xf32>
    %next = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %next, %next_sum : tensor<i32>, tensor<4x4xf32>
  }
  return %z#1 : tensor<4x4xf32>
}
}
