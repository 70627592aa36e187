// RUN: stablehlo-tools opt %s -p 'partition{partitioner=xla}' | filecheck %s

// What XLA's partitioner makes of a program, in the signature as it was.
// CHECK: sdy.mesh @mesh = <["x"=2]>
// CHECK-LABEL: @main
// CHECK-SAME: (%{{.+}}: tensor<4x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>},
// CHECK-SAME: -> (tensor<4x2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>})
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x"} (%[[X:.+]]: tensor<4x4xf32>, %[[W:.+]]: tensor<4x2xf32>) {
// CHECK-NEXT: %[[DOT:.+]] = stablehlo.dot %[[X]], %[[W]]
// CHECK-NEXT: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[DOT]])
// CHECK: stablehlo.add
// CHECK: sdy.return %[[SUM]]
sdy.mesh @mesh = <["x"=2]>
func.func public @main(
    %x: tensor<4x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>},
    %w: tensor<8x2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> (tensor<4x2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x8xf32>, tensor<8x2xf32>) -> tensor<4x2xf32>
  %1 = sdy.propagation_barrier %0 allowed_direction=BACKWARD : tensor<4x2xf32>
  return %1 : tensor<4x2xf32>
}
