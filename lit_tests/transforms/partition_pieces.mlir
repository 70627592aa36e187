// RUN: stablehlo-tools opt %s -p 'partition{choices=shardy}' | filecheck %s
// Made by: stablehlo-tools make-test pieces.mlir -p partition --full
// After a wanted change: stablehlo-tools make-test --update lit_tests/transforms/partition_pieces.mlir

// CHECK: sdy.mesh @[[MESH:[^ ,)]+]] = <["x"=2, "y"=2]>
// CHECK-LABEL: func.func @main(
// CHECK-SAME: %[[ARG:[^ ,)]+]]: tensor<3x12xf32> {sdy.sharding = #sdy.sharding<@[[MESH]], [{}, {"x"}]>}, %[[ARG_1:[^ ,)]+]]: tensor<3x4xf32> {sdy.sharding = #sdy.sharding<@[[MESH]], [{}, {"x"}]>}, %[[ARG_2:[^ ,)]+]]: tensor<f32>)
// CHECK-SAME: -> (tensor<3x4xf32> {sdy.sharding = #sdy.sharding<@[[MESH]], [{}, {"x"}]>}, tensor<2x12xf32>
// CHECK-SAME: {sdy.sharding = #sdy.sharding<@[[MESH]], [{}, {"x"}]>}, tensor<3x8xf32>
// CHECK-SAME: {sdy.sharding = #sdy.sharding<@[[MESH]], [{}, {"x"}]>})
// CHECK-NEXT: %[[MANUAL_COMPUTATION:[^ ,)]+]]:3 = sdy.manual_computation(%[[ARG]], %[[ARG_1]], %[[ARG_2]])
// CHECK-SAME: in_shardings=[<@[[MESH]], [{}, {"x"}]>, <@[[MESH]], [{}, {"x"}]>, <@[[MESH]], []>]
// CHECK-SAME: out_shardings=[<@[[MESH]], [{}, {"x"}]>, <@[[MESH]], [{}, {"x"}]>, <@[[MESH]], [{}, {"x"}]>]
// CHECK-SAME: manual_axes={"x", "y"} (%[[ARG_3:[^ ,)]+]]: tensor<3x6xf32>, %[[ARG_4:[^ ,)]+]]: tensor<3x2xf32>,
// CHECK-SAME: %[[ARG_5:[^ ,)]+]]: tensor<f32>) {
// CHECK-NEXT: %[[PARTITION:[^ ,)]+]] = stablehlo.partition_id : tensor<ui32>
// CHECK-NEXT: %[[CONSTANT:[^ ,)]+]] = stablehlo.constant dense<[1, 1, 0, 0]> : tensor<4xi32>
// CHECK-NEXT: %[[DYNAMIC_SLICE:[^ ,)]+]] = stablehlo.dynamic_slice %[[CONSTANT]], %[[PARTITION]], sizes = [1]
// CHECK-SAME: : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
// CHECK-NEXT: %[[RESHAPE:[^ ,)]+]] = stablehlo.reshape %[[DYNAMIC_SLICE]] : (tensor<1xi32>) -> tensor<i32>
// CHECK-NEXT: %[[CONSTANT_1:[^ ,)]+]] = stablehlo.constant dense<0> : tensor<i32>
// CHECK-NEXT: %[[CONSTANT_2:[^ ,)]+]] = stablehlo.constant dense<[0, 0, 1, 1]> : tensor<4xi32>
// CHECK-NEXT: %[[DYNAMIC_SLICE_1:[^ ,)]+]] = stablehlo.dynamic_slice %[[CONSTANT_2]], %[[PARTITION]], sizes = [1]
// CHECK-SAME: : (tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>
// CHECK-NEXT: %[[RESHAPE_1:[^ ,)]+]] = stablehlo.reshape %[[DYNAMIC_SLICE_1]] : (tensor<1xi32>) -> tensor<i32>
// CHECK-NEXT: %[[SLICE:[^ ,)]+]] = stablehlo.slice %[[ARG_3]] [0:3, 0:2] : (tensor<3x6xf32>) -> tensor<3x2xf32>
// CHECK-NEXT: %[[COMPARE:[^ ,)]+]] = stablehlo.compare NE, %[[RESHAPE]], %[[CONSTANT_1]] : (tensor<i32>, tensor<i32>) -> tensor<i1>
// CHECK-NEXT: %[[SLICE_1:[^ ,)]+]] = stablehlo.slice %[[ARG_3]] [0:3, 4:6] : (tensor<3x6xf32>) -> tensor<3x2xf32>
// CHECK-NEXT: %[[SELECT:[^ ,)]+]] = stablehlo.select %[[COMPARE]], %[[SLICE_1]], %[[SLICE]] : tensor<i1>, tensor<3x2xf32>
// CHECK-NEXT: %[[PAD:[^ ,)]+]] = stablehlo.pad %[[ARG_4]], %[[ARG_5]], low = [-1, 0], high = [0, 0], interior = [0, 0]
// CHECK-SAME: : (tensor<3x2xf32>, tensor<f32>) -> tensor<2x2xf32>
// CHECK-NEXT: %[[COLLECTIVE_PERMUTE:[^ ,)]+]] = "stablehlo.collective_permute"(%[[PAD]]) <{channel_handle{{.+}}type = 1>,
// CHECK-SAME: source_target_pairs = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>}> : (tensor<2x2xf32>) -> tensor<2x2xf32>
// CHECK-NEXT: %[[BROADCAST_IN_DIM:[^ ,)]+]] = stablehlo.broadcast_in_dim %[[ARG_5]], dims = [] : (tensor<f32>) -> tensor<2x2xf32>
// CHECK-NEXT: %[[BROADCAST_IN_DIM_1:[^ ,)]+]] = stablehlo.broadcast_in_dim %[[ARG_5]], dims = [] : (tensor<f32>) -> tensor<2x2xf32>
// CHECK-NEXT: %[[COMPARE_1:[^ ,)]+]] = stablehlo.compare NE, %[[RESHAPE_1]], %[[CONSTANT_1]] : (tensor<i32>, tensor<i32>) -> tensor<i1>
// CHECK-NEXT: %[[SELECT_1:[^ ,)]+]] = stablehlo.select %[[COMPARE_1]], %[[COLLECTIVE_PERMUTE]],
// CHECK-SAME: %[[BROADCAST_IN_DIM_1]] : tensor<i1>, tensor<2x2xf32>
// CHECK-NEXT: %[[BROADCAST_IN_DIM_2:[^ ,)]+]] = stablehlo.broadcast_in_dim %[[ARG_5]], dims = [] : (tensor<f32>) -> tensor<2x2xf32>
// CHECK-NEXT: %[[COMPARE_2:[^ ,)]+]] = stablehlo.compare NE, %[[RESHAPE_1]], %[[CONSTANT_1]] : (tensor<i32>, tensor<i32>) -> tensor<i1>
// CHECK-NEXT: %[[SELECT_2:[^ ,)]+]] = stablehlo.select %[[COMPARE_2]], %[[PAD]], %[[BROADCAST_IN_DIM_2]] : tensor<i1>, tensor<2x2xf32>
// CHECK-NEXT: %[[CONCATENATE:[^ ,)]+]] = stablehlo.concatenate %[[BROADCAST_IN_DIM]], %[[SELECT_1]], %[[SELECT_2]], dim = 1
// CHECK-SAME: : (tensor<2x2xf32>, tensor<2x2xf32>, tensor<2x2xf32>) -> tensor<2x6xf32>
// CHECK-NEXT: %[[COLLECTIVE_PERMUTE_1:[^ ,)]+]] = "stablehlo.collective_permute"(%[[ARG_4]]) <{channel_handle{{.+}}type = 1>,
// CHECK-SAME: source_target_pairs = dense<[[2, 0], [0, 2], [3, 1], [1, 3]]> : tensor<4x2xi64>}> : (tensor<3x2xf32>) -> tensor<3x2xf32>
// CHECK-NEXT: %[[COMPARE_3:[^ ,)]+]] = stablehlo.compare NE, %[[RESHAPE_1]], %[[CONSTANT_1]] : (tensor<i32>, tensor<i32>) -> tensor<i1>
// CHECK-NEXT: %[[SELECT_3:[^ ,)]+]] = stablehlo.select %[[COMPARE_3]], %[[COLLECTIVE_PERMUTE_1]], %[[ARG_4]] : tensor<i1>, tensor<3x2xf32>
// CHECK-NEXT: %[[COMPARE_4:[^ ,)]+]] = stablehlo.compare NE, %[[RESHAPE]], %[[CONSTANT_1]] : (tensor<i32>, tensor<i32>) -> tensor<i1>
// CHECK-NEXT: %[[SELECT_4:[^ ,)]+]] = stablehlo.select %[[COMPARE_4]], %[[COLLECTIVE_PERMUTE_1]], %[[ARG_4]] : tensor<i1>, tensor<3x2xf32>
// CHECK-NEXT: %[[CONCATENATE_1:[^ ,)]+]] = stablehlo.concatenate %[[SELECT_3]], %[[SELECT_4]], dim = 1 : (tensor<3x2xf32>,
// CHECK-SAME: tensor<3x2xf32>) -> tensor<3x4xf32>
// CHECK-NEXT: sdy.return %[[SELECT]], %[[CONCATENATE]], %[[CONCATENATE_1]] :
// CHECK-NEXT: } : (tensor<3x12xf32>, tensor<3x4xf32>, tensor<f32>) -> (tensor<3x4xf32>, tensor<2x12xf32>, tensor<3x8xf32>)
// CHECK-NEXT: return %[[MANUAL_COMPUTATION]]#0, %[[MANUAL_COMPUTATION]]#1, %[[MANUAL_COMPUTATION]]#2 :
// CHECK-NEXT: }

module {
  sdy.mesh @mesh = <["x"=2, "y"=2]>
  func.func @main(%arg0: tensor<3x12xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}, %arg1: tensor<3x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}, %arg2: tensor<f32>) -> (tensor<3x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}, tensor<2x12xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}, tensor<3x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}) {
    %0 = stablehlo.slice %arg0 [0:3, 4:8] : (tensor<3x12xf32>) -> tensor<3x4xf32>
    %1 = stablehlo.pad %arg1, %arg2, low = [-1, 8], high = [0, 0], interior = [0, 0] : (tensor<3x4xf32>, tensor<f32>) -> tensor<2x12xf32>
    %2 = stablehlo.concatenate %arg1, %arg1, dim = 1 : (tensor<3x4xf32>, tensor<3x4xf32>) -> tensor<3x8xf32>
    return %0, %1, %2 : tensor<3x4xf32>, tensor<2x12xf32>, tensor<3x8xf32>
  }
}
