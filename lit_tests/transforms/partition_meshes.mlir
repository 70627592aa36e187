// RUN: stablehlo-tools opt %s -p partition --split-input-file | filecheck %s --enable-var-scope

// Two names of one mesh, and a mesh of no axes.
sdy.mesh @mesh = <["x"=4, "y"=2]>
sdy.mesh @again = <["x"=4, "y"=2]>
sdy.mesh @empty = <[]>
// CHECK-LABEL: func.func @names_of_one_mesh
// CHECK-SAME: (%{{.+}}: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
// CHECK-SAME: %{{.+}}: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@again, [{"x"}, {}]>},
// CHECK-SAME: %{{.+}}: tensor<i32> {sdy.sharding = #sdy.sharding<@empty, []>})
// CHECK-SAME: -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@again, [{}, {}]>},
// CHECK-SAME: tensor<i32>)
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xf32>, %[[Y:.+]]: tensor<2x4xf32>, %[[N:.+]]: tensor<i32>) {
// CHECK-NEXT: %[[ADD:.+]] = stablehlo.add %[[X]], %[[Y]] : tensor<2x4xf32>
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[ADD]])
// CHECK-SAME: all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: -> tensor<8x4xf32>
// CHECK-NEXT: sdy.return %[[GATHER]], %[[N]] : tensor<8x4xf32>, tensor<i32>
func.func @names_of_one_mesh(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %y: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@again, [{"x"}, {}]>},
    %n: tensor<i32> {sdy.sharding = #sdy.sharding<@empty, []>}
) -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@again, [{}, {}]>}, tensor<i32>) {
  %0 = stablehlo.add %x, %y : tensor<8x4xf32>
  return %0, %n : tensor<8x4xf32>, tensor<i32>
}

// -----

// A mesh that stands in each sharding gets a name, and the signature names it.
// CHECK-LABEL: func.func @inlined_mesh
// CHECK-SAME: (%{{.+}}: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>})
// CHECK-SAME: -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>})
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xf32>) {
// CHECK-NEXT: %[[NEGATE:.+]] = stablehlo.negate %[[X]] : tensor<2x4xf32>
// CHECK-NEXT: sdy.return %[[NEGATE]] : tensor<2x4xf32>
func.func @inlined_mesh(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<mesh<["x"=4, "y"=2]>, [{"x"}, {}]>}
) -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<mesh<["x"=4, "y"=2]>, [{"x"}, {}]>}) {
  %0 = stablehlo.negate %x : tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}

// -----

// An axis of one device divides nothing.
sdy.mesh @mesh = <["x"=4, "y"=1]>
// CHECK-LABEL: func.func @axis_of_one
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x3xf32>) {
// CHECK-NEXT: sdy.return %[[X]] : tensor<2x3xf32>
func.func @axis_of_one(
    %x: tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}
) -> (tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  return %x : tensor<8x3xf32>
}

// -----

// Meshes that nothing names do not count, nor do those of a function that is not called.
sdy.mesh @unused = <["x"=2, "y"=2]>
sdy.mesh @mesh = <["x"=4]>
sdy.mesh @other = <["z"=8]>
// CHECK-LABEL: func.func public @main
// CHECK: in_shardings=[<@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}]>] manual_axes={"x"} (%{{.+}}: tensor<2xf32>)
// CHECK-LABEL: func.func private @not_called
// CHECK-SAME: <@other, [{"z"}]>
// CHECK-NEXT: stablehlo.negate %{{.+}} : tensor<8xf32>
func.func private @not_called(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@other, [{"z"}]>}) -> tensor<8xf32> {
  %0 = stablehlo.negate %x : tensor<8xf32>
  return %0 : tensor<8xf32>
}
func.func public @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<8xf32> {
  %0 = stablehlo.negate %x : tensor<8xf32>
  return %0 : tensor<8xf32>
}

// -----

// Meshes that stand in the shardings of ops.
// CHECK-LABEL: func.func @inlined_mesh_of_an_op
// CHECK: manual_axes={"x"} (%[[X:.+]]: tensor<2xf32>) {
// CHECK-NEXT: stablehlo.negate %[[X]] : tensor<2xf32>
sdy.mesh @mesh = <["x"=4]>
func.func @inlined_mesh_of_an_op(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.negate %x {sdy.sharding = #sdy.sharding_per_value<[<mesh<["x"=4]>, [{"x"}]>]>} : tensor<8xf32>
  return %0 : tensor<8xf32>
}
