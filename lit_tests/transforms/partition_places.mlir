// RUN: stablehlo-tools opt %s -p 'partition{choices=shardy}' --split-input-file --verify-diagnostics | filecheck %s --enable-var-scope

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

// A slice along the divided dimension: each device gets the row that it lacks from the one before,
// except for the first two, which have theirs.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @slice_of_the_divided_dimension
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xf32>) {
// CHECK: %[[SENT:.+]] = stablehlo.dynamic_slice %[[X]], %{{.+}}, %{{.+}}, sizes = [1, 4]
// CHECK-NEXT: %[[BEFORE:.+]] = "stablehlo.collective_permute"(%[[SENT]])
// CHECK-SAME: source_target_pairs = dense<{{\[\[}}2, 4], [4, 6], [3, 5], [5, 7]]>
// CHECK: %[[FIRST:.+]] = stablehlo.slice %[[X]] [0:1, 0:4]
// CHECK-NEXT: %[[TAKEN:.+]] = stablehlo.select %{{.+}}, %[[FIRST]], %[[BEFORE]] : tensor<i1>, tensor<1x4xf32>
// CHECK: %[[LAST:.+]] = stablehlo.slice %[[X]] [1:2, 0:4]
// CHECK-NEXT: %[[TAKEN_2:.+]] = stablehlo.select %{{.+}}, %[[LAST]], %[[TAKEN]] : tensor<i1>, tensor<1x4xf32>
// CHECK-NEXT: sdy.return %[[TAKEN_2]] : tensor<1x4xf32>
func.func @slice_of_the_divided_dimension(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> (tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
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

// A border on both sides, of which each device has its part without a neighbour's elements.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @pad
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<3x4xf32>, %[[V:.+]]: tensor<f32>) {
// CHECK-NOT: collective_permute
// CHECK: %[[BORDER:.+]] = stablehlo.broadcast_in_dim %[[V]], dims = []
// CHECK: %[[TOP:.+]] = stablehlo.select %{{.+}}, %{{.+}}, %[[BORDER]] : tensor<i1>, tensor<1x4xf32>
// CHECK: %[[LOW:.+]] = stablehlo.slice %[[X]] [0:2, 0:4]
// CHECK: %[[HIGH:.+]] = stablehlo.slice %[[X]] [1:3, 0:4]
// CHECK-NEXT: %[[MIDDLE:.+]] = stablehlo.select %{{.+}}, %[[HIGH]], %[[LOW]]
// CHECK: %[[BOTTOM:.+]] = stablehlo.select
// CHECK-NEXT: %[[PAD:.+]] = stablehlo.concatenate %[[TOP]], %[[MIDDLE]], %[[BOTTOM]], dim = 0
// CHECK-NEXT: sdy.return %[[PAD]] : tensor<4x4xf32>
func.func @pad(
    %x: tensor<6x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}, %v: tensor<f32>
) -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}) {
  %0 = stablehlo.pad %x, %v, low = [1, 0], high = [1, 0], interior = [0, 0] : (tensor<6x4xf32>, tensor<f32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}

// -----

// A pad that adds as much as it takes away is a shift: one row goes to the next device, and the first
// one puts the border there.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @shift_by_pad
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xf32>, %[[V:.+]]: tensor<f32>) {
// CHECK: %[[LAST:.+]] = stablehlo.slice %[[X]] [1:2, 0:4]
// CHECK-NEXT: %[[BEFORE:.+]] = "stablehlo.collective_permute"(%[[LAST]])
// CHECK-SAME: source_target_pairs = dense<{{\[\[}}0, 2], [2, 4], [4, 6], [1, 3], [3, 5], [5, 7]]>
// CHECK: %[[BORDER:.+]] = stablehlo.broadcast_in_dim %[[V]], dims = []
// CHECK-NEXT: %[[TOP:.+]] = stablehlo.select %{{.+}}, %[[BORDER]], %[[BEFORE]] : tensor<i1>, tensor<1x4xf32>
// CHECK-NEXT: %[[FIRST:.+]] = stablehlo.slice %[[X]] [0:1, 0:4]
// CHECK-NEXT: %[[SHIFTED:.+]] = stablehlo.concatenate %[[TOP]], %[[FIRST]], dim = 0
// CHECK-NEXT: sdy.return %[[SHIFTED]] : tensor<2x4xf32>
func.func @shift_by_pad(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, %v: tensor<f32>
) -> tensor<8x4xf32> {
  %0 = stablehlo.pad %x, %v, low = [1, 0], high = [-1, 0], interior = [0, 0] : (tensor<8x4xf32>, tensor<f32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}

// -----

// Unequal parts one behind the other: of 8 and 4 rows each of 4 devices gets its 3.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @concatenate
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xf32>, %[[Y:.+]]: tensor<1x4xf32>) {
// CHECK-NOT: all_
// CHECK: "stablehlo.collective_permute"(%[[X]])
// CHECK-NOT: all_
// CHECK: "stablehlo.collective_permute"(%[[Y]])
// CHECK-SAME: source_target_pairs = dense<{{\[\[}}0, 4], [2, 6], [1, 5], [3, 7]]>
// CHECK-NEXT: "stablehlo.collective_permute"(%[[Y]])
// CHECK-SAME: source_target_pairs = dense<{{\[\[}}4, 6], [5, 7]]>
// CHECK-NOT: all_
// CHECK: %[[JOIN:.+]] = stablehlo.concatenate
// CHECK-NEXT: sdy.return %[[JOIN]] : tensor<3x4xf32>
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

// Backwards: each part goes to the other end.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @reverse
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xf32>) {
// CHECK-NEXT: %[[REVERSE:.+]] = stablehlo.reverse %[[X]], dims = [0] : tensor<2x4xf32>
// CHECK-NEXT: %[[MOVED:.+]] = "stablehlo.collective_permute"(%[[REVERSE]])
// CHECK-SAME: source_target_pairs = dense<{{\[\[}}6, 0], [4, 2], [2, 4], [0, 6], [7, 1], [5, 3], [3, 5], [1, 7]]>
// CHECK-NEXT: sdy.return %[[MOVED]] : tensor<2x4xf32>
func.func @reverse(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> tensor<8x4xf32> {
  %0 = stablehlo.reverse %x, dims = [0] : tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}
