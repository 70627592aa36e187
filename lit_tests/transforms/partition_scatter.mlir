// RUN: stablehlo-tools opt %s -p 'partition{choices=shardy}' --split-input-file --verify-diagnostics | filecheck %s --enable-var-scope

// Into a divided dimension each device scatters what falls into its part: the others' indices are
// out of bounds there, and scatter drops them.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @scatter
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[T:.+]]: tensor<2x3xf32>, %[[I:.+]]: tensor<5x1xi32>, %[[U:.+]]: tensor<5x3xf32>) {
// CHECK-NEXT: %[[DEVICE:.+]] = stablehlo.partition_id : tensor<ui32>
// CHECK-NEXT: %[[TABLE:.+]] = stablehlo.constant dense<[0, 0, 2, 2, 4, 4, 6, 6]> : tensor<8xi32>
// CHECK-NEXT: %[[ROW:.+]] = stablehlo.dynamic_slice %[[TABLE]], %[[DEVICE]], sizes = [1]
// CHECK-NEXT: %[[START:.+]] = stablehlo.reshape %[[ROW]]
// CHECK-NEXT: %[[SPREAD:.+]] = stablehlo.broadcast_in_dim %[[START]], dims = []
// CHECK-SAME: -> tensor<5x1xi32>
// CHECK-NEXT: %[[SUBTRACT:.+]] = stablehlo.subtract %[[I]], %[[SPREAD]] : tensor<5x1xi32>
// CHECK-NEXT: %[[SCATTER:.+]] = "stablehlo.scatter"(%[[T]], %[[SUBTRACT]], %[[U]])
// CHECK-SAME: indices_are_sorted = false, scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>
// CHECK: stablehlo.add
// CHECK: }) : (tensor<2x3xf32>, tensor<5x1xi32>, tensor<5x3xf32>) -> tensor<2x3xf32>
// CHECK-NEXT: sdy.return %[[SCATTER]] : tensor<2x3xf32>
func.func @scatter(
    %t: tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %i: tensor<5x1xi32>, %u: tensor<5x3xf32>
) -> (tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  %0 = "stablehlo.scatter"(%t, %i, %u) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %1 = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }) {
    indices_are_sorted = true,
    scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>
  } : (tensor<8x3xf32>, tensor<5x1xi32>, tensor<5x3xf32>) -> tensor<8x3xf32>
  return %0 : tensor<8x3xf32>
}

// -----

// Of divided updates every device adds its own, to the operand on one of them and to -0.0 on the
// others; then all are summed.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @scatter_of_divided_updates
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[T:.+]]: tensor<6x3xf32>, %[[I:.+]]: tensor<2x1xi32>, %[[U:.+]]: tensor<2x3xf32>) {
// CHECK-NEXT: %[[DEVICE:.+]] = stablehlo.partition_id : tensor<ui32>
// CHECK-NEXT: %[[TABLE:.+]] = stablehlo.constant dense<[0, 0, 1, 1, 2, 2, 3, 3]> : tensor<8xi32>
// CHECK-NEXT: %[[ROW:.+]] = stablehlo.dynamic_slice %[[TABLE]], %[[DEVICE]], sizes = [1]
// CHECK-NEXT: %[[START:.+]] = stablehlo.reshape %[[ROW]]
// CHECK-NEXT: %[[ZERO:.+]] = stablehlo.constant dense<0> : tensor<i32>
// CHECK-NEXT: %[[COMPARE:.+]] = stablehlo.compare EQ, %[[START]], %[[ZERO]]
// CHECK-SAME: -> tensor<i1>
// CHECK-NEXT: %[[CONSTANT:.+]] = stablehlo.constant dense<-0.000000e+00> : tensor<6x3xf32>
// CHECK-NEXT: %[[SELECT:.+]] = stablehlo.select %[[COMPARE]], %[[T]], %[[CONSTANT]] : tensor<i1>, tensor<6x3xf32>
// CHECK-NEXT: %[[SCATTER:.+]] = "stablehlo.scatter"(%[[SELECT]], %[[I]], %[[U]])
// CHECK-SAME: scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>
// CHECK: stablehlo.add
// CHECK: }) : (tensor<6x3xf32>, tensor<2x1xi32>, tensor<2x3xf32>) -> tensor<6x3xf32>
// CHECK-NEXT: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[SCATTER]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK: stablehlo.add
// CHECK: }) : (tensor<6x3xf32>) -> tensor<6x3xf32>
// CHECK-NEXT: sdy.return %[[SUM]] : tensor<6x3xf32>
func.func @scatter_of_divided_updates(
    %t: tensor<6x3xf32>,
    %i: tensor<8x1xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %u: tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> (tensor<6x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
  %0 = "stablehlo.scatter"(%t, %i, %u) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %1 = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }) {
    scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>
  } : (tensor<6x3xf32>, tensor<8x1xi32>, tensor<8x3xf32>) -> tensor<6x3xf32>
  return %0 : tensor<6x3xf32>
}

// -----

// Zeros, as a gradient starts from, may be everywhere: no device leads.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @scatter_into_zeros
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[I:.+]]: tensor<2x1xi32>, %[[U:.+]]: tensor<2xi32>) {
// CHECK-NEXT: %[[ZERO:.+]] = stablehlo.constant dense<0> : tensor<6xi32>
// CHECK-NEXT: %[[SCATTER:.+]] = "stablehlo.scatter"(%[[ZERO]], %[[I]], %[[U]])
// CHECK-SAME: scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>
// CHECK: stablehlo.add
// CHECK: }) : (tensor<6xi32>, tensor<2x1xi32>, tensor<2xi32>) -> tensor<6xi32>
// CHECK-NEXT: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[SCATTER]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK: stablehlo.add
// CHECK: }) : (tensor<6xi32>) -> tensor<6xi32>
// CHECK-NEXT: sdy.return %[[SUM]] : tensor<6xi32>
func.func @scatter_into_zeros(
    %i: tensor<8x1xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %u: tensor<8xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}
) -> (tensor<6xi32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}) {
  %t = stablehlo.constant dense<0> : tensor<6xi32>
  %0 = "stablehlo.scatter"(%t, %i, %u) ({
  ^bb0(%a: tensor<i32>, %b: tensor<i32>):
    %1 = stablehlo.add %a, %b : tensor<i32>
    stablehlo.return %1 : tensor<i32>
  }) {
    scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>
  } : (tensor<6xi32>, tensor<8x1xi32>, tensor<8xi32>) -> tensor<6xi32>
  return %0 : tensor<6xi32>
}

// -----

// One that overwrites cannot be summed: the updates are gathered.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @overwriting_scatter
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[T:.+]]: tensor<6xi32>, %[[I:.+]]: tensor<2x1xi32>, %[[U:.+]]: tensor<2xi32>) {
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[I]])
// CHECK-SAME: all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: -> tensor<8x1xi32>
// CHECK-NEXT: %[[GATHER_2:.+]] = "stablehlo.all_gather"(%[[U]])
// CHECK-SAME: all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: -> tensor<8xi32>
// CHECK-NEXT: %[[SCATTER:.+]] = "stablehlo.scatter"(%[[T]], %[[GATHER]], %[[GATHER_2]])
// CHECK-SAME: scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>
// CHECK: }) : (tensor<6xi32>, tensor<8x1xi32>, tensor<8xi32>) -> tensor<6xi32>
// CHECK-NEXT: sdy.return %[[SCATTER]] : tensor<6xi32>
func.func @overwriting_scatter(
    %t: tensor<6xi32>,
    %i: tensor<8x1xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %u: tensor<8xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}
) -> (tensor<6xi32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}) {
  %0 = "stablehlo.scatter"(%t, %i, %u) ({
  ^bb0(%a: tensor<i32>, %b: tensor<i32>):
    stablehlo.return %b : tensor<i32>
  }) {
    scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>
  } : (tensor<6xi32>, tensor<8x1xi32>, tensor<8xi32>) -> tensor<6xi32>
  return %0 : tensor<6xi32>
}

// -----

// Each device looks whether the row is in its part, and else puts there what is there.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @update_of_one_row
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[T:.+]]: tensor<2x3xf32>, %[[U:.+]]: tensor<1x3xf32>, %[[N:.+]]: tensor<i32>) {
// CHECK: %[[CLAMP:.+]] = stablehlo.clamp %{{.+}}, %[[N]], %{{.+}} : tensor<i32>
// CHECK-NEXT: %[[SUBTRACT:.+]] = stablehlo.subtract %[[CLAMP]], %{{.+}} : tensor<i32>
// CHECK-NEXT: %[[PLACE:.+]] = stablehlo.clamp %{{.+}}, %[[SUBTRACT]], %{{.+}} : tensor<i32>
// CHECK: %[[INSIDE:.+]] = stablehlo.broadcast_in_dim %{{.+}}, dims = [] : (tensor<i1>) -> tensor<1x3xi1>
// CHECK-NEXT: %[[PART:.+]] = stablehlo.dynamic_slice %[[T]], %[[PLACE]], %{{.+}}, sizes = [1, 3]
// CHECK: %[[SELECT:.+]] = stablehlo.select %[[INSIDE]], %[[U]], %[[PART]] : tensor<1x3xi1>, tensor<1x3xf32>
// CHECK-NEXT: %[[UPDATE:.+]] = stablehlo.dynamic_update_slice %[[T]], %[[SELECT]], %[[PLACE]], %{{.+}}
// CHECK-NEXT: sdy.return %[[UPDATE]] : tensor<2x3xf32>
func.func @update_of_one_row(
    %t: tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %u: tensor<1x3xf32>, %n: tensor<i32>
) -> tensor<8x3xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %0 = stablehlo.dynamic_update_slice %t, %u, %n, %zero : (tensor<8x3xf32>, tensor<1x3xf32>, tensor<i32>, tensor<i32>) -> tensor<8x3xf32>
  return %0 : tensor<8x3xf32>
}

// -----

// Of an update of three rows, two at most are in a part of two.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @update_of_several_rows
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[T:.+]]: tensor<2x4xf32>, %[[U:.+]]: tensor<3x4xf32>, %[[N:.+]]: tensor<i32>) {
// CHECK-NOT: all_
// CHECK: %[[INSIDE:.+]] = stablehlo.broadcast_in_dim %{{.+}}, dims = [0] : (tensor<2xi1>) -> tensor<2x4xi1>
// CHECK-NEXT: %[[PART:.+]] = stablehlo.dynamic_slice %[[T]], %{{.+}}, %{{.+}}, sizes = [2, 4]
// CHECK: %[[WIDE:.+]] = stablehlo.pad %[[U]], %{{.+}}, low = [2, 0], high = [2, 0], interior = [0, 0]
// CHECK-NEXT: %[[ROWS:.+]] = stablehlo.dynamic_slice %[[WIDE]], %{{.+}}, %{{.+}}, sizes = [2, 4]
// CHECK-NEXT: %[[SELECT:.+]] = stablehlo.select %[[INSIDE]], %[[ROWS]], %[[PART]]
// CHECK-NEXT: %[[UPDATE:.+]] = stablehlo.dynamic_update_slice %[[T]], %[[SELECT]]
// CHECK-NEXT: sdy.return %[[UPDATE]] : tensor<2x4xf32>
func.func @update_of_several_rows(
    %t: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %u: tensor<3x4xf32>, %n: tensor<i32>
) -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %0 = stablehlo.dynamic_update_slice %t, %u, %n, %zero : (tensor<8x4xf32>, tensor<3x4xf32>, tensor<i32>, tensor<i32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}

// -----

// Whole rows by two indices, as jax.vmap writes an embedding's gradient: the second has to be 0, and
// the row is an inserted dimension.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @rows_by_two_indices
// CHECK-SAME: (%[[ARG0:.+]]: tensor<8x6xf32>
// CHECK: manual_axes={"x"} (%[[T:.+]]: tensor<8x6xf32>, %[[I:.+]]: tensor<5x2xi32>, %[[U:.+]]: tensor<5x1x6xf32>)
// CHECK: %[[ROW:.+]] = stablehlo.slice %[[I]] [0:5, 0:1]
// CHECK-NEXT: %[[COLUMN:.+]] = stablehlo.slice %[[I]] [0:5, 1:2]
// CHECK: %[[STARTS:.+]] = stablehlo.compare EQ, %[[COLUMN]], %
// CHECK: %[[OUTSIDE:.+]] = stablehlo.constant dense<-1> : tensor<5x1xi32>
// CHECK-NEXT: %[[ROWS:.+]] = stablehlo.select %[[STARTS]], %[[ROW]], %[[OUTSIDE]]
// CHECK-NEXT: %[[UPDATES:.+]] = stablehlo.reshape %[[U]] : (tensor<5x1x6xf32>) -> tensor<5x6xf32>
// CHECK: "stablehlo.scatter"(%[[T]], %[[ROWS]], %[[UPDATES]])
// CHECK-SAME: indices_are_sorted = false, scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>
func.func @rows_by_two_indices(
    %t: tensor<8x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}, %i: tensor<5x2xi32>, %u: tensor<5x1x6xf32>
) -> (tensor<8x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
  %0 = "stablehlo.scatter"(%t, %i, %u) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %1 = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }) {
    indices_are_sorted = true,
    scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1, 2], scatter_dims_to_operand_dims = [0, 1], index_vector_dim = 1>
  } : (tensor<8x6xf32>, tensor<5x2xi32>, tensor<5x1x6xf32>) -> tensor<8x6xf32>
  return %0 : tensor<8x6xf32>
}

// -----

// Windows over two of eight rows stay what they are.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @two_rows
// CHECK: scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1, 2], scatter_dims_to_operand_dims = [0, 1], index_vector_dim = 1>
func.func @two_rows(
    %t: tensor<8x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}, %i: tensor<5x2xi32>, %u: tensor<5x2x6xf32>
) -> (tensor<8x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
  %0 = "stablehlo.scatter"(%t, %i, %u) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %1 = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }) {
    scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1, 2], scatter_dims_to_operand_dims = [0, 1], index_vector_dim = 1>
  } : (tensor<8x6xf32>, tensor<5x2xi32>, tensor<5x2x6xf32>) -> tensor<8x6xf32>
  return %0 : tensor<8x6xf32>
}
