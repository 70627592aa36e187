// RUN: stablehlo-tools opt %s -p 'partition{choices=shardy}' --split-input-file --verify-diagnostics | filecheck %s --enable-var-scope

// A sort needs its dimension whole; the rows are divided instead.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @sort
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<8x4xi32>) {
// CHECK-NEXT: %[[EXCHANGE:.+]] = "stablehlo.all_to_all"(%[[X]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: concat_dimension = 1 : i64, replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: split_count = 4 : i64, split_dimension = 0 : i64
// CHECK-SAME: -> tensor<2x16xi32>
// CHECK-NEXT: %[[SORT:.+]] = "stablehlo.sort"(%[[EXCHANGE]])
// CHECK-SAME: dimension = 1 : i64, is_stable = true
// CHECK: stablehlo.compare
// CHECK: }) : (tensor<2x16xi32>) -> tensor<2x16xi32>
// CHECK-NEXT: %[[EXCHANGE_2:.+]] = "stablehlo.all_to_all"(%[[SORT]])
// CHECK-SAME: channel_handle<handle = 2, type = 1>
// CHECK-SAME: concat_dimension = 0 : i64, replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: split_count = 4 : i64, split_dimension = 1 : i64
// CHECK-SAME: -> tensor<8x4xi32>
// CHECK-NEXT: sdy.return %[[EXCHANGE_2]] : tensor<8x4xi32>
func.func @sort(
    %x: tensor<8x16xi32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}
) -> tensor<8x16xi32> {
  %0 = "stablehlo.sort"(%x) ({
  ^bb0(%a: tensor<i32>, %b: tensor<i32>):
    %1 = stablehlo.compare LT, %a, %b : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %1 : tensor<i1>
  }) {dimension = 1 : i64, is_stable = true} : (tensor<8x16xi32>) -> tensor<8x16xi32>
  return %0 : tensor<8x16xi32>
}

// -----

// Half of 31 is padded: the first device holds 16 rows, the second 15, and one that nobody asks for.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @uneven_constraint
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<31x4xf32>) {
// CHECK: %[[PAD:.+]] = stablehlo.pad %[[X]], %{{.+}}, low = [0, 0], high = [1, 0], interior = [0, 0]
// CHECK: %[[PART:.+]] = stablehlo.dynamic_slice %[[PAD]], %{{.+}}, %{{.+}}, sizes = [16, 4]
// CHECK-NEXT: %[[NEGATE:.+]] = stablehlo.negate %[[PART]] : tensor<16x4xf32>
// CHECK-NEXT: %[[NEGATE_2:.+]] = stablehlo.negate %[[NEGATE]] : tensor<16x4xf32>
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[NEGATE_2]])
// CHECK-SAME: -> tensor<32x4xf32>
// CHECK-NEXT: %[[WHOLE:.+]] = stablehlo.slice %[[GATHER]] [0:31, 0:4]
// CHECK-NEXT: sdy.return %[[WHOLE]] : tensor<31x4xf32>
func.func @uneven_constraint(%x: tensor<31x4xf32>) -> (tensor<31x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
  %0 = stablehlo.negate %x : tensor<31x4xf32>
  %1 = sdy.sharding_constraint %0 <@mesh, [{"y"}, {}]> : tensor<31x4xf32>
  %2 = stablehlo.negate %1 : tensor<31x4xf32>
  return %2 : tensor<31x4xf32>
}

// -----

// What is divided before a reshape is gathered, where after it an axis would not divide evenly.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @uneven
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<31x4xf32>) {
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[X]])
// CHECK-SAME: all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 1], [2, 3], [4, 5], [6, 7]]>
// CHECK-SAME: -> tensor<62x4xf32>
// CHECK-NEXT: %[[RESHAPE:.+]] = stablehlo.reshape %[[GATHER]]
// CHECK-SAME: -> tensor<31x8xf32>
// CHECK-NEXT: %[[NEGATE:.+]] = stablehlo.negate %[[RESHAPE]] : tensor<31x8xf32>
// CHECK-NEXT: sdy.return %[[NEGATE]] : tensor<31x8xf32>
func.func @uneven(
    %x: tensor<62x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}
) -> (tensor<31x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
  %0 = stablehlo.reshape %x : (tensor<62x4xf32>) -> tensor<31x8xf32>
  %1 = stablehlo.negate %0 : tensor<31x8xf32>
  return %1 : tensor<31x8xf32>
}

// -----

// As many feature groups as the device holds.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @feature_groups
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x8x2xf32>, %[[K:.+]]: tensor<3x1x2xf32>) {
// CHECK-NEXT: %[[CONVOLUTION:.+]] = stablehlo.convolution(%[[X]], %[[K]]) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f], window = {stride = [1]} {batch_group_count = 1 : i64, feature_group_count = 2 : i64}
// CHECK-SAME: -> tensor<2x6x2xf32>
// CHECK-NEXT: sdy.return %[[CONVOLUTION]] : tensor<2x6x2xf32>
func.func @feature_groups(
    %x: tensor<2x8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}, {"x"}]>},
    %k: tensor<3x1x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}, {"x"}]>}
) -> (tensor<2x6x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}, {"x"}]>}) {
  %0 = stablehlo.convolution(%x, %k) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f],
    window = {stride = [1]} {batch_group_count = 1 : i64, feature_group_count = 8 : i64}
    : (tensor<2x8x8xf32>, tensor<3x1x8xf32>) -> tensor<2x6x8xf32>
  return %0 : tensor<2x6x8xf32>
}

// -----

// Batch groups.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @batch_groups
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x8x2xf32>, %[[K:.+]]: tensor<3x2x2xf32>) {
// CHECK-NEXT: %[[CONVOLUTION:.+]] = stablehlo.convolution(%[[X]], %[[K]]) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f], window = {stride = [1]} {batch_group_count = 2 : i64, feature_group_count = 1 : i64}
// CHECK-SAME: -> tensor<1x6x2xf32>
// CHECK-NEXT: sdy.return %[[CONVOLUTION]] : tensor<1x6x2xf32>
func.func @batch_groups(
    %x: tensor<8x8x2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}, {}]>},
    %k: tensor<3x2x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}, {"x"}]>}
) -> (tensor<1x6x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}, {"x"}]>}) {
  %0 = stablehlo.convolution(%x, %k) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f],
    window = {stride = [1]} {batch_group_count = 8 : i64, feature_group_count = 1 : i64}
    : (tensor<8x8x2xf32>, tensor<3x2x8xf32>) -> tensor<1x6x8xf32>
  return %0 : tensor<1x6x8xf32>
}

// -----

// Random bits depend on the whole shape, and a custom call on who knows what: all of each is made.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @rng_bit_generator
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[S:.+]]: tensor<2xui64>, %[[X:.+]]: tensor<2x4xui32>) {
// CHECK-NEXT: %[[DEVICE:.+]] = stablehlo.partition_id : tensor<ui32>
// CHECK-NEXT: %[[TABLE:.+]] = stablehlo.constant dense<[0, 0, 2, 2, 4, 4, 6, 6]> : tensor<8xi32>
// CHECK-NEXT: %[[ROW:.+]] = stablehlo.dynamic_slice %[[TABLE]], %[[DEVICE]], sizes = [1]
// CHECK-NEXT: %[[START:.+]] = stablehlo.reshape %[[ROW]]
// CHECK-NEXT: %[[ZERO:.+]] = stablehlo.constant dense<0> : tensor<i32>
// CHECK-NEXT: %[[RNG_BIT_GENERATOR:.+]], %[[RNG_BIT_GENERATOR_2:.+]] = stablehlo.rng_bit_generator %[[S]], algorithm = THREE_FRY
// CHECK-SAME: -> (tensor<2xui64>, tensor<8x4xui32>)
// CHECK-NEXT: %[[PART:.+]] = stablehlo.dynamic_slice %[[RNG_BIT_GENERATOR_2]], %[[START]], %[[ZERO]], sizes = [2, 4]
// CHECK-SAME: -> tensor<2x4xui32>
// CHECK-NEXT: %[[ADD:.+]] = stablehlo.add %[[X]], %[[PART]] : tensor<2x4xui32>
// CHECK-NEXT: sdy.return %[[RNG_BIT_GENERATOR]], %[[ADD]] : tensor<2xui64>, tensor<2x4xui32>
func.func @rng_bit_generator(
    %s: tensor<2xui64>, %x: tensor<8x4xui32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> (tensor<2xui64>, tensor<8x4xui32>) {
  // expected-warning@+1 {{stablehlo.rng_bit_generator only runs on whole tensors: every device computes all of it}}
  %0, %1 = stablehlo.rng_bit_generator %s, algorithm = THREE_FRY : (tensor<2xui64>) -> (tensor<2xui64>, tensor<8x4xui32>)
  %2 = stablehlo.add %x, %1 : tensor<8x4xui32>
  return %0, %2 : tensor<2xui64>, tensor<8x4xui32>
}

// -----

// A custom call may need any element.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @custom_call
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xf32>) {
// CHECK-NEXT: %[[DEVICE:.+]] = stablehlo.partition_id : tensor<ui32>
// CHECK-NEXT: %[[TABLE:.+]] = stablehlo.constant dense<[0, 0, 2, 2, 4, 4, 6, 6]> : tensor<8xi32>
// CHECK-NEXT: %[[ROW:.+]] = stablehlo.dynamic_slice %[[TABLE]], %[[DEVICE]], sizes = [1]
// CHECK-NEXT: %[[START:.+]] = stablehlo.reshape %[[ROW]]
// CHECK-NEXT: %[[ZERO:.+]] = stablehlo.constant dense<0> : tensor<i32>
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[X]])
// CHECK-SAME: all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: -> tensor<8x4xf32>
// CHECK-NEXT: %[[CUSTOM_CALL:.+]] = stablehlo.custom_call @anything(%[[GATHER]])
// CHECK-SAME: -> tensor<8x4xf32>
// CHECK-NEXT: %[[PART:.+]] = stablehlo.dynamic_slice %[[CUSTOM_CALL]], %[[START]], %[[ZERO]], sizes = [2, 4]
// CHECK-SAME: -> tensor<2x4xf32>
// CHECK-NEXT: %[[ADD:.+]] = stablehlo.add %[[PART]], %[[X]] : tensor<2x4xf32>
// CHECK-NEXT: sdy.return %[[ADD]] : tensor<2x4xf32>
func.func @custom_call(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> tensor<8x4xf32> {
  // expected-warning@+1 {{every device computes all of a kernel, with 128 bytes gathered for it: stablehlo.custom_call @"anything" is opaque: its independent dimensions are unknown; if it computes each sample by itself, state that in the file of --rules: `anything: b d1 -> b d2; b free`}}
  %0 = stablehlo.custom_call @anything(%x) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %1 = stablehlo.add %0, %x : tensor<8x4xf32>
  return %1 : tensor<8x4xf32>
}

// -----

// A scalar spread out is spread out where it is wanted, where anything else would be sent.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @broadcast_scalar
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[S:.+]]: tensor<f32>, %[[X:.+]]: tensor<2x4xf32>) {
// CHECK: %[[MOVED:.+]] = "stablehlo.collective_permute"(%[[X]])
// CHECK-NOT: collective_permute
// CHECK: %[[SPREAD:.+]] = stablehlo.broadcast_in_dim %[[S]], dims = []
// CHECK-SAME: -> tensor<1x4xf32>
// CHECK: %[[JOIN:.+]] = stablehlo.concatenate
// CHECK-NEXT: sdy.return %[[JOIN]] : tensor<3x4xf32>
func.func @broadcast_scalar(
    %s: tensor<f32>, %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> tensor<12x4xf32> {
  %0 = stablehlo.broadcast_in_dim %s, dims = [] : (tensor<f32>) -> tensor<4x4xf32>
  %1 = stablehlo.concatenate %x, %0, dim = 0 : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<12x4xf32>
  return %1 : tensor<12x4xf32>
}

// -----

// There and back again: of two reshards in a row the first is left out.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @there_and_back
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xf32>) {
// CHECK-NEXT: sdy.return %[[X]] : tensor<2x4xf32>
func.func @there_and_back(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  %0 = sdy.sharding_constraint %x <@mesh, [{}, {"y"}]> : tensor<8x4xf32>
  %1 = sdy.sharding_constraint %0 <@mesh, [{"x"}, {}]> : tensor<8x4xf32>
  return %1 : tensor<8x4xf32>
}
