// A generated test does not notice other names of values, functions and meshes, nor another channel.
// RUN: rm -f %t.mlir %t.full.mlir
// RUN: stablehlo-tools make-test %s -p thread-tokens -o %t.mlir
// RUN: stablehlo-tools make-test %s -p thread-tokens --full -o %t.full.mlir
// RUN: stablehlo-tools opt %t.mlir -p thread-tokens > %t.after
// RUN: sed -e 's/%%\([a-z0-9_]*\)/%%other_\1/g' -e 's/@inner_4/@inner_12/' -e 's/@mesh_0/@mesh_7/' -e 's/handle = 1,/handle = 9,/' %t.after > %t.renamed
// RUN: not diff -q %t.after %t.renamed
// RUN: filecheck %t.mlir < %t.renamed
// RUN: filecheck %t.full.mlir < %t.renamed

// Meshes in another order, told apart by their axes.
// RUN: sed -e '/sdy.mesh @mesh =/d' -e 's/^ *sdy.mesh @mesh_0 .*/&\nsdy.mesh @mesh = <["x"=2]>/' %t.after > %t.turned
// RUN: filecheck %t.mlir < %t.turned

// It does notice other groups, another mesh, a collective more and one fewer.
// RUN: sed -e 's/\[\[0, 1\]\]/[[1, 0]]/' %t.after > %t.groups
// RUN: not filecheck %t.mlir < %t.groups
// RUN: sed -e 's/mesh = @mesh_0/mesh = @mesh/' %t.after > %t.mesh
// RUN: not filecheck %t.mlir < %t.mesh
// RUN: sed -e '/collective_permute/d' %t.after > %t.fewer
// RUN: not filecheck %t.mlir < %t.fewer
// RUN: sed -e '/collective_permute/{p;p}' %t.after > %t.more
// RUN: not filecheck %t.mlir < %t.more
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=2]>
  sdy.mesh @mesh_0 = <["y"=2]>
  func.func @main(
      %x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}
  ) -> tensor<4xf32> {
    %0 = call @inner_4(%x) : (tensor<4xf32>) -> tensor<4xf32>
    %1 = "stablehlo.collective_permute"(%0) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>,
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<4xf32>) -> tensor<4xf32>
    return %1 : tensor<4xf32>
  }
  func.func private @inner_4(%x: tensor<4xf32>) -> tensor<4xf32> {
    %0 = "stablehlo.all_to_all"(%x) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>,
      concat_dimension = 0 : i64,
      replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh_0, axes = [#stablehlo.axis_ref<name = "y">]>,
      split_count = 2 : i64,
      split_dimension = 0 : i64
    } : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
