// RUN: stablehlo-tools opt %s -p partition -o %t.mlir
// RUN: stablehlo-tools verify %s %t.mlir | filecheck %s
// RUN: stablehlo-tools verify %s %t.mlir --floats --specials | filecheck %s --check-prefix=FLOATS

// The first rows of a sort in parts, with many equal keys, whose order stays that of their rows.
// One comparator reads a constant from outside.

// CHECK: identical in exact arithmetic: 4 outputs
// FLOATS: same: 4 outputs
sdy.mesh @mesh = <["x"=2, "y"=2]>
func.func @main(
    %keys: tensor<3x64xi1> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x", "y"}]>},
    %x: tensor<4x48xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}
) -> (tensor<3x3xi1>, tensor<3x3xi32>, tensor<4x5xf32>, tensor<4x5xi32>) {
  %rows = stablehlo.iota dim = 1 : tensor<3x64xi32>
  %0:2 = "stablehlo.sort"(%keys, %rows) <{dimension = 1 : i64, is_stable = true}> ({
  ^bb0(%a: tensor<i1>, %b: tensor<i1>, %c: tensor<i32>, %d: tensor<i32>):
    %1 = stablehlo.compare GT, %a, %b : (tensor<i1>, tensor<i1>) -> tensor<i1>
    stablehlo.return %1 : tensor<i1>
  }) : (tensor<3x64xi1>, tensor<3x64xi32>) -> (tensor<3x64xi1>, tensor<3x64xi32>)
  %2 = stablehlo.slice %0#0 [0:3, 0:3] : (tensor<3x64xi1>) -> tensor<3x3xi1>
  %3 = stablehlo.slice %0#1 [0:3, 0:3] : (tensor<3x64xi32>) -> tensor<3x3xi32>
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %places = stablehlo.iota dim = 1 : tensor<4x48xi32>
  %4:2 = "stablehlo.sort"(%x, %places) <{dimension = 1 : i64, is_stable = true}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<i32>, %d: tensor<i32>):
    %least = stablehlo.maximum %a, %zero : tensor<f32>
    %other = stablehlo.maximum %b, %zero : tensor<f32>
    %5 = stablehlo.compare LT, %least, %other, TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %5 : tensor<i1>
  }) : (tensor<4x48xf32>, tensor<4x48xi32>) -> (tensor<4x48xf32>, tensor<4x48xi32>)
  %6 = stablehlo.slice %4#0 [0:4, 43:48] : (tensor<4x48xf32>) -> tensor<4x5xf32>
  %7 = stablehlo.slice %4#1 [0:4, 43:48] : (tensor<4x48xi32>) -> tensor<4x5xi32>
  return %2, %3, %6, %7 : tensor<3x3xi1>, tensor<3x3xi32>, tensor<4x5xf32>, tensor<4x5xi32>
}
