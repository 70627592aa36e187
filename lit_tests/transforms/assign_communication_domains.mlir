// RUN: stablehlo-tools opt %s -p 'assign-communication-domains{against=text}' --split-input-file | filecheck %s
// RUN: stablehlo-tools opt %s -p 'assign-communication-domains{against=text explain}' --split-input-file -o /dev/null 2>&1 | filecheck %s --check-prefix=TOLD

// Of sixteen H100, eight a node, a gather within each node is put into the domain, one between them not.
// CHECK-LABEL: func.func @gathers
// CHECK: "stablehlo.all_gather"(%arg0)
// CHECK-SAME: mhlo.frontend_attributes = {collective_communication_domain = "scale_up_fabric"}
// CHECK: "stablehlo.all_gather"(%arg1)
// CHECK-NOT: frontend_attributes
// CHECK: return
// TOLD: assign-communication-domains: all_gather: over NVLink, beside those that leave it
// TOLD: assign-communication-domains: all_gather: unchanged: it leaves NVLink
module attributes {mhlo.num_partitions = 16 : i32, mhlo.num_replicas = 1 : i32} {
func.func @gathers(%x: tensor<2x3xf32>, %y: tensor<2x3xf32>) -> (tensor<16x3xf32>, tensor<4x3xf32>) {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]> : tensor<2x8xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<16x3xf32>
  %h = "stablehlo.all_gather"(%y) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]> : tensor<8x2xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<4x3xf32>
  return %g, %h : tensor<16x3xf32>, tensor<4x3xf32>
}
}

// -----

// Every kind, attributes that were there are kept, and an exchange has its parts along dimension 0.
// CHECK-LABEL: func.func @kinds
// CHECK: "stablehlo.all_reduce"
// CHECK: mhlo.frontend_attributes = {collective_communication_domain = "scale_up_fabric", mine = "yes"}
// CHECK: "stablehlo.reduce_scatter"
// CHECK: collective_communication_domain
// CHECK: "stablehlo.collective_permute"
// CHECK-SAME: collective_communication_domain
// CHECK: %[[APART:.*]] = stablehlo.reshape %{{.*}} : (tensor<4x6xf32>) -> tensor<4x2x3xf32>
// CHECK: %[[FIRST:.*]] = stablehlo.transpose %[[APART]], dims = [1, 0, 2] : (tensor<4x2x3xf32>) -> tensor<2x4x3xf32>
// CHECK: %[[SENT:.*]] = "stablehlo.all_to_all"(%[[FIRST]])
// CHECK-SAME: concat_dimension = 0
// CHECK-SAME: split_dimension = 0
// CHECK-SAME: collective_communication_domain = "scale_up_fabric"
// CHECK-SAME: (tensor<2x4x3xf32>) -> tensor<2x4x3xf32>
// CHECK: %[[BACK:.*]] = stablehlo.transpose %[[SENT]], dims = [0, 1, 2]
// CHECK: stablehlo.reshape %[[BACK]] : (tensor<2x4x3xf32>) -> tensor<8x3xf32>
// CHECK: "stablehlo.all_reduce"
// CHECK-NOT: frontend_attributes
// CHECK: return
module attributes {mhlo.num_partitions = 16 : i32, mhlo.num_replicas = 1 : i32} {
func.func @kinds(%x: tensor<4x6xf32>) -> (tensor<4x6xf32>, tensor<2x6xf32>, tensor<4x6xf32>, tensor<8x3xf32>, tensor<4x6xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, mhlo.frontend_attributes = {mine = "yes"}, replica_groups = dense<[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]> : tensor<8x2xi64>, use_global_device_ids} : (tensor<4x6xf32>) -> tensor<4x6xf32>
  %b = "stablehlo.reduce_scatter"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {scatter_dimension = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]> : tensor<8x2xi64>, use_global_device_ids} : (tensor<4x6xf32>) -> tensor<2x6xf32>
  %c = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 3, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0], [8, 9], [9, 8]]> : tensor<4x2xi64>} : (tensor<4x6xf32>) -> tensor<4x6xf32>
  %d = "stablehlo.all_to_all"(%x) {split_dimension = 1 : i64, concat_dimension = 0 : i64, split_count = 2 : i64, channel_handle = #stablehlo.channel_handle<handle = 4, type = 1>, replica_groups = dense<[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]> : tensor<8x2xi64>} : (tensor<4x6xf32>) -> tensor<8x3xf32>
  %e = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 5, type = 1>, replica_groups = dense<[[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]> : tensor<8x2xi64>, use_global_device_ids} : (tensor<4x6xf32>) -> tensor<4x6xf32>
  return %a, %b, %c, %d, %e : tensor<4x6xf32>, tensor<2x6xf32>, tensor<4x6xf32>, tensor<8x3xf32>, tensor<4x6xf32>
}
}
