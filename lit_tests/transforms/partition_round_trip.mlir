// RUN: stablehlo-tools opt %s -p partition --split-input-file | filecheck %s

// Shardy's shardings as jax 0.4 wrote them, beside GSPMD's: of an argument, of a result, of an op, of
// a value. The mesh keeps its names.
// CHECK: module attributes {mhlo.num_partitions = 8 : i32}
// CHECK: sdy.mesh @mesh = <["data"=4, "model"=2]>
// CHECK-LABEL: @main
// CHECK-SAME: (%{{.+}}: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}, %{{.+}}: tensor<4xf32>)
// CHECK-SAME: -> (tensor<8x4xf32> {jax.result_info = "[0]", sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}, tensor<8x4xf32>)
// CHECK-NEXT: sdy.manual_computation
// CHECK-SAME: out_shardings=[<@mesh, [{}, {}]>, <@mesh, [{"data"}, {"model"}]>]
// CHECK-NOT: custom_call
// CHECK: stablehlo.add {{.+}} : tensor<2x4xf32>
// CHECK: all_gather
// CHECK-NOT: xla.sdy
module attributes {mhlo.frontend_attributes = {xla.sdy.meshes = "{mesh = #sdy.mesh<[\\\22data\\\22=4, \\\22model\\\22=2]>}"}, mhlo.num_partitions = 8 : i32} {
  func.func public @main(
      %x: tensor<8x4xf32> {mhlo.frontend_attributes = {xla.sdy.sharding = "#sdy.sharding<@mesh, [{\\\22data\\\22}, {}]>"}, mhlo.sharding = "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"},
      %b: tensor<4xf32>
  ) -> (tensor<8x4xf32> {jax.result_info = "[0]", mhlo.sharding = "{replicated}"}, tensor<8x4xf32>) {
    %0 = stablehlo.broadcast_in_dim %b, dims = [1] : (tensor<4xf32>) -> tensor<8x4xf32>
    %1 = stablehlo.add %x, %0 {mhlo.frontend_attributes = {xla.sdy.sharding = "#sdy.sharding_per_value<[<@mesh, [{\\\22data\\\22}, {\\\22model\\\22}]>]>"}} : tensor<8x4xf32>
    %2 = stablehlo.custom_call @xla.sdy.PropagationBarrier(%1) {mhlo.frontend_attributes = {xla.sdy.allowed_direction = "1 : i32"}} : (tensor<8x4xf32>) -> tensor<8x4xf32>
    %3 = stablehlo.custom_call @Sharding(%2) {mhlo.frontend_attributes = {xla.sdy.sharding = "#sdy.sharding_per_value<[<@mesh, [{\\\22data\\\22}, {?}]>]>"}, mhlo.sharding = "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"} : (tensor<8x4xf32>) -> tensor<8x4xf32>
    stablehlo.custom_call @xla.sdy.ShardingGroup(%3) {has_side_effect = true, mhlo.frontend_attributes = {xla.sdy.sharding_group_id = "0 : i64"}} : (tensor<8x4xf32>) -> ()
    %4 = stablehlo.custom_call @xla.sdy.FuncResultSharding(%3) {has_side_effect = true, mhlo.frontend_attributes = {xla.sdy.sharding = "#sdy.sharding_per_value<[<@mesh, [{}, {}]>]>"}} : (tensor<8x4xf32>) -> tensor<8x4xf32>
    return %4, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  }
}

// -----

// A shard_map in another one, their bodies functions: the call says how values come and go.
// CHECK-LABEL: @main
// CHECK: manual_axes={"data", "model"} (%[[X:.+]]: tensor<2x2xf32>) {
// CHECK-NEXT: %[[NEGATED:.+]] = stablehlo.negate %[[X]]
// CHECK-NEXT: stablehlo.exponential %[[NEGATED]]
// CHECK-NOT: manual_computation_body
module attributes {mhlo.frontend_attributes = {xla.sdy.meshes = "{mesh = #sdy.mesh<[\\\22data\\\22=4, \\\22model\\\22=2]>}"}, mhlo.num_partitions = 8 : i32} {
  func.func public @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
    %0 = stablehlo.custom_call @xla.sdy.GlobalToLocalShape(%x) : (tensor<8x4xf32>) -> tensor<2x4xf32>
    %1 = call @xla.sdy.manual_computation_body(%0) {mhlo.frontend_attributes = {xla.sdy.in_shardings = "#sdy.sharding_per_value<[<@mesh, [{\\\22data\\\22}, {?}]>]>", xla.sdy.manual_axes = "#sdy<manual_axes{\\\22data\\\22}>", xla.sdy.out_shardings = "#sdy.sharding_per_value<[<@mesh, [{\\\22data\\\22}, {?}]>]>"}} : (tensor<2x4xf32>) -> tensor<2x4xf32>
    %2 = stablehlo.custom_call @xla.sdy.LocalToGlobalShape(%1) : (tensor<2x4xf32>) -> tensor<8x4xf32>
    return %2 : tensor<8x4xf32>
  }
  func.func @xla.sdy.manual_computation_body(%x: tensor<2x4xf32>) -> tensor<2x4xf32> {
    %0 = stablehlo.negate %x : tensor<2x4xf32>
    %1 = stablehlo.custom_call @xla.sdy.GlobalToLocalShape(%0) : (tensor<2x4xf32>) -> tensor<2x2xf32>
    %2 = call @xla.sdy.manual_computation_body_0(%1) {mhlo.frontend_attributes = {xla.sdy.in_shardings = "#sdy.sharding_per_value<[<@mesh, [{}, {\\\22model\\\22}]>]>", xla.sdy.manual_axes = "#sdy<manual_axes{\\\22model\\\22}>", xla.sdy.out_shardings = "#sdy.sharding_per_value<[<@mesh, [{}, {\\\22model\\\22}]>]>"}} : (tensor<2x2xf32>) -> tensor<2x2xf32>
    %3 = stablehlo.custom_call @xla.sdy.LocalToGlobalShape(%2) : (tensor<2x2xf32>) -> tensor<2x4xf32>
    return %3 : tensor<2x4xf32>
  }
  func.func @xla.sdy.manual_computation_body_0(%x: tensor<2x2xf32>) -> tensor<2x2xf32> {
    %0 = stablehlo.exponential %x : tensor<2x2xf32>
    return %0 : tensor<2x2xf32>
  }
}
