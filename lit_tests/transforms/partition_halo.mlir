// RUN: stablehlo-tools opt %s -p partition --split-input-file --verify-diagnostics | filecheck %s --enable-var-scope

// Round by three rows, as jnp.roll writes it: what is joined is taken from where it was, in one permute.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @roll
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x"} (%[[X:.+]]: tensor<8x8xf32>) {
// CHECK-NEXT: %[[FIRST:.+]] = stablehlo.slice %[[X]] [0:3, 0:8]
// CHECK-NEXT: %[[NEXT:.+]] = "stablehlo.collective_permute"(%[[FIRST]])
// CHECK-SAME: source_target_pairs = dense<{{\[\[}}1, 0], [2, 1], [3, 2], [0, 3]]>
// CHECK-NEXT: %[[OWN:.+]] = stablehlo.slice %[[X]] [3:8, 0:8]
// CHECK-NEXT: %[[ROLLED:.+]] = stablehlo.concatenate %[[OWN]], %[[NEXT]], dim = 0
// CHECK-NEXT: sdy.return %[[ROLLED]] : tensor<8x8xf32>
func.func @roll(%x: tensor<32x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> tensor<32x8xf32> {
  %0 = stablehlo.slice %x [3:32, 0:8] : (tensor<32x8xf32>) -> tensor<29x8xf32>
  %1 = stablehlo.slice %x [0:3, 0:8] : (tensor<32x8xf32>) -> tensor<3x8xf32>
  %2 = stablehlo.concatenate %0, %1, dim = 0 : (tensor<29x8xf32>, tensor<3x8xf32>) -> tensor<32x8xf32>
  return %2 : tensor<32x8xf32>
}

// -----

// A difference stays divided: 31 rows in parts of 8, of which the last is of 7.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @difference
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x"} (%[[X:.+]]: tensor<8xf32>) {
// CHECK: %[[FIRST:.+]] = stablehlo.slice %[[X]] [0:1]
// CHECK-NEXT: %[[NEXT:.+]] = "stablehlo.collective_permute"(%[[FIRST]])
// CHECK-SAME: source_target_pairs = dense<{{\[\[}}1, 0], [2, 1], [3, 2]]>
// CHECK: %[[SHIFTED:.+]] = stablehlo.concatenate %{{.+}}, %[[NEXT]], dim = 0
// CHECK: %[[DIFFERENCE:.+]] = stablehlo.subtract %[[SHIFTED]], %{{.+}} : tensor<8xf32>
func.func @difference(%x: tensor<32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<f32> {
  %0 = stablehlo.slice %x [1:32] : (tensor<32xf32>) -> tensor<31xf32>
  %1 = stablehlo.slice %x [0:31] : (tensor<32xf32>) -> tensor<31xf32>
  %2 = stablehlo.subtract %0, %1 : tensor<31xf32>
  %3 = stablehlo.constant dense<0.0> : tensor<f32>
  %4 = stablehlo.reduce(%2 init: %3) applies stablehlo.add across dimensions = [0] : (tensor<31xf32>, tensor<f32>) -> tensor<f32>
  return %4 : tensor<f32>
}

// -----

// A sum of them: places beyond the end count as the initial value.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @uneven_sum
// CHECK: %[[TABLE:.+]] = stablehlo.constant dense<[8, 8, 8, 7]> : tensor<4xi32>
// CHECK: %[[PLACE:.+]] = stablehlo.iota dim = 0 : tensor<8xi32>
// CHECK: %[[INSIDE:.+]] = stablehlo.compare LT, %[[PLACE]]
// CHECK: %[[MASK:.+]] = stablehlo.broadcast_in_dim %[[INSIDE]], dims = [0]
// CHECK-NEXT: %[[DEFINED:.+]] = stablehlo.select %[[MASK]], %{{.+}}, %{{.+}} : tensor<8xi1>, tensor<8xf32>
// CHECK-NEXT: %[[PART:.+]] = stablehlo.reduce(%[[DEFINED]] init:
// CHECK: "stablehlo.all_reduce"(%[[PART]])
func.func @uneven_sum(%x: tensor<32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<f32> {
  %0 = stablehlo.slice %x [0:31] : (tensor<32xf32>) -> tensor<31xf32>
  %1 = stablehlo.constant dense<0.0> : tensor<f32>
  %2 = stablehlo.reduce(%0 init: %1) applies stablehlo.add across dimensions = [0] : (tensor<31xf32>, tensor<f32>) -> tensor<f32>
  return %2 : tensor<f32>
}

// -----

// A convolution: a row of each neighbour, and at the ends zeros, which is what a device gets to which
// nobody sends.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @convolution
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x"} (%[[X:.+]]: tensor<1x4x8x2xf32>, %[[W:.+]]: tensor<3x3x2x2xf32>) {
// CHECK: %[[NEXT:.+]] = "stablehlo.collective_permute"(%{{.+}}) {{.+}}dense<{{\[\[}}1, 0], [2, 1], [3, 2]]>
// CHECK-SAME: -> tensor<1x1x8x2xf32>
// CHECK: %[[BEFORE:.+]] = "stablehlo.collective_permute"(%{{.+}}) {{.+}}dense<{{\[\[}}0, 1], [1, 2], [2, 3]]>
// CHECK-SAME: -> tensor<1x1x8x2xf32>
// CHECK-NEXT: %[[NEAR:.+]] = stablehlo.concatenate %[[BEFORE]], %[[X]], %[[NEXT]], dim = 1
// CHECK-NEXT: stablehlo.convolution(%[[NEAR]], %[[W]])
// CHECK-SAME: pad = {{\[\[}}0, 0], [1, 1]]
// CHECK-SAME: -> tensor<1x4x8x2xf32>
func.func @convolution(%x: tensor<1x16x8x2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}, {}, {}]>}, %w: tensor<3x3x2x2xf32>) -> tensor<1x16x8x2xf32> {
  %0 = stablehlo.convolution(%x, %w) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : (tensor<1x16x8x2xf32>, tensor<3x3x2x2xf32>) -> tensor<1x16x8x2xf32>
  return %0 : tensor<1x16x8x2xf32>
}

// -----

// The gradient of its kernel: a window that is as long as the image. Each device sums over its rows of
// the result's gradient, and what they look at.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @kernel_gradient
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x"} (%[[X:.+]]: tensor<4x2x1xf32>, %[[G:.+]]: tensor<4x2x1xf32>) {
// CHECK: %[[NEAR:.+]] = stablehlo.concatenate %{{.+}}, %[[X]], %{{.+}}, dim = 0
// CHECK-NEXT: %[[PART:.+]] = stablehlo.convolution(%[[NEAR]], %[[G]])
// CHECK-SAME: pad = {{\[\[}}0, 0]]
// CHECK-SAME: (tensor<6x2x1xf32>, tensor<4x2x1xf32>) -> tensor<3x2x2xf32>
// CHECK-NEXT: "stablehlo.all_reduce"(%[[PART]])
func.func @kernel_gradient(
    %x: tensor<16x2x1xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}, {}]>},
    %g: tensor<16x2x1xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}, {}]>}
) -> tensor<3x2x2xf32> {
  %0 = stablehlo.convolution(%x, %g) dim_numbers = [0, b, f]x[0, o, i]->[0, b, f], window = {pad = [[1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : (tensor<16x2x1xf32>, tensor<16x2x1xf32>) -> tensor<3x2x2xf32>
  return %0 : tensor<3x2x2xf32>
}

// -----

// Windows that overlap, and reach beyond the end: the last device puts the initial value there.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @windows
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x"} (%[[X:.+]]: tensor<4xf32>, %[[Z:.+]]: tensor<f32>) {
// CHECK: %[[NEXT:.+]] = "stablehlo.collective_permute"(%{{.+}})
// CHECK: %[[START:.+]] = stablehlo.broadcast_in_dim %[[Z]], dims = []
// CHECK-NEXT: %[[BEHIND:.+]] = stablehlo.select %{{.+}}, %[[START]], %[[NEXT]]
// CHECK-NEXT: %[[NEAR:.+]] = stablehlo.concatenate %[[X]], %[[BEHIND]], dim = 0
// CHECK-NEXT: "stablehlo.reduce_window"(%[[NEAR]], %[[Z]])
// CHECK-SAME: padding = dense<0>
// CHECK: -> tensor<2xf32>
func.func @windows(%x: tensor<16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}, %z: tensor<f32>) -> tensor<8xf32> {
  %0 = "stablehlo.reduce_window"(%x, %z) <{window_dimensions = array<i64: 3>, window_strides = array<i64: 2>, padding = dense<[[0, 1]]> : tensor<1x2xi64>}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %1 = stablehlo.maximum %a, %b : tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }) : (tensor<16xf32>, tensor<f32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}

// -----

// What lies between the ends is overwritten, as x.at[1:-1].set writes it.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @between_the_ends
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x"} (%[[X:.+]]: tensor<4xf32>, %[[U:.+]]: tensor<14xf32>) {
// CHECK-NOT: scatter
// CHECK: "stablehlo.collective_permute"(%{{.+}}) {{.+}}dense<{{\[\[}}0, 1], [1, 2], [2, 3]]>
// CHECK-SAME: (tensor<1xf32>) -> tensor<1xf32>
// CHECK-NOT: scatter
// CHECK: stablehlo.select %{{.+}}, %{{.+}}, %[[X]] : tensor<4xi1>, tensor<4xf32>
func.func @between_the_ends(%x: tensor<16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}, %u: tensor<14xf32>) -> tensor<16xf32> {
  %v = stablehlo.negate %u : tensor<14xf32>
  %c = stablehlo.constant dense<1> : tensor<i32>
  %i = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<i32>) -> tensor<1xi32>
  %0 = "stablehlo.scatter"(%x, %i, %v) <{indices_are_sorted = true, scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [0], scatter_dims_to_operand_dims = [0]>, unique_indices = true}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    stablehlo.return %b : tensor<f32>
  }) : (tensor<16xf32>, tensor<1xi32>, tensor<14xf32>) -> tensor<16xf32>
  return %0 : tensor<16xf32>
}

// -----

// A prefix sum looks at all that comes before: its rows are whole, as they were.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @prefix_sum
// CHECK: %[[WHOLE:.+]] = "stablehlo.all_gather"
// CHECK-NEXT: "stablehlo.reduce_window"(%[[WHOLE]]
// CHECK-SAME: padding = dense<{{\[\[}}15, 0]]>
func.func @prefix_sum(%x: tensor<16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<16xf32> {
  %z = stablehlo.constant dense<0.0> : tensor<f32>
  // expected-warning@+1 {{stablehlo.reduce_window cannot run on parts of dimension 0, divided over {"x"}: it is gathered}}
  %0 = "stablehlo.reduce_window"(%x, %z) <{window_dimensions = array<i64: 16>, padding = dense<[[15, 0]]> : tensor<1x2xi64>}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %1 = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }) : (tensor<16xf32>, tensor<f32>) -> tensor<16xf32>
  return %0 : tensor<16xf32>
}

// -----

// Where nobody divides what moves, it moves as it did.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @unchanged
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x"} (%[[X:.+]]: tensor<4x8xf32>) {
// CHECK-NEXT: %[[SHIFT:.+]] = stablehlo.slice %[[X]] [0:4, 1:8] : (tensor<4x8xf32>) -> tensor<4x7xf32>
// CHECK-NEXT: %[[TURN:.+]] = stablehlo.reverse %[[SHIFT]], dims = [1] : tensor<4x7xf32>
// CHECK-NEXT: sdy.return %[[TURN]] : tensor<4x7xf32>
func.func @unchanged(%x: tensor<16x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> tensor<16x7xf32> {
  %0 = stablehlo.slice %x [0:16, 1:8] : (tensor<16x8xf32>) -> tensor<16x7xf32>
  %1 = stablehlo.reverse %0, dims = [1] : tensor<16x7xf32>
  return %1 : tensor<16x7xf32>
}
