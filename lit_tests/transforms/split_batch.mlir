// RUN: stablehlo-tools opt %s -p 'split-batch{against=text}' --split-input-file | filecheck %s
// RUN: stablehlo-tools opt %s -p 'split-batch{arguments=0 explain}' --split-input-file -o /dev/null 2>&1 | filecheck %s --check-prefix=EXPLAINED

// A layer of tensor parallelism: each part has its dot and its all_reduce, on channels of their own.
// EXPLAINED: note: split-batch: the batch is dimension 0 of argument 0; 2 of 2 ops run in 2 parts, 1 collectives among them; 0 results are combined from the parts
// EXPLAINED: note: split-batch: the peak of memory on a device, in textual order, goes from {{.+}} to {{.+}} MiB
// CHECK-LABEL: func.func @layer
// CHECK-NEXT: %[[X0:.+]] = stablehlo.slice %arg0 [0:2, 0:6]
// CHECK-NEXT: %[[X1:.+]] = stablehlo.slice %arg0 [2:4, 0:6]
// CHECK-NEXT: %[[H0:.+]] = stablehlo.dot_general %[[X0]], %arg1
// CHECK-NEXT: %[[H1:.+]] = stablehlo.dot_general %[[X1]], %arg1
// CHECK-NEXT: %[[Y0:.+]] = "stablehlo.all_reduce"(%[[H0]]) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>
// CHECK: %[[Y1:.+]] = "stablehlo.all_reduce"(%[[H1]]) <{channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>
// CHECK: %[[Y:.+]] = stablehlo.concatenate %[[Y0]], %[[Y1]], dim = 0
// CHECK-NEXT: return %[[Y]]
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @layer(%x: tensor<4x6xf32>, %w: tensor<6x3xf32>) -> tensor<4x3xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x6xf32>, tensor<6x3xf32>) -> tensor<4x3xf32>
  %1 = "stablehlo.all_reduce"(%0) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids} : (tensor<4x3xf32>) -> tensor<4x3xf32>
  return %1 : tensor<4x3xf32>
}
}

// -----

// A gradient is summed over the parts before its own collective, which stays single; so does the
// gather of the weights.
// CHECK-LABEL: func.func @gradient
// CHECK: %[[W:.+]] = "stablehlo.all_gather"(%arg1)
// CHECK-NOT: stablehlo.all_gather
// CHECK: %[[X0:.+]] = stablehlo.slice
// CHECK: %[[X1:.+]] = stablehlo.slice
// CHECK: %[[Y0:.+]] = "stablehlo.collective_permute"
// CHECK: %[[Y1:.+]] = "stablehlo.collective_permute"
// CHECK: %[[G0:.+]] = stablehlo.dot_general %[[X0]], %[[Y0]], contracting_dims = [0] x [0]
// CHECK-NEXT: %[[G1:.+]] = stablehlo.dot_general %[[X1]], %[[Y1]], contracting_dims = [0] x [0]
// CHECK-NEXT: %[[G:.+]] = stablehlo.add %[[G0]], %[[G1]]
// CHECK-NEXT: "stablehlo.reduce_scatter"(%[[G]])
// CHECK-NOT: stablehlo.reduce_scatter
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @gradient(%x: tensor<4x6xf32>, %part: tensor<3x4xf32>) -> tensor<3x4xf32> {
  %w = "stablehlo.all_gather"(%part) {
    all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids
  } : (tensor<3x4xf32>) -> tensor<6x4xf32>
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x6xf32>, tensor<6x4xf32>) -> tensor<4x4xf32>
  %1 = "stablehlo.collective_permute"(%0) {
    channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %2 = stablehlo.dot_general %x, %1, contracting_dims = [0] x [0] : (tensor<4x6xf32>, tensor<4x4xf32>) -> tensor<6x4xf32>
  %3 = "stablehlo.reduce_scatter"(%2) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 3, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, scatter_dimension = 0 : i64, use_global_device_ids} : (tensor<6x4xf32>) -> tensor<3x4xf32>
  return %3 : tensor<3x4xf32>
}
}

// -----

// A loop over layers carries the parts, and the residuals that it stacks, as values of their own.
// CHECK-LABEL: func.func @layers
// CHECK-NOT: stablehlo.concatenate
// CHECK: %[[LOOP:.+]]:5 = stablehlo.while({{.+}}) : tensor<i32>, tensor<2x6xf32>, tensor<2x6xf32>, tensor<3x2x6xf32>, tensor<3x2x6xf32>
// CHECK-NOT: stablehlo.concatenate
// CHECK: "stablehlo.collective_permute"
// CHECK: "stablehlo.collective_permute"
// CHECK-NOT: stablehlo.concatenate
// CHECK: stablehlo.return
// CHECK: stablehlo.concatenate %[[LOOP]]#1, %[[LOOP]]#2, dim = 0
// CHECK-NEXT: stablehlo.concatenate %[[LOOP]]#3, %[[LOOP]]#4, dim = 1
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @layers(%x: tensor<4x6xf32>, %w: tensor<3x6x6xf32>) -> (tensor<4x6xf32>, tensor<3x4x6xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %count = stablehlo.constant dense<3> : tensor<i32>
  %empty = stablehlo.constant dense<0.0> : tensor<3x4x6xf32>
  %0:3 = stablehlo.while(%i = %zero, %h = %x, %stack = %empty) : tensor<i32>, tensor<4x6xf32>, tensor<3x4x6xf32>
  cond {
    %more = stablehlo.compare LT, %i, %count : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %w, %i, %zero, %zero, sizes = [1, 6, 6] : (tensor<3x6x6xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x6x6xf32>
    %weights = stablehlo.reshape %row : (tensor<1x6x6xf32>) -> tensor<6x6xf32>
    %1 = stablehlo.dot_general %h, %weights, contracting_dims = [1] x [0] : (tensor<4x6xf32>, tensor<6x6xf32>) -> tensor<4x6xf32>
    %2 = "stablehlo.collective_permute"(%1) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<4x6xf32>) -> tensor<4x6xf32>
    %3 = stablehlo.reshape %h : (tensor<4x6xf32>) -> tensor<1x4x6xf32>
    %4 = stablehlo.dynamic_update_slice %stack, %3, %i, %zero, %zero : (tensor<3x4x6xf32>, tensor<1x4x6xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x4x6xf32>
    %next = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %next, %2, %4 : tensor<i32>, tensor<4x6xf32>, tensor<3x4x6xf32>
  }
  return %0#1, %0#2 : tensor<4x6xf32>, tensor<3x4x6xf32>
}
}

// -----

// Tokens gathered from all devices: the batch lies behind the devices, in each part too, and comes
// back to the front where it is exchanged.
// CHECK-LABEL: func.func @exchanged
// CHECK: "stablehlo.all_gather"({{.+}}) {{.+}} : (tensor<2x6xf32>) -> tensor<4x6xf32>
// CHECK-NEXT: "stablehlo.all_gather"({{.+}}) {{.+}} : (tensor<2x6xf32>) -> tensor<4x6xf32>
// CHECK: "stablehlo.all_to_all"({{.+}}) {{.+}} : (tensor<4x6xf32>) -> tensor<2x12xf32>
// CHECK: "stablehlo.all_to_all"({{.+}}) {{.+}} : (tensor<4x6xf32>) -> tensor<2x12xf32>
// CHECK: stablehlo.concatenate {{.+}} : (tensor<2x12xf32>, tensor<2x12xf32>) -> tensor<4x12xf32>
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @exchanged(%x: tensor<4x6xf32>) -> tensor<4x12xf32> {
  %0 = "stablehlo.all_gather"(%x) {
    all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids
  } : (tensor<4x6xf32>) -> tensor<8x6xf32>
  %1 = stablehlo.sine %0 : tensor<8x6xf32>
  %2 = "stablehlo.all_to_all"(%1) {
    channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, concat_dimension = 1 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, split_count = 2 : i64, split_dimension = 0 : i64
  } : (tensor<8x6xf32>) -> tensor<4x12xf32>
  return %2 : tensor<4x12xf32>
}
}
