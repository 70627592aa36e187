// RUN: stablehlo-tools opt %s -p 'thread-tokens{scope=group}' --split-input-file --verify-diagnostics
// RUN: sed 's/expected-error/no longer expected/' %s > %t.mlir
// RUN: stablehlo-tools opt %t.mlir -p thread-tokens --split-input-file --verify-diagnostics

// Chains by group need groups that make sense; one chain of all does not look at them.

// A participant that the module does not have.
module attributes {mhlo.num_replicas = 2 : i32} {
func.func @outside_of_the_grid(%x: tensor<f32>) -> tensor<f32> {
  // expected-error@+1 {{stablehlo.collective_permute: id 2 is not one of the 2 cross_replica processes of the module}}
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 2]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}
}

// -----

// A mesh of more devices than there are partitions.
module attributes {mhlo.num_partitions = 2 : i32} {
sdy.mesh @mesh = <["x"=4]>
func.func @mesh_too_large(%x: tensor<f32>) -> tensor<f32> {
  // expected-error@+1 {{stablehlo.collective_broadcast: id 2 is not one of the 2 cross_partition processes of the module}}
  %0 = "stablehlo.collective_broadcast"(%x) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
    replica_groups = #stablehlo.replica_group_mesh_axes<
      mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">]>
  } : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}
}

// -----

// Global ids without a channel have no meaning.
func.func @no_channel(%x: tensor<2xf32>) -> tensor<4xf32> {
  // expected-error@+1 {{stablehlo.all_gather: use_global_device_ids needs a positive channel id}}
  %0 = "stablehlo.all_gather"(%x) {
    all_gather_dim = 0 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
    use_global_device_ids
  } : (tensor<2xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
