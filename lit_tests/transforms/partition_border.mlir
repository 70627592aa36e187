// RUN: stablehlo-tools opt %s -p 'partition{choices=shardy}' --split-input-file --verify-diagnostics
// RUN: stablehlo-tools opt %s -p 'partition{choices=shardy}' --split-input-file 2> %t.warnings | filecheck %s --enable-var-scope

// An axis, or what of it does not divide a dimension, is taken from it, as XLA does.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @uneven
// CHECK-SAME: tensor<31x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
// CHECK: in_shardings=[<@mesh, [{}, {}]>, <@mesh, [{"x":(1)2}]>] out_shardings=[<@mesh, [{}, {"y"}]>, <@mesh, [{}]>]
// CHECK-SAME: manual_axes={"x", "y"} (%{{.+}}: tensor<31x4xf32>, %{{.+}}: tensor<3xf32>)
// expected-warning@+3 {{argument 0 of @main has a dimension of 31 that is divided by 4, which leaves uneven parts: it is whole on each device instead, as XLA keeps it}}
// expected-warning@+2 {{argument 1 of @main has a dimension of 6 that is divided by 4, which leaves uneven parts: it is divided by 2 instead, as XLA keeps it}}
// expected-warning@+1 {{result 0 of @main has a dimension of 31 that is divided by 2}}
func.func @uneven(%x: tensor<31x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
                  %y: tensor<6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>})
    -> (tensor<31x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x":(1)2}, {"y"}]>}, tensor<6xf32>) {
  %0 = stablehlo.negate %x : tensor<31x4xf32>
  return %0, %y : tensor<31x4xf32>, tensor<6xf32>
}

// -----

// An argument in parts of a sum is summed; a result is left in parts, of which here one holds all.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @unreduced
// CHECK: in_shardings=[<@mesh, [{"y"}], unreduced={"x"}>] out_shardings=[<@mesh, [{"y"}], unreduced={"x"}>, <@mesh, [], unreduced={"x"}>]
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<4xf32>) {
// CHECK: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[X]]) <{{.*}}replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK: %[[TWICE:.+]] = stablehlo.add %[[SUM]], %[[SUM]] : tensor<4xf32>
// CHECK: %[[FIRST:.+]] = stablehlo.compare EQ
// CHECK: %[[PART:.+]] = stablehlo.select %[[FIRST]], %[[TWICE]], %{{.+}} : tensor<i1>, tensor<4xf32>
// CHECK: sdy.return %[[PART]]
func.func @unreduced(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}], unreduced={"x"}>})
    -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}], unreduced={"x"}>}) {
  %0 = stablehlo.add %x, %x {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"y"}], unreduced={"x"}>]>} : tensor<8xf32>
  return %0 : tensor<8xf32>
}

// -----

// A contraction whose result is left in parts: each device keeps what it has summed.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @contraction_in_parts
// CHECK: %[[DOT:.+]] = stablehlo.dot_general
// CHECK-NEXT: sdy.return %[[DOT]]
func.func @contraction_in_parts(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}, %w: tensor<4x2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>})
    -> (tensor<8x2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}], unreduced={"x"}>}) {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}, {}], unreduced={"x"}>]>} : (tensor<8x4xf32>, tensor<4x2xf32>) -> tensor<8x2xf32>
  return %0 : tensor<8x2xf32>
}

// -----

// Parts of a maximum, and parts that a manual computation gives: combined where it ends.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @maximum_and_manual
// CHECK: "stablehlo.all_reduce"
// CHECK: stablehlo.maximum
// CHECK: %[[PART:.+]] = stablehlo.negate
// CHECK-NEXT: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[PART]])
// CHECK: stablehlo.add
// CHECK: %[[ABS:.+]] = stablehlo.abs %[[SUM]]
// CHECK: sdy.return %[[ABS]]
func.func @maximum_and_manual(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}], unreduced=max{"x"}>}) -> tensor<8xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{}]>] out_shardings=[<@mesh, [{}], unreduced={"x"}>] manual_axes={"x"} (%a: tensor<8xf32>) {
    %2 = stablehlo.negate %a : tensor<8xf32>
    sdy.return %2 : tensor<8xf32>
  } : (tensor<8xf32>) -> tensor<8xf32>
  %1 = stablehlo.abs %0 : tensor<8xf32>
  return %1 : tensor<8xf32>
}

// -----

// A sum of parts that Shardy leaves in uneven parts: 2 places of 6 on each of three devices.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @uneven_sum
// CHECK: %[[CONV:.+]] = stablehlo.convolution
// CHECK-SAME: (tensor<1x4x4x2xf32>, tensor<3x3x2x2xf32>) -> tensor<1x2x2x2xf32>
// CHECK: "stablehlo.all_reduce"(%[[CONV]]) {{.*}}dense<{{\[\[}}0, 1], [2, 3], [4, 5], [6, 7]]>
// CHECK: "stablehlo.all_gather"{{.+}} -> tensor<1x2x8x2xf32>
// CHECK-NEXT: %[[WHOLE:.+]] = stablehlo.slice %{{.+}} [0:1, 0:2, 0:6, 0:2]
// CHECK-NEXT: sdy.return %[[WHOLE]] : tensor<1x2x6x2xf32>
func.func @uneven_sum(%x: tensor<1x4x8x4xf32>, %w: tensor<3x3x4x2xf32>) -> tensor<1x2x6x2xf32> {
  %0 = sdy.reshard %x <@mesh, [{}, {}, {"x"}, {"y"}]> : tensor<1x4x8x4xf32>
  %1 = sdy.reshard %w <@mesh, [{}, {}, {"y"}, {}]> : tensor<3x3x4x2xf32>
  %2 = stablehlo.convolution(%0, %1) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {stride = [1, 1], pad = [[0, 0], [0, 0]], lhs_dilate = [1, 1], rhs_dilate = [1, 1], reverse = [false, false]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64, sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}, {}, {}, {}]>]>} : (tensor<1x4x8x4xf32>, tensor<3x3x4x2xf32>) -> tensor<1x2x6x2xf32>
  return %2 : tensor<1x2x6x2xf32>
}
