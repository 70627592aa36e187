// RUN: stablehlo-tools opt %s -p 'partition{choices=shardy}' -o %t.mlir
// RUN: filecheck %s --input-file %t.mlir
// RUN: stablehlo-tools verify %s %t.mlir | filecheck %s --check-prefix=SAME
// RUN: stablehlo-tools compile %s --target cpu | filecheck %s --check-prefix=COMPILED
// RUN: stablehlo-tools inspect %s --hardware h100 | filecheck %s --check-prefix=INSPECTED
// RUN: stablehlo-tools check-order %s | filecheck %s --check-prefix=ONE
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools check-order %s %s | filecheck %s --check-prefix=TWO

// jax writes no manual computation if the manual axes of a shard_map have one device. Collectives
// of groups of one are identities, and a permute without pairs gives zeros: the rest is divided.
// SAME: identical in exact arithmetic
// COMPILED: note: removed, because XLA may refuse them: 7 collectives of groups of one
// COMPILED: added by XLA
// INSPECTED: all_reduce  {0,1,2,3}
// ONE: ordered: 1 program on devices 0 to 3, 0 collectives
// TWO: stablehlo.reduce is outside every manual computation, where XLA's partitioner may add collectives
// TWO: try: stablehlo-tools opt {{.*}} -p partition,create-reduce-scatter

// CHECK: func.func @main
// CHECK-NEXT: %[[RESULT:.+]] = sdy.manual_computation(
// CHECK-SAME: manual_axes={"one", "four"} (%[[X:.+]]: tensor<2x4xf32>) {
// CHECK-NOT: all_gather
// CHECK-NOT: reduce_scatter
// CHECK-NOT: collective_
// CHECK-NOT: all_to_all
// CHECK: %[[SUM:.+]] = stablehlo.reduce(%[[X]] init
// CHECK: "stablehlo.all_reduce"(%[[SUM]])
// CHECK-NOT: "stablehlo.
// CHECK: sdy.return
module attributes {mhlo.num_replicas = 1 : i32, mhlo.num_partitions = 4 : i32} {
  sdy.mesh @mesh = <["one"=1, "four"=4]>
  func.func @main(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"four"}, {}]>}) -> tensor<4xf32> {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = "stablehlo.all_reduce"(%x) <{
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, use_global_device_ids,
      replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "one">]>
    }> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) : (tensor<8x4xf32>) -> tensor<8x4xf32>
    %1 = "stablehlo.all_gather"(%0) <{
      all_gather_dim = 0 : i64,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, use_global_device_ids,
      replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "one">]>
    }> : (tensor<8x4xf32>) -> tensor<8x4xf32>
    %2 = "stablehlo.reduce_scatter"(%1) <{
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, use_global_device_ids,
      replica_groups = dense<[[0], [1], [2], [3]]> : tensor<4x1xi64>, scatter_dimension = 0 : i64
    }> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.maximum %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) : (tensor<8x4xf32>) -> tensor<8x4xf32>
    %3 = "stablehlo.all_to_all"(%2) <{
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, concat_dimension = 0 : i64,
      replica_groups = dense<[[0], [1], [2], [3]]> : tensor<4x1xi64>, split_count = 1 : i64, split_dimension = 1 : i64
    }> : (tensor<8x4xf32>) -> tensor<8x4xf32>
    %4 = "stablehlo.collective_permute"(%3) <{
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>,
      source_target_pairs = dense<[[0, 0], [1, 1], [2, 2], [3, 3]]> : tensor<4x2xi64>
    }> : (tensor<8x4xf32>) -> tensor<8x4xf32>
    %5 = "stablehlo.collective_broadcast"(%4) <{
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>,
      replica_groups = dense<[[0], [1], [2], [3]]> : tensor<4x1xi64>
    }> : (tensor<8x4xf32>) -> tensor<8x4xf32>
    %6 = stablehlo.reduce(%5 init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<8x4xf32>, tensor<f32>) -> tensor<4xf32>
    %7 = "stablehlo.collective_permute"(%6) <{
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>,
      source_target_pairs = dense<> : tensor<0x2xi64>
    }> : (tensor<4xf32>) -> tensor<4xf32>
    %8 = stablehlo.add %6, %7 : tensor<4xf32>
    return %8 : tensor<4xf32>
  }
}
