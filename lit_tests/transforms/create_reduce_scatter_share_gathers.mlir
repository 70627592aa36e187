// RUN: stablehlo-tools opt %s -p create-reduce-scatter --split-input-file | filecheck %s --enable-var-scope
// RUN: stablehlo-tools opt %s -p 'create-reduce-scatter{memory-limit=100}' --split-input-file -o %t.limited.mlir
// RUN: filecheck %s --check-prefix=LIMITED --input-file %t.limited.mlir

// A second run stays within the same limit.
// RUN: stablehlo-tools opt %t.limited.mlir -p 'create-reduce-scatter{memory-limit=100}' --split-input-file > %t.again.mlir
// RUN: stablehlo-tools opt %t.limited.mlir --split-input-file | diff -u - %t.again.mlir

// Nor is any shared where the user wants to gather again.
// RUN: stablehlo-tools opt %s -p 'create-reduce-scatter{share-gathers=false}' --split-input-file > %t.apart.mlir
// RUN: stablehlo-tools opt %s --split-input-file | diff -u - %t.apart.mlir

// One gather for the block and the regions in it; groups may be spelled in other ways.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @one_for_all
// CHECK-SAME: (%[[X:.+]]: tensor<2x3xf32>, %[[P:.+]]: tensor<i1>)
// CHECK-NEXT: %[[WHOLE:.+]] = "stablehlo.all_gather"(%[[X]])
// CHECK-NEXT: %[[BRANCH:.+]] = "stablehlo.if"(%[[P]])
// CHECK-NEXT: stablehlo.return %[[WHOLE]]
// CHECK: return %[[WHOLE]], %[[WHOLE]], %[[BRANCH]]
func.func @one_for_all(%x: tensor<2x3xf32>, %p: tensor<i1>) -> (tensor<8x3xf32>, tensor<8x3xf32>, tensor<8x3xf32>) {
  %0 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %1 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">]>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %2 = "stablehlo.if"(%p) ({
    %3 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
    stablehlo.return %3 : tensor<8x3xf32>
  }, {
    stablehlo.return %0 : tensor<8x3xf32>
  }) : (tensor<i1>) -> tensor<8x3xf32>
  return %0, %1, %2 : tensor<8x3xf32>, tensor<8x3xf32>, tensor<8x3xf32>
}

// -----

// A gather in one region does not serve another; a barrier makes another value, to gather again.
// CHECK-LABEL: func.func @not_shared
// CHECK-COUNT-4: "stablehlo.all_gather"
// CHECK: return
func.func @not_shared(%x: tensor<2x3xf32>, %p: tensor<i1>) -> (tensor<8x3xf32>, tensor<8x3xf32>) {
  %0 = "stablehlo.if"(%p) ({
    %1 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
    stablehlo.return %1 : tensor<8x3xf32>
  }, {
    %2 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
    stablehlo.return %2 : tensor<8x3xf32>
  }) : (tensor<i1>) -> tensor<8x3xf32>
  %3 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %again = stablehlo.optimization_barrier %x : tensor<2x3xf32>
  %4 = "stablehlo.all_gather"(%again) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %5 = stablehlo.add %0, %3 : tensor<8x3xf32>
  return %5, %4 : tensor<8x3xf32>, tensor<8x3xf32>
}

// -----

// 96 bytes fit into 100, twice that does not.
// LIMITED-LABEL: func.func @limit
// LIMITED-COUNT-3: "stablehlo.all_gather"
// LIMITED-NOT: stablehlo.all_gather
// CHECK-LABEL: func.func @limit
// CHECK-COUNT-2: "stablehlo.all_gather"
// CHECK-NOT: stablehlo.all_gather
func.func @limit(%x: tensor<2x3xf32>, %y: tensor<2x3xf32>) -> (tensor<8x3xf32>, tensor<8x3xf32>, tensor<8x3xf32>, tensor<8x3xf32>, tensor<8x3xf32>) {
  %0 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %1 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %2 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %3 = "stablehlo.all_gather"(%y) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %4 = "stablehlo.all_gather"(%y) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  return %0, %1, %2, %3, %4 : tensor<8x3xf32>, tensor<8x3xf32>, tensor<8x3xf32>, tensor<8x3xf32>, tensor<8x3xf32>
}
