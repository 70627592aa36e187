// RUN: stablehlo-tools opt %s -p 'partition{choices=shardy}' --split-input-file | filecheck %s --enable-var-scope

// A contraction over a divided dimension leaves sums of parts: an all_reduce over that axis alone,
// one group for each place along the other.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @contraction
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[A:.+]]: tensor<4x4xf32>, %[[B:.+]]: tensor<4x4xf32>) {
// CHECK-NEXT: %[[DOT:.+]] = stablehlo.dot_general %[[A]], %[[B]], contracting_dims = [1] x [0]
// CHECK-SAME: -> tensor<4x4xf32>
// CHECK-NEXT: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[DOT]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK: stablehlo.add
// CHECK: }) : (tensor<4x4xf32>) -> tensor<4x4xf32>
// CHECK-NEXT: sdy.return %[[SUM]] : tensor<4x4xf32>
func.func @contraction(
    %a: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {"x"}]>},
    %b: tensor<16x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}) {
  %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<8x16xf32>, tensor<16x4xf32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}

// -----

// Over the faster axis: the groups are neighbours.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @contraction_over_the_faster_axis
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[A:.+]]: tensor<8x8xf32>, %[[B:.+]]: tensor<8x4xf32>) {
// CHECK-NEXT: %[[DOT:.+]] = stablehlo.dot_general %[[A]], %[[B]], contracting_dims = [1] x [0]
// CHECK-SAME: -> tensor<8x4xf32>
// CHECK-NEXT: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[DOT]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 1], [2, 3], [4, 5], [6, 7]]>
// CHECK: stablehlo.add
// CHECK: }) : (tensor<8x4xf32>) -> tensor<8x4xf32>
// CHECK-NEXT: sdy.return %[[SUM]] : tensor<8x4xf32>
func.func @contraction_over_the_faster_axis(
    %a: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"y"}]>},
    %b: tensor<16x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}
) -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
  %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<8x16xf32>, tensor<16x4xf32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}

// -----

// A result wanted whole is gathered, along the dimension that was divided.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @gathered
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<8x4xf32>) {
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[X]])
// CHECK-SAME: all_gather_dim = 1 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: -> tensor<8x16xf32>
// CHECK-NEXT: sdy.return %[[GATHER]] : tensor<8x16xf32>
func.func @gathered(
    %x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}
) -> (tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
  return %x : tensor<8x16xf32>
}

// -----

// Divided over two axes, the first is the slower. Groups list who holds part 0, 1 and so on: 0 to 7
// in order, or the columns of the mesh where the axes are turned round.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @gathered_over_two_axes
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<1x3xf32>, %[[Y:.+]]: tensor<1x3xf32>) {
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[X]])
// CHECK-SAME: all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 1, 2, 3, 4, 5, 6, 7]]>
// CHECK-SAME: -> tensor<8x3xf32>
// CHECK-NEXT: %[[GATHER_2:.+]] = "stablehlo.all_gather"(%[[Y]])
// CHECK-SAME: all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6, 1, 3, 5, 7]]>
// CHECK-SAME: -> tensor<8x3xf32>
// CHECK-NEXT: sdy.return %[[GATHER]], %[[GATHER_2]] : tensor<8x3xf32>, tensor<8x3xf32>
func.func @gathered_over_two_axes(
    %x: tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x", "y"}, {}]>},
    %y: tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y", "x"}, {}]>}
) -> (tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>},
      tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
  return %x, %y : tensor<8x3xf32>, tensor<8x3xf32>
}

// -----

// Gathered along both dimensions: one all_gather for each.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @gathered_along_two_dimensions
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x8xf32>) {
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[X]])
// CHECK-SAME: all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: -> tensor<8x8xf32>
// CHECK-NEXT: %[[GATHER_2:.+]] = "stablehlo.all_gather"(%[[GATHER]])
// CHECK-SAME: all_gather_dim = 1 : i64, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 1], [2, 3], [4, 5], [6, 7]]>
// CHECK-SAME: -> tensor<8x16xf32>
// CHECK-NEXT: sdy.return %[[GATHER_2]] : tensor<8x16xf32>
func.func @gathered_along_two_dimensions(
    %x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}
) -> (tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
  return %x : tensor<8x16xf32>
}

// -----

// A value that is whole is cut by what each device knows: a table of starts, by partition id.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @sliced
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<8x16xf32>) {
// CHECK-NEXT: %[[DEVICE:.+]] = stablehlo.partition_id : tensor<ui32>
// CHECK-NEXT: %[[TABLE:.+]] = stablehlo.constant dense<[0, 4, 0, 4, 0, 4, 0, 4]> : tensor<8xi32>
// CHECK-NEXT: %[[ROW:.+]] = stablehlo.dynamic_slice %[[TABLE]], %[[DEVICE]], sizes = [1]
// CHECK-NEXT: %[[START:.+]] = stablehlo.reshape %[[ROW]]
// CHECK-NEXT: %[[TABLE_2:.+]] = stablehlo.constant dense<[0, 0, 4, 4, 8, 8, 12, 12]> : tensor<8xi32>
// CHECK-NEXT: %[[ROW_2:.+]] = stablehlo.dynamic_slice %[[TABLE_2]], %[[DEVICE]], sizes = [1]
// CHECK-NEXT: %[[START_2:.+]] = stablehlo.reshape %[[ROW_2]]
// CHECK-NEXT: %[[PART:.+]] = stablehlo.dynamic_slice %[[X]], %[[START]], %[[START_2]], sizes = [4, 4]
// CHECK-SAME: -> tensor<4x4xf32>
// CHECK-NEXT: sdy.return %[[PART]] : tensor<4x4xf32>
func.func @sliced(
    %x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}
) -> (tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {"x"}]>}) {
  return %x : tensor<8x16xf32>
}

// -----

// The axis moves from one dimension to the other.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @exchanged
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x16xf32>) {
// CHECK-NEXT: %[[EXCHANGE:.+]] = "stablehlo.all_to_all"(%[[X]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: concat_dimension = 0 : i64, replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: split_count = 4 : i64, split_dimension = 1 : i64
// CHECK-SAME: -> tensor<8x4xf32>
// CHECK-NEXT: sdy.return %[[EXCHANGE]] : tensor<8x4xf32>
func.func @exchanged(
    %x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> (tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}) {
  return %x : tensor<8x16xf32>
}

// -----

// The same parts on other devices: the device at (x, y) is 2x+y; it holds part 2x+y and wants part
// 4y+x, which device 4y+x holds.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @permuted
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<1x3xf32>) {
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[X]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: source_target_pairs = dense<{{\[\[}}0, 0], [4, 1], [1, 2], [5, 3], [2, 4], [6, 5], [3, 6], [7, 7]]>
// CHECK-SAME: -> tensor<1x3xf32>
// CHECK-NEXT: sdy.return %[[PERMUTE]] : tensor<1x3xf32>
func.func @permuted(
    %x: tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x", "y"}, {}]>}
) -> (tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y", "x"}, {}]>}) {
  return %x : tensor<8x3xf32>
}

// -----

// Half of an axis: of the slower half the members are two apart along "x", of the faster one next
// to each other.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @sub_axes
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<4x3xf32>, %[[Y:.+]]: tensor<4x3xf32>) {
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[X]])
// CHECK-SAME: all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 4], [1, 5], [2, 6], [3, 7]]>
// CHECK-SAME: -> tensor<8x3xf32>
// CHECK-NEXT: %[[GATHER_2:.+]] = "stablehlo.all_gather"(%[[Y]])
// CHECK-SAME: all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2], [1, 3], [4, 6], [5, 7]]>
// CHECK-SAME: -> tensor<8x3xf32>
// CHECK-NEXT: sdy.return %[[GATHER]], %[[GATHER_2]] : tensor<8x3xf32>, tensor<8x3xf32>
func.func @sub_axes(
    %x: tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x":(1)2}, {}]>},
    %y: tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x":(2)2}, {}]>}
) -> (tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>},
      tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
  return %x, %y : tensor<8x3xf32>, tensor<8x3xf32>
}

// -----

// Devices in another order: groups list them as the mesh does, and tables are by their numbers.
sdy.mesh @mesh = <["x"=4], device_ids=[3, 1, 0, 2]>
// CHECK-LABEL: func.func @other_device_order
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x"} (%[[X:.+]]: tensor<2x3xf32>, %[[Y:.+]]: tensor<8x3xf32>) {
// CHECK-NEXT: %[[DEVICE:.+]] = stablehlo.partition_id : tensor<ui32>
// CHECK-NEXT: %[[TABLE:.+]] = stablehlo.constant dense<[4, 2, 6, 0]> : tensor<4xi32>
// CHECK-NEXT: %[[ROW:.+]] = stablehlo.dynamic_slice %[[TABLE]], %[[DEVICE]], sizes = [1]
// CHECK-NEXT: %[[START:.+]] = stablehlo.reshape %[[ROW]]
// CHECK-NEXT: %[[ZERO:.+]] = stablehlo.constant dense<0> : tensor<i32>
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[X]])
// CHECK-SAME: all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}3, 1, 0, 2]]>
// CHECK-SAME: -> tensor<8x3xf32>
// CHECK-NEXT: %[[PART:.+]] = stablehlo.dynamic_slice %[[Y]], %[[START]], %[[ZERO]], sizes = [2, 3]
// CHECK-SAME: -> tensor<2x3xf32>
// CHECK-NEXT: sdy.return %[[GATHER]], %[[PART]] : tensor<8x3xf32>, tensor<2x3xf32>
func.func @other_device_order(
    %x: tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %y: tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}
) -> (tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>},
      tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  return %x, %y : tensor<8x3xf32>, tensor<8x3xf32>
}

// -----

// An argument and a result that nothing is said of are divided as it suits the rest; the signature
// still says nothing of them.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @unspecified
// CHECK-SAME: (%{{.+}}: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>},
// CHECK-SAME: %{{.+}}: tensor<8x16xf32>)
// CHECK-SAME: -> tensor<8x16xf32>
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: in_shardings=[<@mesh, [{"x"}, {"y"}]>, <@mesh, [{"x"}, {"y"}]>]
// CHECK-SAME: out_shardings=[<@mesh, [{"x"}, {"y"}]>]
// CHECK-SAME: (%[[X:.+]]: tensor<2x8xf32>, %[[Y:.+]]: tensor<2x8xf32>) {
// CHECK-NEXT: %[[ADD:.+]] = stablehlo.add %[[X]], %[[Y]] : tensor<2x8xf32>
// CHECK-NEXT: sdy.return %[[ADD]] : tensor<2x8xf32>
func.func @unspecified(
    %x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>},
    %y: tensor<8x16xf32>
) -> tensor<8x16xf32> {
  %0 = stablehlo.add %x, %y : tensor<8x16xf32>
  return %0 : tensor<8x16xf32>
}

// -----

// The calling convention stays: donation, names, shardings, visibility.
// CHECK-LABEL: func.func public @main
// CHECK-SAME: (%{{.+}}: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>, tf.aliasing_output = 0 : i32},
// CHECK-SAME: %{{.+}}: tensor<i32> {jax.buffer_donor = true, sdy.sharding = #sdy.sharding<@mesh, []>})
// CHECK-SAME: -> (tensor<8x16xf32> {jax.result_info = "result[0]", sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
// CHECK-SAME: tensor<i32> {jax.result_info = "result[1]"})
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: in_shardings=[<@mesh, [{"x"}, {}]>, <@mesh, []>]
// CHECK-SAME: out_shardings=[<@mesh, [{"x"}, {}]>, <@mesh, []>]
// CHECK-SAME: (%[[X:.+]]: tensor<2x16xf32>, %[[N:.+]]: tensor<i32>) {
// CHECK-NEXT: %[[NEGATE:.+]] = stablehlo.negate %[[X]] : tensor<2x16xf32>
// CHECK-NEXT: sdy.return %[[NEGATE]], %[[N]] : tensor<2x16xf32>, tensor<i32>
module @jit_step attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=4, "y"=2]>
  func.func public @main(
      %x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>, tf.aliasing_output = 0 : i32},
      %n: tensor<i32> {sdy.sharding = #sdy.sharding<@mesh, []>, jax.buffer_donor = true}
  ) -> (tensor<8x16xf32> {jax.result_info = "result[0]", sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
        tensor<i32> {jax.result_info = "result[1]"}) {
    %0 = stablehlo.negate %x : tensor<8x16xf32>
    return %0, %n : tensor<8x16xf32>, tensor<i32>
  }
}
