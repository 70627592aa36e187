// RUN: stablehlo-tools inspect %s | filecheck %s

// Groups by mesh axes name as many processes as the mesh has devices.

// CHECK: 1 communicating ops on 1 x 4 (replicas x partitions)
sdy.mesh @mesh = <["x"=2, "y"=2]>
func.func @main(%x: tensor<2xf32>) -> tensor<4xf32> {
  // CHECK: all_gather 2 x 2 {0,1}
  %0 = "stablehlo.all_gather"(%x) {
    all_gather_dim = 0 : i64,
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
    replica_groups = #stablehlo.replica_group_mesh_axes<
      mesh = @mesh, axes = [#stablehlo.axis_ref<name = "y">]>,
    use_global_device_ids
  } : (tensor<2xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
