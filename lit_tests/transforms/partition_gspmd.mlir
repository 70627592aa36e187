// RUN: stablehlo-tools opt %s -p 'partition{choices=shardy}' --split-input-file | filecheck %s

// GSPMD's shardings of arguments and results: the mesh is made of their tiles, by lists of devices,
// arrays of them and transposed arrays.
// CHECK: sdy.mesh @mesh = <["axis_0"=4, "axis_1"=2]>
// CHECK-LABEL: @arguments
// CHECK-SAME: (%{{.+}}: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"axis_0"}, {"axis_1"}]>},
// CHECK-SAME: %{{.+}}: tensor<4x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"axis_1"}, {}]>},
// CHECK-SAME: %{{.+}}: tensor<8xf32>)
// CHECK-SAME: -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"axis_0", "axis_1"}, {}]>})
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"axis_0", "axis_1"} (%[[X:.+]]: tensor<2x2xf32>, %[[W:.+]]: tensor<2x8xf32>, %[[B:.+]]: tensor<8xf32>) {
// CHECK: "stablehlo.all_to_all"(%[[X]])
// CHECK: "stablehlo.all_gather"(%[[W]])
// CHECK: stablehlo.dot_general {{.+}} -> tensor<1x8xf32>
func.func @arguments(
    %x: tensor<8x4xf32> {mhlo.sharding = "{devices=[4,2]0,1,2,3,4,5,6,7}"},
    %w: tensor<4x8xf32> {mhlo.sharding = "{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}"},
    %b: tensor<8xf32>
) -> (tensor<8x8xf32> {mhlo.sharding = "{devices=[8,1]<=[8]}"}) {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x8xf32>) -> tensor<8x8xf32>
  %1 = stablehlo.broadcast_in_dim %b, dims = [1] : (tensor<8xf32>) -> tensor<8x8xf32>
  %2 = stablehlo.add %0, %1 : tensor<8x8xf32>
  return %2 : tensor<8x8xf32>
}

// -----

// Devices in an order of their own; those that hold the same are told apart by no one.
// CHECK: sdy.mesh @mesh = <["axis_0"=2, "axis_1"=2], device_ids=[0, 3, 1, 2]>
// CHECK-LABEL: @device_order
// CHECK-SAME: sdy.sharding = #sdy.sharding<@mesh, [{"axis_0"}, {"axis_1"}]>
// CHECK-SAME: sdy.sharding = #sdy.sharding<@mesh, [{"axis_0"}, {}]>
func.func @device_order(
    %x: tensor<8x4xf32> {mhlo.sharding = "{devices=[2,2]0,3,1,2}"}
) -> (tensor<8x4xf32> {mhlo.sharding = "{devices=[2,1,2]0,3,1,2 last_tile_dim_replicate}"}) {
  return %x : tensor<8x4xf32>
}

// -----

// Constraints, of which some say nothing of a dimension, or of none; an op's own sharding, and that
// of a call of two results. Serialized as older jax did it: {devices=[2,1]0,1}.
// CHECK-LABEL: @ops
// CHECK-NOT: mhlo.sharding
// CHECK: sdy.manual_computation(%{{.+}}) in_shardings=[<@mesh, [{}, {"axis_0"}]>] out_shardings=[<@mesh, [{"axis_0"}, {}]>, <@mesh, [{}, {}]>, <@mesh, [{}, {"axis_0"}]>, <@mesh, [{"axis_0"}, {}]>]
// CHECK-NOT: custom_call
func.func @ops(%x: tensor<8x4xf32>) -> (tensor<8x4xf32>, tensor<8x4xf32>, tensor<8x4xf32>, tensor<8x4xf32>) {
  %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[1,2]<=[2]}", backend_config = "unspecified_dims=[0,1]"} : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %1:2 = func.call @twice(%x) {mhlo.sharding = "{{devices=[2,1]<=[2]}, {replicated}}"} : (tensor<8x4xf32>) -> (tensor<8x4xf32>, tensor<8x4xf32>)
  %2 = stablehlo.negate %x {mhlo.sharding = "{devices=[1,2]<=[2] metadata={op_name=\"jit(f)\"}}"} : tensor<8x4xf32>
  %3 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "\08\03\1A\02\02\01\22\02\00\01"} : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %1#0, %1#1, %2, %3 : tensor<8x4xf32>, tensor<8x4xf32>, tensor<8x4xf32>, tensor<8x4xf32>
}
func.func private @twice(%x: tensor<8x4xf32>) -> (tensor<8x4xf32>, tensor<8x4xf32>) {
  %0 = stablehlo.add %x, %x : tensor<8x4xf32>
  %1 = stablehlo.multiply %x, %x : tensor<8x4xf32>
  return %0, %1 : tensor<8x4xf32>, tensor<8x4xf32>
}

// -----

// What a module that was HLO says of its parameters and its output.
// CHECK-LABEL: @main
// CHECK-SAME: sdy.sharding = #sdy.sharding<@mesh, [{"axis_0"}, {}]>
// CHECK-SAME: sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>
// CHECK: all_gather
module attributes {mhlo.num_partitions = 2 : i32, mhlo.spmd_parameters_shardings = ["{devices=[2,1]<=[2]}"], mhlo.spmd_output_sharding = "{replicated}"} {
  func.func @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
    return %x : tensor<8x4xf32>
  }
}

// -----

// A shard_map over all axes, as a call of its body, and one over an axis, whose body follows. The
// constant is one for each of them; ops of the program stand in between.
// CHECK-LABEL: @shard_maps
// CHECK: sdy.manual_computation
// CHECK-SAME: manual_axes={"axis_0", "axis_1"} (%[[X:.+]]: tensor<2x2xf32>) {
// CHECK: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[X]])
// CHECK-SAME: dense<{{\[\[0, 1\], \[2, 3\], \[4, 5\], \[6, 7\]\]}}>
// CHECK: %[[TWICE:.+]] = stablehlo.add %[[SUM]], %[[SUM]]
// CHECK: stablehlo.multiply %[[X]], %{{.+}} : tensor<2x2xf32>
// CHECK-NOT: SPMD
func.func @shard_maps(%x: tensor<8x4xf32> {mhlo.sharding = "{devices=[4,2]<=[8]}"}) -> (tensor<8x2xf32>, tensor<8x4xf32>) {
  %c = stablehlo.constant dense<2.0> : tensor<8x2xf32>
  %0 = stablehlo.custom_call @SPMDFullToShardShape(%x) {mhlo.sharding = "{manual}"} : (tensor<8x4xf32>) -> tensor<2x2xf32>
  %marked = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[1,2,4]<=[4,2]T(1,0) last_tile_dim_replicate}", backend_config = "unspecified_dims=[0]"} : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %1 = stablehlo.custom_call @SPMDFullToShardShape(%marked) {mhlo.sharding = "{devices=[1,1,2,4]<=[4,2]T(1,0) last_tile_dims={manual, replicated}}", backend_config = "unspecified_dims=[0]"} : (tensor<8x4xf32>) -> tensor<8x2xf32>
  %2 = stablehlo.multiply %1, %c : tensor<8x2xf32>
  %3 = func.call @body(%0) : (tensor<2x2xf32>) -> tensor<2x2xf32>
  %4 = stablehlo.custom_call @Sharding(%3) {mhlo.sharding = "{manual}"} : (tensor<2x2xf32>) -> tensor<2x2xf32>
  %5 = stablehlo.custom_call @SPMDShardToFullShape(%4) {mhlo.sharding = "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"} : (tensor<2x2xf32>) -> tensor<8x2xf32>
  %6 = stablehlo.add %5, %5 : tensor<8x2xf32>
  %7 = stablehlo.custom_call @SPMDShardToFullShape(%2) {mhlo.sharding = "{devices=[1,2,4]<=[4,2]T(1,0) last_tile_dim_replicate}", backend_config = "unspecified_dims=[0]"} : (tensor<8x2xf32>) -> tensor<8x4xf32>
  return %6, %7 : tensor<8x2xf32>, tensor<8x4xf32>
}
func.func private @body(%x: tensor<2x2xf32>) -> tensor<2x2xf32> {
  %0 = "stablehlo.all_reduce"(%x) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1], [2, 3], [4, 5], [6, 7]]> : tensor<4x2xi64>, use_global_device_ids}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %1 = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }) : (tensor<2x2xf32>) -> tensor<2x2xf32>
  return %0 : tensor<2x2xf32>
}

// -----

// Two that are entwined in the text, and depend on one another; one in a loop.
// CHECK-LABEL: @entwined
// CHECK: stablehlo.negate %{{.+}} : tensor<2x4xf32>
// CHECK: stablehlo.exponential %{{.+}} : tensor<2x4xf32>
// CHECK: stablehlo.while
// CHECK: stablehlo.tanh %{{.+}} : tensor<2x4xf32>
// CHECK-NOT: SPMD
func.func @entwined(%x: tensor<4x4xf32> {mhlo.sharding = "{devices=[2,1]<=[2]}"}, %y: tensor<4x4xf32> {mhlo.sharding = "{devices=[2,1]<=[2]}"}) -> tensor<4x4xf32> {
  %a = stablehlo.custom_call @SPMDFullToShardShape(%x) {mhlo.sharding = "{manual}"} : (tensor<4x4xf32>) -> tensor<2x4xf32>
  %b = stablehlo.negate %a : tensor<2x4xf32>
  %c = stablehlo.custom_call @SPMDShardToFullShape(%b) {mhlo.sharding = "{devices=[2,1]<=[2]}"} : (tensor<2x4xf32>) -> tensor<4x4xf32>
  %d = stablehlo.custom_call @Sharding(%c) {mhlo.sharding = "{devices=[2,1]<=[2]}"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %e = stablehlo.custom_call @SPMDFullToShardShape(%d) {mhlo.sharding = "{manual}"} : (tensor<4x4xf32>) -> tensor<2x4xf32>
  %f = stablehlo.custom_call @SPMDFullToShardShape(%y) {mhlo.sharding = "{manual}"} : (tensor<4x4xf32>) -> tensor<2x4xf32>
  %g = stablehlo.exponential %e : tensor<2x4xf32>
  %h = stablehlo.add %b, %f : tensor<2x4xf32>
  %i = stablehlo.custom_call @SPMDShardToFullShape(%h) {mhlo.sharding = "{devices=[2,1]<=[2]}"} : (tensor<2x4xf32>) -> tensor<4x4xf32>
  %j = stablehlo.custom_call @SPMDShardToFullShape(%g) {mhlo.sharding = "{devices=[2,1]<=[2]}"} : (tensor<2x4xf32>) -> tensor<4x4xf32>
  %sum = stablehlo.add %i, %j : tensor<4x4xf32>
  %k = stablehlo.while(%v = %sum) : tensor<4x4xf32>
    cond {
      %no = stablehlo.constant dense<false> : tensor<i1>
      stablehlo.return %no : tensor<i1>
    } do {
      %marked = stablehlo.custom_call @Sharding(%v) {mhlo.sharding = "{devices=[2,1]<=[2]}"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
      %l = stablehlo.custom_call @SPMDFullToShardShape(%marked) {mhlo.sharding = "{manual}"} : (tensor<4x4xf32>) -> tensor<2x4xf32>
      %m = stablehlo.tanh %l : tensor<2x4xf32>
      %n = stablehlo.custom_call @SPMDShardToFullShape(%m) {mhlo.sharding = "{devices=[2,1]<=[2]}"} : (tensor<2x4xf32>) -> tensor<4x4xf32>
      stablehlo.return %n : tensor<4x4xf32>
    }
  return %k : tensor<4x4xf32>
}
