// RUN: stablehlo-tools opt %s -p partition --split-input-file --verify-diagnostics | filecheck %s --enable-var-scope

// A constant of one number is made in the local shape.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @splat
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xf32>) {
// CHECK-NEXT: %[[CONSTANT:.+]] = stablehlo.constant dense<2.000000e+00> : tensor<2x4xf32>
// CHECK-NEXT: %[[MULTIPLY:.+]] = stablehlo.multiply %[[X]], %[[CONSTANT]] : tensor<2x4xf32>
// CHECK-NEXT: sdy.return %[[MULTIPLY]] : tensor<2x4xf32>
func.func @splat(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> tensor<8x4xf32> {
  %c = stablehlo.constant dense<2.0> : tensor<8x4xf32>
  %0 = stablehlo.multiply %x, %c : tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}

// -----

// Of a table every device takes its own part, from the start that it looks up.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @table
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2xi32>) {
// CHECK-NEXT: %[[DEVICE:.+]] = stablehlo.partition_id : tensor<ui32>
// CHECK-NEXT: %[[TABLE:.+]] = stablehlo.constant dense<[0, 0, 2, 2, 4, 4, 6, 6]> : tensor<8xi32>
// CHECK-NEXT: %[[ROW:.+]] = stablehlo.dynamic_slice %[[TABLE]], %[[DEVICE]], sizes = [1]
// CHECK-NEXT: %[[START:.+]] = stablehlo.reshape %[[ROW]]
// CHECK-NEXT: %[[TABLE_2:.+]] = stablehlo.constant dense<[9, 8, 7, 6, 5, 4, 3, 2]> : tensor<8xi32>
// CHECK-NEXT: %[[ROW_2:.+]] = stablehlo.dynamic_slice %[[TABLE_2]], %[[START]], sizes = [2]
// CHECK-NEXT: %[[ADD:.+]] = stablehlo.add %[[X]], %[[ROW_2]] : tensor<2xi32>
// CHECK-NEXT: sdy.return %[[ADD]] : tensor<2xi32>
func.func @table(
    %x: tensor<8xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}
) -> tensor<8xi32> {
  %c = stablehlo.constant dense<[9, 8, 7, 6, 5, 4, 3, 2]> : tensor<8xi32>
  %0 = stablehlo.add %x, %c : tensor<8xi32>
  return %0 : tensor<8xi32>
}

// -----

// An iota counts on from where the part starts, in its own element type.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @iota
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<4x4xf32>) {
// CHECK-NEXT: %[[DEVICE:.+]] = stablehlo.partition_id : tensor<ui32>
// CHECK-NEXT: %[[TABLE:.+]] = stablehlo.constant dense<[0, 4, 0, 4, 0, 4, 0, 4]> : tensor<8xi32>
// CHECK-NEXT: %[[ROW:.+]] = stablehlo.dynamic_slice %[[TABLE]], %[[DEVICE]], sizes = [1]
// CHECK-NEXT: %[[START:.+]] = stablehlo.reshape %[[ROW]]
// CHECK-NEXT: %[[IOTA:.+]] = stablehlo.iota dim = 0 : tensor<4x4xf32>
// CHECK-NEXT: %[[CONVERT:.+]] = stablehlo.convert %[[START]]
// CHECK-SAME: -> tensor<f32>
// CHECK-NEXT: %[[SPREAD:.+]] = stablehlo.broadcast_in_dim %[[CONVERT]], dims = []
// CHECK-SAME: -> tensor<4x4xf32>
// CHECK-NEXT: %[[ADD:.+]] = stablehlo.add %[[SPREAD]], %[[IOTA]] : tensor<4x4xf32>
// CHECK-NEXT: %[[ADD_2:.+]] = stablehlo.add %[[X]], %[[ADD]] : tensor<4x4xf32>
// CHECK-NEXT: sdy.return %[[ADD_2]] : tensor<4x4xf32>
func.func @iota(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}
) -> tensor<8x4xf32> {
  %i = stablehlo.iota dim = 0 : tensor<8x4xf32>
  %0 = stablehlo.add %x, %i : tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}

// -----

// Along another dimension than the divided one it counts as before.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @iota_of_a_whole_dimension
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xi32>) {
// CHECK-NEXT: %[[IOTA:.+]] = stablehlo.iota dim = 1 : tensor<2x4xi32>
// CHECK-NEXT: %[[ADD:.+]] = stablehlo.add %[[X]], %[[IOTA]] : tensor<2x4xi32>
// CHECK-NEXT: sdy.return %[[ADD]] : tensor<2x4xi32>
func.func @iota_of_a_whole_dimension(
    %x: tensor<8x4xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> tensor<8x4xi32> {
  %i = stablehlo.iota dim = 1 : tensor<8x4xi32>
  %0 = stablehlo.add %x, %i : tensor<8x4xi32>
  return %0 : tensor<8x4xi32>
}

// -----

// A slice of another dimension is taken of each part: the limit of the divided one is the part's.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @slice_of_a_whole_dimension
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xf32>) {
// CHECK-NEXT: %[[SLICE:.+]] = stablehlo.slice %[[X]] [0:2, 1:3]
// CHECK-SAME: -> tensor<2x2xf32>
// CHECK-NEXT: sdy.return %[[SLICE]] : tensor<2x2xf32>
func.func @slice_of_a_whole_dimension(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> tensor<8x2xf32> {
  %0 = stablehlo.slice %x [0:8, 1:3] : (tensor<8x4xf32>) -> tensor<8x2xf32>
  return %0 : tensor<8x2xf32>
}

// -----

// A slice along the divided dimension moves elements between devices: another one is divided.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @slice_of_the_divided_dimension
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xf32>) {
// CHECK-NEXT: %[[EXCHANGE:.+]] = "stablehlo.all_to_all"(%[[X]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: concat_dimension = 0 : i64, replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: split_count = 4 : i64, split_dimension = 1 : i64
// CHECK-SAME: -> tensor<8x1xf32>
// CHECK-NEXT: %[[SLICE:.+]] = stablehlo.slice %[[EXCHANGE]] [1:5, 0:1]
// CHECK-SAME: -> tensor<4x1xf32>
// CHECK-NEXT: %[[EXCHANGE_2:.+]] = "stablehlo.all_to_all"(%[[SLICE]])
// CHECK-SAME: channel_handle<handle = 2, type = 1>
// CHECK-SAME: concat_dimension = 1 : i64, replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: split_count = 4 : i64, split_dimension = 0 : i64
// CHECK-SAME: -> tensor<1x4xf32>
// CHECK-NEXT: sdy.return %[[EXCHANGE_2]] : tensor<1x4xf32>
func.func @slice_of_the_divided_dimension(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> (tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  // expected-warning@+1 {{stablehlo.slice cannot run on parts of dimension 0, divided over {"x"}: another dimension is divided instead}}
  %0 = stablehlo.slice %x [1:5, 0:4] : (tensor<8x4xf32>) -> tensor<4x4xf32>
  return %0 : tensor<4x4xf32>
}

// -----

// Its starts may be data: they hold for the whole dimensions alone.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @dynamic_slice
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xf32>, %[[I:.+]]: tensor<i32>) {
// CHECK-NEXT: %[[PART:.+]] = stablehlo.dynamic_slice %[[X]], %[[I]], %[[I]], sizes = [2, 2]
// CHECK-SAME: -> tensor<2x2xf32>
// CHECK-NEXT: sdy.return %[[PART]] : tensor<2x2xf32>
func.func @dynamic_slice(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, %i: tensor<i32>
) -> tensor<8x2xf32> {
  %0 = stablehlo.dynamic_slice %x, %i, %i, sizes = [8, 2] : (tensor<8x4xf32>, tensor<i32>, tensor<i32>) -> tensor<8x2xf32>
  return %0 : tensor<8x2xf32>
}

// -----

// Padding of the divided dimension.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @pad
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<3x4xf32>, %[[V:.+]]: tensor<f32>) {
// CHECK-NEXT: %[[EXCHANGE:.+]] = "stablehlo.all_to_all"(%[[X]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: concat_dimension = 0 : i64, replica_groups = dense<{{\[\[}}0, 1], [2, 3], [4, 5], [6, 7]]>
// CHECK-SAME: split_count = 2 : i64, split_dimension = 1 : i64
// CHECK-SAME: -> tensor<6x2xf32>
// CHECK-NEXT: %[[PAD:.+]] = stablehlo.pad %[[EXCHANGE]], %[[V]], low = [1, 0], high = [1, 0], interior = [0, 0]
// CHECK-SAME: -> tensor<8x2xf32>
// CHECK-NEXT: %[[EXCHANGE_2:.+]] = "stablehlo.all_to_all"(%[[PAD]])
// CHECK-SAME: channel_handle<handle = 2, type = 1>
// CHECK-SAME: concat_dimension = 1 : i64, replica_groups = dense<{{\[\[}}0, 1], [2, 3], [4, 5], [6, 7]]>
// CHECK-SAME: split_count = 2 : i64, split_dimension = 0 : i64
// CHECK-SAME: -> tensor<4x4xf32>
// CHECK-NEXT: sdy.return %[[EXCHANGE_2]] : tensor<4x4xf32>
func.func @pad(
    %x: tensor<6x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}, %v: tensor<f32>
) -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}) {
  // expected-warning@+1 {{stablehlo.pad cannot run on parts of dimension 0, divided over {"y"}: another dimension is divided instead}}
  %0 = stablehlo.pad %x, %v, low = [1, 0], high = [1, 0], interior = [0, 0] : (tensor<6x4xf32>, tensor<f32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}

// -----

// A pad that adds as much as it takes away keeps the size, but moves every element.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @shift_by_pad
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xf32>, %[[V:.+]]: tensor<f32>) {
// CHECK-NEXT: %[[EXCHANGE:.+]] = "stablehlo.all_to_all"(%[[X]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: concat_dimension = 0 : i64, replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: split_count = 4 : i64, split_dimension = 1 : i64
// CHECK-SAME: -> tensor<8x1xf32>
// CHECK-NEXT: %[[PAD:.+]] = stablehlo.pad %[[EXCHANGE]], %[[V]], low = [1, 0], high = [-1, 0], interior = [0, 0]
// CHECK-SAME: -> tensor<8x1xf32>
// CHECK-NEXT: %[[EXCHANGE_2:.+]] = "stablehlo.all_to_all"(%[[PAD]])
// CHECK-SAME: channel_handle<handle = 2, type = 1>
// CHECK-SAME: concat_dimension = 1 : i64, replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: split_count = 4 : i64, split_dimension = 0 : i64
// CHECK-SAME: -> tensor<2x4xf32>
// CHECK-NEXT: sdy.return %[[EXCHANGE_2]] : tensor<2x4xf32>
func.func @shift_by_pad(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, %v: tensor<f32>
) -> tensor<8x4xf32> {
  // expected-warning@+1 {{stablehlo.pad cannot run on parts of dimension 0, divided over {"x"}: another dimension is divided instead}}
  %0 = stablehlo.pad %x, %v, low = [1, 0], high = [-1, 0], interior = [0, 0] : (tensor<8x4xf32>, tensor<f32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}

// -----

// Unequal parts set one behind the other along the divided dimension would be interleaved: it is
// whole, and the other divided.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @concatenate
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xf32>, %[[Y:.+]]: tensor<1x4xf32>) {
// CHECK-NEXT: %[[EXCHANGE:.+]] = "stablehlo.all_to_all"(%[[X]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: concat_dimension = 0 : i64, replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: split_count = 4 : i64, split_dimension = 1 : i64
// CHECK-SAME: -> tensor<8x1xf32>
// CHECK-NEXT: %[[EXCHANGE_2:.+]] = "stablehlo.all_to_all"(%[[Y]])
// CHECK-SAME: channel_handle<handle = 2, type = 1>
// CHECK-SAME: concat_dimension = 0 : i64, replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: split_count = 4 : i64, split_dimension = 1 : i64
// CHECK-SAME: -> tensor<4x1xf32>
// CHECK-NEXT: %[[JOIN:.+]] = stablehlo.concatenate %[[EXCHANGE]], %[[EXCHANGE_2]], dim = 0
// CHECK-SAME: -> tensor<12x1xf32>
// CHECK-NEXT: %[[EXCHANGE_3:.+]] = "stablehlo.all_to_all"(%[[JOIN]])
// CHECK-SAME: channel_handle<handle = 3, type = 1>
// CHECK-SAME: concat_dimension = 1 : i64, replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: split_count = 4 : i64, split_dimension = 0 : i64
// CHECK-SAME: -> tensor<3x4xf32>
// CHECK-NEXT: sdy.return %[[EXCHANGE_3]] : tensor<3x4xf32>
func.func @concatenate(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %y: tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> tensor<12x4xf32> {
  %0 = stablehlo.concatenate %x, %y, dim = 0 : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<12x4xf32>
  return %0 : tensor<12x4xf32>
}

// -----

// The same without another dimension to divide.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @concatenate_vectors
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2xf32>, %[[S:.+]]: tensor<1xf32>) {
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[X]])
// CHECK-SAME: all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: -> tensor<8xf32>
// CHECK-NEXT: %[[JOIN:.+]] = stablehlo.concatenate %[[GATHER]], %[[S]], dim = 0
// CHECK-SAME: -> tensor<9xf32>
// CHECK-NEXT: sdy.return %[[JOIN]] : tensor<9xf32>
func.func @concatenate_vectors(
    %x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}, %s: tensor<1xf32>
) -> tensor<9xf32> {
  %0 = stablehlo.concatenate %x, %s, dim = 0 : (tensor<8xf32>, tensor<1xf32>) -> tensor<9xf32>
  return %0 : tensor<9xf32>
}

// -----

// Backwards.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @reverse
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xf32>) {
// CHECK-NEXT: %[[EXCHANGE:.+]] = "stablehlo.all_to_all"(%[[X]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: concat_dimension = 0 : i64, replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: split_count = 4 : i64, split_dimension = 1 : i64
// CHECK-SAME: -> tensor<8x1xf32>
// CHECK-NEXT: %[[REVERSE:.+]] = stablehlo.reverse %[[EXCHANGE]], dims = [0] : tensor<8x1xf32>
// CHECK-NEXT: %[[EXCHANGE_2:.+]] = "stablehlo.all_to_all"(%[[REVERSE]])
// CHECK-SAME: channel_handle<handle = 2, type = 1>
// CHECK-SAME: concat_dimension = 1 : i64, replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: split_count = 4 : i64, split_dimension = 0 : i64
// CHECK-SAME: -> tensor<2x4xf32>
// CHECK-NEXT: sdy.return %[[EXCHANGE_2]] : tensor<2x4xf32>
func.func @reverse(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> tensor<8x4xf32> {
  // expected-warning@+1 {{stablehlo.reverse cannot run on parts of dimension 0, divided over {"x"}: another dimension is divided instead}}
  %0 = stablehlo.reverse %x, dims = [0] : tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}
