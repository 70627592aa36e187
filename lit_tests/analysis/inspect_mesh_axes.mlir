// RUN: stablehlo-tools inspect %s --json | python -m json.tool --compact | sed 's/},{/},\n{/g' | filecheck %s
// RUN: stablehlo-tools inspect %s | filecheck %s --check-prefix=TEXT

// Groups along the axes of a mesh: the devices that differ in nothing but those axes.

// TEXT: 9 communicating ops on 1 x 8 (replicas x partitions)
// CHECK: "partitions":8
module attributes {mhlo.num_partitions = 8 : i32} {
  sdy.mesh @mesh = <["x"=2, "y"=4]>
  // Axes x and y as above, but the devices stand in another order: row-major over (y, x).
  sdy.mesh @permuted = <["x"=2, "y"=4], device_ids=[0, 2, 4, 6, 1, 3, 5, 7]>
  sdy.mesh @one_axis = <["z"=8]>

  func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
    // The major axis.
    // CHECK: "group_mode":"cross_partition","groups":{{\[\[0,4],\[1,5],\[2,6],\[3,7]]}}
    // TEXT: 4 x 2 {0,4}
    %0 = "stablehlo.collective_broadcast"(%x) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = #stablehlo.replica_group_mesh_axes<
        mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">]>
    } : (tensor<2xf32>) -> tensor<2xf32>

    // The minor axis.
    // CHECK: "groups":{{\[\[0,1,2,3],\[4,5,6,7]]}}
    %1 = "stablehlo.collective_broadcast"(%0) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = #stablehlo.replica_group_mesh_axes<
        mesh = @mesh, axes = [#stablehlo.axis_ref<name = "y">]>
    } : (tensor<2xf32>) -> tensor<2xf32>

    // Both axes; the one that is named first is the slow one.
    // CHECK: "groups":{{\[\[0,4,1,5,2,6,3,7]]}}
    %2 = "stablehlo.collective_broadcast"(%1) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = #stablehlo.replica_group_mesh_axes<
        mesh = @mesh,
        axes = [#stablehlo.axis_ref<name = "y">, #stablehlo.axis_ref<name = "x">]>
    } : (tensor<2xf32>) -> tensor<2xf32>

    // The minor half of an axis: (2)2 has stride one.
    // CHECK: "groups":{{\[\[0,1],\[2,3],\[4,5],\[6,7]]}}
    %3 = "stablehlo.collective_broadcast"(%2) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = #stablehlo.replica_group_mesh_axes<
        mesh = @mesh,
        axes = [#stablehlo.axis_ref<name = "y", sub_axis_info = (2)2>]>
    } : (tensor<2xf32>) -> tensor<2xf32>

    // The major half of an axis: (1)2 has stride two.
    // CHECK: "groups":{{\[\[0,2],\[1,3],\[4,6],\[5,7]]}}
    %4 = "stablehlo.collective_broadcast"(%3) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = #stablehlo.replica_group_mesh_axes<
        mesh = @mesh,
        axes = [#stablehlo.axis_ref<name = "y", sub_axis_info = (1)2>]>
    } : (tensor<2xf32>) -> tensor<2xf32>

    // The middle of an axis of eight.
    // CHECK: "groups":{{\[\[0,2],\[1,3],\[4,6],\[5,7]]}}
    %5 = "stablehlo.collective_broadcast"(%4) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = #stablehlo.replica_group_mesh_axes<
        mesh = @one_axis,
        axes = [#stablehlo.axis_ref<name = "z", sub_axis_info = (2)2>]>
    } : (tensor<2xf32>) -> tensor<2xf32>

    // A mesh whose devices are permuted.
    // CHECK: "groups":{{\[\[0,1],\[2,3],\[4,5],\[6,7]]}}
    %6 = "stablehlo.collective_broadcast"(%5) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = #stablehlo.replica_group_mesh_axes<
        mesh = @permuted, axes = [#stablehlo.axis_ref<name = "x">]>
    } : (tensor<2xf32>) -> tensor<2xf32>

    // No axis at all: each device by itself.
    // CHECK: "groups":{{\[\[0],\[1],\[2],\[3],\[4],\[5],\[6],\[7]]}}
    %7 = "stablehlo.collective_broadcast"(%6) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = []>
    } : (tensor<2xf32>) -> tensor<2xf32>

    // A reduction by axes, with ids that are participants already.
    // CHECK: "group_mode":"flattened_ids","groups":{{\[\[0,4],\[1,5],\[2,6],\[3,7]]}}
    %8 = "stablehlo.all_reduce"(%7) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %sum = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %sum : tensor<f32>
    }) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = #stablehlo.replica_group_mesh_axes<
        mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">]>,
      use_global_device_ids
    } : (tensor<2xf32>) -> tensor<2xf32>
    return %8 : tensor<2xf32>
  }
}
