// Groups that no module of 4 partitions can have, each put in the place of GROUPS below.
// DEFINE: %{refused} = python %{inputs}/expect_refusal.py stablehlo-tools inspect %t.mlir

// An id in two groups.
// RUN: sed 's/GROUPS/dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>/' %s > %t.mlir
// RUN: %{refused} | filecheck %s --check-prefix=OVERLAP
// OVERLAP: inspect_invalid.mlir.tmp.mlir:{{[0-9]+}}:10: error: invalid MLIR text: replica id #1 seen more than once

// An id that no partition has.
// RUN: sed 's/GROUPS/dense<[[4, 1], [2, 3], [0, 5]]> : tensor<3x2xi64>/' %s > %t.mlir
// RUN: %{refused} | filecheck %s --check-prefix=OUTSIDE
// OUTSIDE: :{{[0-9]+}}:10: error: stablehlo.all_gather: id 4 is not one of the 4 flattened_ids processes of the module

// A mesh that the module does not have.
// RUN: sed 's/GROUPS/#stablehlo.replica_group_mesh_axes<mesh = @other, axes = [#stablehlo.axis_ref<name = "x">]>/' %s > %t.mlir
// RUN: %{refused} | filecheck %s --check-prefix=MESH
// MESH: error: 'stablehlo.all_gather' op replica_groups: mesh symbol 'other' not found

// An axis that the mesh does not have.
// RUN: sed 's/GROUPS/#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "z">]>/' %s > %t.mlir
// RUN: %{refused} | filecheck %s --check-prefix=AXIS
// AXIS: error: stablehlo.all_gather: axis 'z' is not in the mesh

// An axis twice.
// RUN: sed 's/GROUPS/#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">, #stablehlo.axis_ref<name = "x">]>/' %s > %t.mlir
// RUN: %{refused} | filecheck %s --check-prefix=TWICE
// TWICE: error: stablehlo.all_gather: {{.*}}x

// A part of an axis that does not divide it.
// RUN: sed 's/GROUPS/#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x", sub_axis_info = (1)3>]>/' %s > %t.mlir
// RUN: %{refused} | filecheck %s --check-prefix=DIVIDE
// DIVIDE: error: stablehlo.all_gather: axis 'x' of size 4 is named twice, or its sub-axis (1)3 does not divide it

// A mesh of more devices than the module has partitions.
// RUN: sed 's/GROUPS/#stablehlo.replica_group_mesh_axes<mesh = @large, axes = [#stablehlo.axis_ref<name = "x">]>/' %s > %t.mlir
// RUN: %{refused} | filecheck %s --check-prefix=LARGE
// LARGE: error: stablehlo.all_gather: id 4 is not one of the 4 flattened_ids processes of the module

// Global ids mean nothing without a channel.
// RUN: sed 's/GROUPS/dense<[[0, 1]]> : tensor<1x2xi64>/; /channel_handle/d' %s > %t.mlir
// RUN: %{refused} | filecheck %s --check-prefix=CHANNEL
// CHANNEL: error: stablehlo.all_gather: use_global_device_ids needs a positive channel id

// The file itself, where the place is not filled in.
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools inspect %s | filecheck %s --check-prefix=TEXT
// TEXT: inspect_invalid.mlir:{{[0-9]+}}:23: error: invalid MLIR text: expected attribute value

module attributes {mhlo.num_partitions = 4 : i32} {
  sdy.mesh @mesh = <["x"=4]>
  sdy.mesh @large = <["x"=8]>
  func.func @main(%x: tensor<2xf32>) -> tensor<4xf32> {
    %0 = "stablehlo.all_gather"(%x) {
      all_gather_dim = 0 : i64,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = GROUPS,
      use_global_device_ids
    } : (tensor<2xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
