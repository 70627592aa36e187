// RUN: stablehlo-tools opt %s -p shard-optimizer | tee %t.once.mlir | filecheck %s
// RUN: not stablehlo-tools opt %t.once.mlir -p shard-optimizer 2>&1 | filecheck %s --check-prefix=AGAIN

// What is divided over the axis already stays as it is, and so does a state that no dimension of is
// divided by it; a second time there is nothing left.
// AGAIN: error: shard-optimizer: no state of an optimizer is whole along 'data'
sdy.mesh @mesh = <["data"=4]>
// CHECK-LABEL: func.func @main
// CHECK-SAME:    %arg0: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}
// CHECK-SAME:    %arg1: tensor<3x5xf32>,
// CHECK-SAME:    %arg2: tensor<8x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}
func.func @main(
    %divided: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
    %odd: tensor<3x5xf32>, %m: tensor<8x6xf32>,
    %x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
    %y: tensor<8x6xf32>, %z: tensor<3x5xf32>)
    -> (tensor<8x8xf32>, tensor<3x5xf32>, tensor<8x6xf32>) {
  %a = stablehlo.add %divided, %x : tensor<8x8xf32>
  %b = stablehlo.add %odd, %z : tensor<3x5xf32>
  %g = stablehlo.tanh %y : tensor<8x6xf32>
  %c = stablehlo.add %m, %g : tensor<8x6xf32>
  return %a, %b, %c : tensor<8x8xf32>, tensor<3x5xf32>, tensor<8x6xf32>
}
