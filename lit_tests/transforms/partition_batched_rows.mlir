// RUN: stablehlo-tools opt %s -p partition --split-input-file --verify-diagnostics | filecheck %s --enable-var-scope

// Labels picked by two iotas, one of which jax has normalised: each device has its own rows.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @picked
// CHECK: sdy.manual_computation
// CHECK-SAME: manual_axes={"x"} (%[[C:.+]]: tensor<2x5x6xf32>, %[[I:.+]]: tensor<2x5xi32>) {
// CHECK-NEXT: %[[INDEX:.+]] = stablehlo.reshape %[[I]] : (tensor<2x5xi32>) -> tensor<2x5x1xi32>
// CHECK-NEXT: "stablehlo.gather"(%[[C]], %[[INDEX]])
// CHECK-SAME: dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [2], operand_batching_dims = [0, 1], start_indices_batching_dims = [0, 1], start_index_map = [2], index_vector_dim = 2>
// CHECK-NEXT: sdy.return
func.func @picked(
    %c: tensor<8x5x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}, {}]>},
    %i: tensor<8x5xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> tensor<8x5xf32> {
  %zero = stablehlo.constant dense<0> : tensor<8x1xi32>
  %eight = stablehlo.constant dense<8> : tensor<8x1xi32>
  %rows = stablehlo.iota dim = 0 : tensor<8x1xi32>
  %negative = stablehlo.compare LT, %rows, %zero : (tensor<8x1xi32>, tensor<8x1xi32>) -> tensor<8x1xi1>
  %from_end = stablehlo.add %rows, %eight : tensor<8x1xi32>
  %normal = stablehlo.select %negative, %from_end, %rows : tensor<8x1xi1>, tensor<8x1xi32>
  %one = stablehlo.broadcast_in_dim %normal, dims = [0, 1] : (tensor<8x1xi32>) -> tensor<8x5x1xi32>
  %columns = stablehlo.iota dim = 0 : tensor<5xui8>
  %wide = stablehlo.convert %columns : (tensor<5xui8>) -> tensor<5xi32>
  %two = stablehlo.broadcast_in_dim %wide, dims = [1] : (tensor<5xi32>) -> tensor<8x5x1xi32>
  %three = stablehlo.reshape %i : (tensor<8x5xi32>) -> tensor<8x5x1xi32>
  %index = stablehlo.concatenate %one, %two, %three, dim = 2 : (tensor<8x5x1xi32>, tensor<8x5x1xi32>, tensor<8x5x1xi32>) -> tensor<8x5x3xi32>
  %0 = "stablehlo.gather"(%c, %index) <{
    dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0, 1, 2], start_index_map = [0, 1, 2], index_vector_dim = 2>,
    indices_are_sorted = true, slice_sizes = array<i64: 1, 1, 1>
  }> : (tensor<8x5x6xf32>, tensor<8x5x3xi32>) -> tensor<8x5xf32>
  return %0 : tensor<8x5xf32>
}

// -----

// A cache written in each step of a loop, which carries the iota; indices are clamped together.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @cache
// CHECK-NOT: stablehlo.all_
// CHECK: "stablehlo.scatter"(%{{.+}}) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [1], input_batching_dims = [0], scatter_indices_batching_dims = [0], scatter_dims_to_operand_dims = [1], index_vector_dim = 1>
// CHECK: (tensor<2x5x6xf32>, tensor<2x1xi32>, tensor<2x6xf32>) -> tensor<2x5x6xf32>
// CHECK-NOT: stablehlo.all_
func.func @cache(
    %c: tensor<8x5x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}, {}]>},
    %p: tensor<8x1xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %n: tensor<8x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> (tensor<8x5x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}, {}]>}) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %low = stablehlo.constant dense<0> : tensor<8x2xi32>
  %last = stablehlo.constant dense<[7, 4]> : tensor<2xi32>
  %rows = stablehlo.iota dim = 0 : tensor<8x1xi32>
  %0:3 = stablehlo.while(%k = %zero, %r = %rows, %a = %c) : tensor<i32>, tensor<8x1xi32>, tensor<8x5x6xf32>
  cond {
    %1 = stablehlo.compare LT, %k, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %1 : tensor<i1>
  } do {
    %1 = stablehlo.broadcast_in_dim %k, dims = [] : (tensor<i32>) -> tensor<8x1xi32>
    %2 = stablehlo.add %p, %1 : tensor<8x1xi32>
    %3 = stablehlo.concatenate %r, %2, dim = 1 : (tensor<8x1xi32>, tensor<8x1xi32>) -> tensor<8x2xi32>
    %high = stablehlo.broadcast_in_dim %last, dims = [1] : (tensor<2xi32>) -> tensor<8x2xi32>
    %4 = stablehlo.clamp %low, %3, %high : tensor<8x2xi32>
    %5 = "stablehlo.scatter"(%a, %4, %n) <{
      scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0, 1], scatter_dims_to_operand_dims = [0, 1], index_vector_dim = 1>
    }> ({
    ^bb0(%x: tensor<f32>, %y: tensor<f32>):
      stablehlo.return %y : tensor<f32>
    }) : (tensor<8x5x6xf32>, tensor<8x2xi32>, tensor<8x6xf32>) -> tensor<8x5x6xf32>
    %6 = stablehlo.add %k, %one : tensor<i32>
    stablehlo.return %6, %r, %5 : tensor<i32>, tensor<8x1xi32>, tensor<8x5x6xf32>
  }
  return %0#2 : tensor<8x5x6xf32>
}

// -----

// The next row, of which the last is clamped, and an iota shorter than the dimension: as they were.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @other_rows
// CHECK: start_index_map = [0, 1]
// CHECK: start_index_map = [0, 1]
func.func @other_rows(
    %c: tensor<8x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, %i: tensor<8x1xi32>, %j: tensor<4x1xi32>
) -> (tensor<8xf32>, tensor<4xf32>) {
  %one = stablehlo.constant dense<1> : tensor<8x1xi32>
  %rows = stablehlo.iota dim = 0 : tensor<8x1xi32>
  %next = stablehlo.add %rows, %one : tensor<8x1xi32>
  %index = stablehlo.concatenate %next, %i, dim = 1 : (tensor<8x1xi32>, tensor<8x1xi32>) -> tensor<8x2xi32>
  %0 = "stablehlo.gather"(%c, %index) <{
    dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0, 1], start_index_map = [0, 1], index_vector_dim = 1>, slice_sizes = array<i64: 1, 1>
  }> : (tensor<8x6xf32>, tensor<8x2xi32>) -> tensor<8xf32>
  %some = stablehlo.iota dim = 0 : tensor<4x1xi32>
  %index_2 = stablehlo.concatenate %some, %j, dim = 1 : (tensor<4x1xi32>, tensor<4x1xi32>) -> tensor<4x2xi32>
  %1 = "stablehlo.gather"(%c, %index_2) <{
    dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0, 1], start_index_map = [0, 1], index_vector_dim = 1>, slice_sizes = array<i64: 1, 1>
  }> : (tensor<8x6xf32>, tensor<4x2xi32>) -> tensor<4xf32>
  return %0, %1 : tensor<8xf32>, tensor<4xf32>
}

// -----

// Every row in its place: no component of the index is left, and a zero takes its place.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @all_rows
// CHECK: sdy.manual_computation
// CHECK-SAME: manual_axes={"x"} (%[[C:.+]]: tensor<2x6xf32>) {
// CHECK: %[[ZERO:.+]] = stablehlo.constant dense<0> : tensor<2x1xi32>
// CHECK-NEXT: "stablehlo.gather"(%[[C]], %[[ZERO]])
// CHECK-SAME: dimension_numbers = #stablehlo.gather<offset_dims = [1], operand_batching_dims = [0], start_indices_batching_dims = [0], start_index_map = [1], index_vector_dim = 1>
// CHECK-NEXT: sdy.return
func.func @all_rows(
    %c: tensor<8x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> (tensor<8x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  %rows = stablehlo.iota dim = 0 : tensor<8x1xi32>
  %0 = "stablehlo.gather"(%c, %rows) <{
    dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
    slice_sizes = array<i64: 1, 6>
  }> : (tensor<8x6xf32>, tensor<8x1xi32>) -> tensor<8x6xf32>
  return %0 : tensor<8x6xf32>
}
