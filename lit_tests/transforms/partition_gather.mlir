// RUN: stablehlo-tools opt %s -p 'partition{choices=shardy}' --split-input-file --verify-diagnostics | filecheck %s --enable-var-scope

// Rows of a divided table, as of an embedding: indices are clamped as on the whole table and shifted
// by the start of the part; where one is another device's, -0.0 stands for it, which leaves every
// element as it is in the sum that follows, -0.0 too.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @gather
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[T:.+]]: tensor<2x3xf32>, %[[I:.+]]: tensor<5x1xi32>) {
// CHECK-NEXT: %[[DEVICE:.+]] = stablehlo.partition_id : tensor<ui32>
// CHECK-NEXT: %[[TABLE:.+]] = stablehlo.constant dense<[0, 0, 2, 2, 4, 4, 6, 6]> : tensor<8xi32>
// CHECK-NEXT: %[[ROW:.+]] = stablehlo.dynamic_slice %[[TABLE]], %[[DEVICE]], sizes = [1]
// CHECK-NEXT: %[[START:.+]] = stablehlo.reshape %[[ROW]]
// CHECK-NEXT: %[[ZERO:.+]] = stablehlo.constant dense<0> : tensor<5x1xi32>
// CHECK-NEXT: %[[CONSTANT:.+]] = stablehlo.constant dense<7> : tensor<5x1xi32>
// CHECK-NEXT: %[[CLAMP:.+]] = stablehlo.clamp %[[ZERO]], %[[I]], %[[CONSTANT]] : tensor<5x1xi32>
// CHECK-NEXT: %[[SPREAD:.+]] = stablehlo.broadcast_in_dim %[[START]], dims = []
// CHECK-SAME: -> tensor<5x1xi32>
// CHECK-NEXT: %[[SUBTRACT:.+]] = stablehlo.subtract %[[CLAMP]], %[[SPREAD]] : tensor<5x1xi32>
// CHECK-NEXT: %[[ZERO_2:.+]] = stablehlo.constant dense<0> : tensor<5x1xi32>
// CHECK-NEXT: %[[COMPARE:.+]] = stablehlo.compare GE, %[[SUBTRACT]], %[[ZERO_2]]
// CHECK-SAME: -> tensor<5x1xi1>
// CHECK-NEXT: %[[CONSTANT_2:.+]] = stablehlo.constant dense<1> : tensor<5x1xi32>
// CHECK-NEXT: %[[COMPARE_2:.+]] = stablehlo.compare LE, %[[SUBTRACT]], %[[CONSTANT_2]]
// CHECK-SAME: -> tensor<5x1xi1>
// CHECK-NEXT: %[[AND:.+]] = stablehlo.and %[[COMPARE]], %[[COMPARE_2]] : tensor<5x1xi1>
// CHECK-NEXT: %[[RESHAPE:.+]] = stablehlo.reshape %[[AND]]
// CHECK-SAME: -> tensor<5xi1>
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.gather"(%[[T]], %[[SUBTRACT]])
// CHECK-SAME: dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, 3>
// CHECK-SAME: -> tensor<5x3xf32>
// CHECK-NEXT: %[[SPREAD_2:.+]] = stablehlo.broadcast_in_dim %[[RESHAPE]], dims = [0]
// CHECK-SAME: -> tensor<5x3xi1>
// CHECK-NEXT: %[[CONSTANT_3:.+]] = stablehlo.constant dense<-0.000000e+00> : tensor<5x3xf32>
// CHECK-NEXT: %[[SELECT:.+]] = stablehlo.select %[[SPREAD_2]], %[[GATHER]], %[[CONSTANT_3]] : tensor<5x3xi1>, tensor<5x3xf32>
// CHECK-NEXT: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[SELECT]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK: stablehlo.add
// CHECK: }) : (tensor<5x3xf32>) -> tensor<5x3xf32>
// CHECK-NEXT: sdy.return %[[SUM]] : tensor<5x3xf32>
func.func @gather(
    %t: tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, %i: tensor<5x1xi32>
) -> tensor<5x3xf32> {
  %0 = "stablehlo.gather"(%t, %i) {
    dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
    slice_sizes = array<i64: 1, 3>
  } : (tensor<8x3xf32>, tensor<5x1xi32>) -> tensor<5x3xf32>
  return %0 : tensor<5x3xf32>
}

// -----

// Small indices are widened first: an i8 could not tell every place.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @gather_by_small_indices
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[T:.+]]: tensor<4xi32>, %[[I:.+]]: tensor<5xi8>) {
// CHECK-NEXT: %[[DEVICE:.+]] = stablehlo.partition_id : tensor<ui32>
// CHECK-NEXT: %[[TABLE:.+]] = stablehlo.constant dense<[0, 4, 0, 4, 0, 4, 0, 4]> : tensor<8xi32>
// CHECK-NEXT: %[[ROW:.+]] = stablehlo.dynamic_slice %[[TABLE]], %[[DEVICE]], sizes = [1]
// CHECK-NEXT: %[[START:.+]] = stablehlo.reshape %[[ROW]]
// CHECK-NEXT: %[[CONVERT:.+]] = stablehlo.convert %[[I]]
// CHECK-SAME: -> tensor<5xi32>
// CHECK-NEXT: %[[ZERO:.+]] = stablehlo.constant dense<0> : tensor<5xi32>
// CHECK-NEXT: %[[CONSTANT:.+]] = stablehlo.constant dense<7> : tensor<5xi32>
// CHECK-NEXT: %[[CLAMP:.+]] = stablehlo.clamp %[[ZERO]], %[[CONVERT]], %[[CONSTANT]] : tensor<5xi32>
// CHECK-NEXT: %[[SPREAD:.+]] = stablehlo.broadcast_in_dim %[[START]], dims = []
// CHECK-SAME: -> tensor<5xi32>
// CHECK-NEXT: %[[SUBTRACT:.+]] = stablehlo.subtract %[[CLAMP]], %[[SPREAD]] : tensor<5xi32>
// CHECK-NEXT: %[[ZERO_2:.+]] = stablehlo.constant dense<0> : tensor<5xi32>
// CHECK-NEXT: %[[COMPARE:.+]] = stablehlo.compare GE, %[[SUBTRACT]], %[[ZERO_2]]
// CHECK-SAME: -> tensor<5xi1>
// CHECK-NEXT: %[[CONSTANT_2:.+]] = stablehlo.constant dense<3> : tensor<5xi32>
// CHECK-NEXT: %[[COMPARE_2:.+]] = stablehlo.compare LE, %[[SUBTRACT]], %[[CONSTANT_2]]
// CHECK-SAME: -> tensor<5xi1>
// CHECK-NEXT: %[[AND:.+]] = stablehlo.and %[[COMPARE]], %[[COMPARE_2]] : tensor<5xi1>
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.gather"(%[[T]], %[[SUBTRACT]])
// CHECK-SAME: dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1>
// CHECK-SAME: -> tensor<5xi32>
// CHECK-NEXT: %[[SPREAD_2:.+]] = stablehlo.broadcast_in_dim %[[AND]], dims = [0]
// CHECK-SAME: -> tensor<5xi1>
// CHECK-NEXT: %[[ZERO_3:.+]] = stablehlo.constant dense<0> : tensor<5xi32>
// CHECK-NEXT: %[[SELECT:.+]] = stablehlo.select %[[SPREAD_2]], %[[GATHER]], %[[ZERO_3]] : tensor<5xi1>, tensor<5xi32>
// CHECK-NEXT: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[SELECT]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 1], [2, 3], [4, 5], [6, 7]]>
// CHECK: stablehlo.add
// CHECK: }) : (tensor<5xi32>) -> tensor<5xi32>
// CHECK-NEXT: sdy.return %[[SUM]] : tensor<5xi32>
func.func @gather_by_small_indices(
    %t: tensor<8xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}]>}, %i: tensor<5xi8>
) -> tensor<5xi32> {
  %0 = "stablehlo.gather"(%t, %i) {
    dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
    slice_sizes = array<i64: 1>
  } : (tensor<8xi32>, tensor<5xi8>) -> tensor<5xi32>
  return %0 : tensor<5xi32>
}

// -----

// Divided indices and divided columns need none of this: each device gathers for itself.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @gather_along_other_dimensions
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[T:.+]]: tensor<8x2xf32>, %[[I:.+]]: tensor<2x1xi32>) {
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.gather"(%[[T]], %[[I]])
// CHECK-SAME: dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, 2>
// CHECK-SAME: -> tensor<2x2xf32>
// CHECK-NEXT: sdy.return %[[GATHER]] : tensor<2x2xf32>
func.func @gather_along_other_dimensions(
    %t: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"y"}]>},
    %i: tensor<8x1xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> tensor<8x4xf32> {
  %0 = "stablehlo.gather"(%t, %i) {
    dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
    slice_sizes = array<i64: 1, 4>
  } : (tensor<8x4xf32>, tensor<8x1xi32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}
