// RUN: stablehlo-tools opt %s -p 'partition{choices=shardy}' --split-input-file | filecheck %s --enable-var-scope

// Calls and composites are inlined, each with the shardings of its own place.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @calls
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x16xf32>, %[[Y:.+]]: tensor<8x8xf32>) {
// CHECK-NEXT: %[[ADD:.+]] = stablehlo.add %[[X]], %[[X]] : tensor<2x16xf32>
// CHECK-NEXT: %[[ADD_2:.+]] = stablehlo.add %[[Y]], %[[Y]] : tensor<8x8xf32>
// CHECK-NEXT: %[[ADD_3:.+]] = stablehlo.add %[[X]], %[[X]] : tensor<2x16xf32>
// CHECK-NEXT: sdy.return %[[ADD]], %[[ADD_2]], %[[ADD_3]] : tensor<2x16xf32>, tensor<8x8xf32>, tensor<2x16xf32>
func.func @calls(
    %x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %y: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"y"}]>}
) -> (tensor<8x16xf32>, tensor<8x16xf32>, tensor<8x16xf32>) {
  %0 = call @twice(%x) : (tensor<8x16xf32>) -> tensor<8x16xf32>
  %1 = call @twice(%y) : (tensor<8x16xf32>) -> tensor<8x16xf32>
  %2 = stablehlo.composite "test.twice" %x {decomposition = @twice} : (tensor<8x16xf32>) -> tensor<8x16xf32>
  return %0, %1, %2 : tensor<8x16xf32>, tensor<8x16xf32>, tensor<8x16xf32>
}
func.func private @twice(%x: tensor<8x16xf32>) -> tensor<8x16xf32> {
  %0 = stablehlo.add %x, %x : tensor<8x16xf32>
  return %0 : tensor<8x16xf32>
}

// -----

// A computation with a name of its own is taken apart.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @named
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x16xf32>) {
// CHECK-NEXT: %[[ADD:.+]] = stablehlo.add %[[X]], %[[X]] : tensor<2x16xf32>
// CHECK-NEXT: sdy.return %[[ADD]] : tensor<2x16xf32>
func.func @named(
    %x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> tensor<8x16xf32> {
  %0 = sdy.named_computation<"twice">(%x) in_shardings=[<@mesh, [{"x"}, {}]>] out_shardings=[<@mesh, [{"x"}, {}]>] (%a: tensor<8x16xf32>) {
    %1 = stablehlo.add %a, %a : tensor<8x16xf32>
    sdy.return %1 : tensor<8x16xf32>
  } : (tensor<8x16xf32>) -> tensor<8x16xf32>
  return %0 : tensor<8x16xf32>
}

// -----

// A manual computation over all axes dissolves; its collective stays as it is.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @manual
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x8xf32>) {
// CHECK-NEXT: %[[NEGATE:.+]] = stablehlo.negate %[[X]] : tensor<2x8xf32>
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[NEGATE]])
// CHECK-SAME: channel_handle<handle = 5, type = 1>
// CHECK-SAME: source_target_pairs = dense<{{\[\[}}0, 2], [2, 0]]>
// CHECK-SAME: -> tensor<2x8xf32>
// CHECK-NEXT: %[[NEGATE_2:.+]] = stablehlo.negate %[[PERMUTE]] : tensor<2x8xf32>
// CHECK-NEXT: sdy.return %[[NEGATE_2]] : tensor<2x8xf32>
func.func @manual(
    %x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}
) -> (tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}) {
  %0 = stablehlo.negate %x : tensor<8x16xf32>
  %1 = sdy.manual_computation(%0) in_shardings=[<@mesh, [{"x"}, {"y"}]>] out_shardings=[<@mesh, [{"x"}, {"y"}]>] manual_axes={"x", "y"} (%a: tensor<2x8xf32>) {
    %2 = "stablehlo.collective_permute"(%a) {
      channel_handle = #stablehlo.channel_handle<handle = 5, type = 1>,
      source_target_pairs = dense<[[0, 2], [2, 0]]> : tensor<2x2xi64>
    } : (tensor<2x8xf32>) -> tensor<2x8xf32>
    sdy.return %2 : tensor<2x8xf32>
  } : (tensor<8x16xf32>) -> tensor<8x16xf32>
  %3 = stablehlo.negate %1 : tensor<8x16xf32>
  return %3 : tensor<8x16xf32>
}

// -----

// Over one axis, the other is Shardy's: the collective of before keeps its channel and what is added
// gets one above it.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @manual_with_a_free_axis
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x8xf32>) {
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[X]])
// CHECK-SAME: all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 5, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: -> tensor<8x8xf32>
// CHECK-NEXT: %[[ZERO:.+]] = stablehlo.constant dense<0.000000e+00> : tensor<f32>
// CHECK-NEXT: %[[REDUCE:.+]] = stablehlo.reduce(%[[GATHER]] init: %[[ZERO]]) applies stablehlo.add across dimensions = [1]
// CHECK-SAME: -> tensor<8xf32>
// CHECK-NEXT: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[REDUCE]])
// CHECK-SAME: channel_handle<handle = 6, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 1], [2, 3], [4, 5], [6, 7]]>
// CHECK: stablehlo.add
// CHECK: }) : (tensor<8xf32>) -> tensor<8xf32>
// CHECK-NEXT: sdy.return %[[SUM]] : tensor<8xf32>
func.func @manual_with_a_free_axis(
    %x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}
) -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}) {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x"}, {?}]>] out_shardings=[<@mesh, [{}]>] manual_axes={"x"} (%a: tensor<2x16xf32>) {
    %1 = "stablehlo.all_gather"(%a) {
      all_gather_dim = 0 : i64,
      channel_handle = #stablehlo.channel_handle<handle = 5, type = 1>,
      replica_groups = dense<[[0, 2, 4, 6], [1, 3, 5, 7]]> : tensor<2x4xi64>, use_global_device_ids
    } : (tensor<2x16xf32>) -> tensor<8x16xf32>
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %2 = stablehlo.reduce(%1 init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<8x16xf32>, tensor<f32>) -> tensor<8xf32>
    sdy.return %2 : tensor<8xf32>
  } : (tensor<8x16xf32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}

// -----

// One inside of another.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @nested_manual
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x16xf32>) {
// CHECK-NEXT: %[[DEVICE:.+]] = stablehlo.partition_id : tensor<ui32>
// CHECK-NEXT: %[[ZERO:.+]] = stablehlo.constant dense<0> : tensor<i32>
// CHECK-NEXT: %[[TABLE:.+]] = stablehlo.constant dense<[0, 8, 0, 8, 0, 8, 0, 8]> : tensor<8xi32>
// CHECK-NEXT: %[[ROW:.+]] = stablehlo.dynamic_slice %[[TABLE]], %[[DEVICE]], sizes = [1]
// CHECK-NEXT: %[[START:.+]] = stablehlo.reshape %[[ROW]]
// CHECK-NEXT: %[[PART:.+]] = stablehlo.dynamic_slice %[[X]], %[[ZERO]], %[[START]], sizes = [2, 8]
// CHECK-SAME: -> tensor<2x8xf32>
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[PART]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: source_target_pairs = dense<{{\[\[}}0, 1], [1, 0]]>
// CHECK-SAME: -> tensor<2x8xf32>
// CHECK-NEXT: sdy.return %[[PERMUTE]] : tensor<2x8xf32>
func.func @nested_manual(
    %x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> (tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}) {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x"}, {?}]>] out_shardings=[<@mesh, [{"x"}, {"y"}]>] manual_axes={"x"} (%a: tensor<2x16xf32>) {
    %1 = sdy.manual_computation(%a) in_shardings=[<@mesh, [{}, {"y"}]>] out_shardings=[<@mesh, [{}, {"y"}]>] manual_axes={"y"} (%b: tensor<2x8xf32>) {
      %2 = "stablehlo.collective_permute"(%b) {
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
        source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
      } : (tensor<2x8xf32>) -> tensor<2x8xf32>
      sdy.return %2 : tensor<2x8xf32>
    } : (tensor<2x16xf32>) -> tensor<2x16xf32>
    sdy.return %1 : tensor<2x16xf32>
  } : (tensor<8x16xf32>) -> tensor<8x16xf32>
  return %0 : tensor<8x16xf32>
}

// -----

// A loop carries the part; the collective stands in its body.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @loop
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[W:.+]]: tensor<2x8xf32>, %[[X:.+]]: tensor<2x2xf32>) {
// CHECK-NEXT: %[[ZERO_2:.+]] = stablehlo.constant dense<0> : tensor<i32>
// CHECK-NEXT: %[[CONSTANT:.+]] = stablehlo.constant dense<1> : tensor<i32>
// CHECK-NEXT: %[[CONSTANT_2:.+]] = stablehlo.constant dense<3> : tensor<i32>
// CHECK-NEXT: %[[WHILE:.+]]:2 = stablehlo.while(%[[I:.+]] = %[[ZERO_2]], %[[I_2:.+]] = %[[X]]) : tensor<i32>, tensor<2x2xf32>
// CHECK-NEXT: cond {
// CHECK-NEXT: %[[COMPARE:.+]] = stablehlo.compare LT, %[[I]], %[[CONSTANT_2]]
// CHECK-SAME: -> tensor<i1>
// CHECK-NEXT: stablehlo.return %[[COMPARE]] : tensor<i1>
// CHECK-NEXT: } do {
// CHECK-NEXT: %[[DOT:.+]] = stablehlo.dot_general %[[I_2]], %[[W]], contracting_dims = [1] x [0]
// CHECK-SAME: -> tensor<2x8xf32>
// CHECK-NEXT: %[[PART:.+]] = "stablehlo.reduce_scatter"(%[[DOT]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: scatter_dimension = 1
// CHECK: stablehlo.add
// CHECK: }) : (tensor<2x8xf32>) -> tensor<2x2xf32>
// CHECK-NEXT: %[[ADD:.+]] = stablehlo.add %[[I]], %[[CONSTANT]] : tensor<i32>
// CHECK-NEXT: stablehlo.return %[[ADD]], %[[PART]] : tensor<i32>, tensor<2x2xf32>
// CHECK-NEXT: }
// CHECK-NEXT: sdy.return %[[WHILE]]#1 : tensor<2x2xf32>
func.func @loop(
    %w: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %x: tensor<2x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}
) -> (tensor<2x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %v = %x) : tensor<i32>, tensor<2x8xf32>
    cond {
      %1 = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %1 : tensor<i1>
    } do {
      %2 = stablehlo.dot_general %v, %w, contracting_dims = [1] x [0] : (tensor<2x8xf32>, tensor<8x8xf32>) -> tensor<2x8xf32>
      %3 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %3, %2 : tensor<i32>, tensor<2x8xf32>
    }
  return %0#1 : tensor<2x8xf32>
}

// -----

// The branches of a case and of an if return what their users take, divided alike.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @branches
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[N:.+]]: tensor<i32>, %[[P:.+]]: tensor<i1>, %[[X:.+]]: tensor<2x8xf32>, %[[Y:.+]]: tensor<8x2xf32>) {
// CHECK-NEXT: %[[EXCHANGE:.+]] = "stablehlo.all_to_all"(%[[Y]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: concat_dimension = 1 : i64, replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: split_count = 4 : i64, split_dimension = 0 : i64
// CHECK-SAME: -> tensor<2x8xf32>
// CHECK-NEXT: %[[CASE:.+]] = "stablehlo.case"(%[[N]]) ({
// CHECK-NEXT: stablehlo.return %[[X]] : tensor<2x8xf32>
// CHECK-NEXT: }, {
// CHECK-NEXT: stablehlo.return %[[EXCHANGE]] : tensor<2x8xf32>
// CHECK-NEXT: }) : (tensor<i32>) -> tensor<2x8xf32>
// CHECK-NEXT: %[[IF:.+]] = "stablehlo.if"(%[[P]]) ({
// CHECK-NEXT: stablehlo.return %[[CASE]] : tensor<2x8xf32>
// CHECK-NEXT: }, {
// CHECK-NEXT: %[[NEGATE:.+]] = stablehlo.negate %[[X]] : tensor<2x8xf32>
// CHECK-NEXT: stablehlo.return %[[NEGATE]] : tensor<2x8xf32>
// CHECK-NEXT: }) : (tensor<i1>) -> tensor<2x8xf32>
// CHECK-NEXT: sdy.return %[[IF]] : tensor<2x8xf32>
func.func @branches(
    %n: tensor<i32>, %p: tensor<i1>,
    %x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %y: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}
) -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  %0 = "stablehlo.case"(%n) ({
    stablehlo.return %x : tensor<8x8xf32>
  }, {
    stablehlo.return %y : tensor<8x8xf32>
  }) : (tensor<i32>) -> tensor<8x8xf32>
  %1 = "stablehlo.if"(%p) ({
    stablehlo.return %0 : tensor<8x8xf32>
  }, {
    %2 = stablehlo.negate %x : tensor<8x8xf32>
    stablehlo.return %2 : tensor<8x8xf32>
  }) : (tensor<i1>) -> tensor<8x8xf32>
  return %1 : tensor<8x8xf32>
}
