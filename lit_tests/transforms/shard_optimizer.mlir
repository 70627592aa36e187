// RUN: stablehlo-tools opt %s -p shard-optimizer | filecheck %s
// RUN: stablehlo-tools opt %s -p 'shard-optimizer{axis=data explain}' -o %t.mlir 2>&1 | filecheck %s --check-prefix=NOTE

// The moment is divided over the axis of the batch, as an argument and as a result; the gradient is
// summed to parts, and the new weights are made in parts. The first dimension is taken only if no
// other one can be.
// NOTE: note: shard-optimizer: 1 arguments that are state are divided over 'data': 6.1e-05 GiB become 1.53e-05 GiB a device
// NOTE: dimension 1
sdy.mesh @mesh = <["data"=4]>
// CHECK-LABEL: func.func @main
// CHECK-SAME:    %[[W:.+]]: tensor<128x128xf32>, %[[M:.+]]: tensor<128x128xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}]>}
// CHECK-SAME:    -> (tensor<128x128xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}, tensor<128x128xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}]>})
// CHECK:         stablehlo.dot_general
// CHECK-NEXT:    %[[G:.+]] = stablehlo.dot_general
// CHECK-NEXT:    %[[PART:.+]] = sdy.sharding_constraint %[[G]] <@mesh, [{}, {"data"}]>
// CHECK:         %[[M1:.+]] = stablehlo.add %[[M]], %[[PART]]
// CHECK:         %[[W1:.+]] = stablehlo.subtract %[[W]], %[[M1]]
// CHECK:         %[[OUT:.+]] = sdy.sharding_constraint %[[W1]] <@mesh, [{}, {"data"}]>
// CHECK:         return %[[OUT]], %[[M1]]
func.func @main(
    %w: tensor<128x128xf32>, %m: tensor<128x128xf32>,
    %x: tensor<64x128xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>})
    -> (tensor<128x128xf32>, tensor<128x128xf32>) {
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<64x128xf32>, tensor<128x128xf32>) -> tensor<64x128xf32>
  %g = stablehlo.dot_general %x, %y, contracting_dims = [0] x [0] : (tensor<64x128xf32>, tensor<64x128xf32>) -> tensor<128x128xf32>
  %m1 = stablehlo.add %m, %g : tensor<128x128xf32>
  %w1 = stablehlo.subtract %w, %m1 : tensor<128x128xf32>
  return %w1, %m1 : tensor<128x128xf32>, tensor<128x128xf32>
}
