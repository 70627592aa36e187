// RUN: stablehlo-tools opt %s -p partition --split-input-file | filecheck %s --enable-var-scope

// One manual computation that fits the signature, but not over every axis: "y" is free inside.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @half_partitioned
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x16xf32>) {
// CHECK-NEXT: %[[NEGATE:.+]] = stablehlo.negate %[[X]] : tensor<2x16xf32>
// CHECK-NEXT: sdy.return %[[NEGATE]] : tensor<2x16xf32>
func.func @half_partitioned(
    %x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> (tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x"}, {}]>] out_shardings=[<@mesh, [{"x"}, {}]>] manual_axes={"x"} (%a: tensor<2x16xf32>) {
    %1 = stablehlo.negate %a : tensor<2x16xf32>
    sdy.return %1 : tensor<2x16xf32>
  } : (tensor<8x16xf32>) -> tensor<8x16xf32>
  return %0 : tensor<8x16xf32>
}

// -----

// Over every axis, but the argument comes divided otherwise: it is made to fit.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @partitioned_for_other_arguments
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<8x4xf32>) {
// CHECK-NEXT: %[[EXCHANGE:.+]] = "stablehlo.all_to_all"(%[[X]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: concat_dimension = 1 : i64, replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: split_count = 4 : i64, split_dimension = 0 : i64
// CHECK-SAME: -> tensor<2x16xf32>
// CHECK-NEXT: %[[NEGATE:.+]] = stablehlo.negate %[[EXCHANGE]] : tensor<2x16xf32>
// CHECK-NEXT: sdy.return %[[NEGATE]] : tensor<2x16xf32>
func.func @partitioned_for_other_arguments(
    %x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}
) -> (tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x"}, {}]>] out_shardings=[<@mesh, [{"x"}, {}]>] manual_axes={"x", "y"} (%a: tensor<2x16xf32>) {
    %1 = stablehlo.negate %a : tensor<2x16xf32>
    sdy.return %1 : tensor<2x16xf32>
  } : (tensor<8x16xf32>) -> tensor<8x16xf32>
  return %0 : tensor<8x16xf32>
}

// -----

// Over every axis, but an op is left outside.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @partitioned_but_for_one_op
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x16xf32>) {
// CHECK-NEXT: %[[NEGATE:.+]] = stablehlo.negate %[[X]] : tensor<2x16xf32>
// CHECK-NEXT: %[[ADD:.+]] = stablehlo.add %[[NEGATE]], %[[NEGATE]] : tensor<2x16xf32>
// CHECK-NEXT: sdy.return %[[ADD]] : tensor<2x16xf32>
func.func @partitioned_but_for_one_op(
    %x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> (tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x"}, {}]>] out_shardings=[<@mesh, [{"x"}, {}]>] manual_axes={"x", "y"} (%a: tensor<2x16xf32>) {
    %1 = stablehlo.negate %a : tensor<2x16xf32>
    sdy.return %1 : tensor<2x16xf32>
  } : (tensor<8x16xf32>) -> tensor<8x16xf32>
  %2 = stablehlo.add %0, %0 : tensor<8x16xf32>
  return %2 : tensor<8x16xf32>
}
