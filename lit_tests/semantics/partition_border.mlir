// XLA:CPU runs the program before, divided by its own partitioner, and after, on 8 devices: parts
// of sums, dimensions that do not divide, a barrier and Shardy's edges.
// RUN: stablehlo-tools opt %s -p partition -o %t.after.mlir 2> %t.warnings
// RUN: filecheck %s --check-prefix=WARNED --input-file %t.warnings
// RUN: stablehlo-tools verify %s %t.after.mlir --trials 2 | filecheck %s

// WARNED: argument 1 of @main has a dimension of 7 that is divided by 4
// WARNED: result 1 of @main has a dimension of 7 that is divided by 2
// CHECK: identical in exact arithmetic: 4 outputs, 164 elements

// A sum over other devices is seen.
// RUN: sed 's/\[\[0, 2, 4, 6\], \[1, 3, 5, 7\]\]/[[0, 1, 2, 3], [4, 5, 6, 7]]/' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --trials 1 | filecheck %s --check-prefix=GROUPS
// GROUPS: differs in exact arithmetic: output 0
sdy.mesh @mesh = <["x"=4, "y"=2]>
func.func public @main(
    %x: tensor<8x4xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {"x"}]>},
    %w: tensor<7x4xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %z: tensor<6x8xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}
) -> (tensor<8x4xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
      tensor<7x4xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {"x"}]>},
      tensor<8x7xi32>,
      tensor<6x8xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  %5 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [1] {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"y"}, {}], unreduced={"x"}>]>} : (tensor<8x4xi32>, tensor<8x4xi32>) -> tensor<8x8xi32>
  %6 = sdy.sharding_constraint %5 <@mesh, [{"y"}, {}]> : tensor<8x8xi32>
  %0 = stablehlo.slice %6 [0:8, 0:4] : (tensor<8x8xi32>) -> tensor<8x4xi32>
  %1 = stablehlo.negate %w : tensor<7x4xi32>
  %2 = sdy.propagation_barrier %1 allowed_direction=FORWARD : tensor<7x4xi32>
  %3 = stablehlo.dot_general %0, %2, contracting_dims = [1] x [1] : (tensor<8x4xi32>, tensor<7x4xi32>) -> tensor<8x7xi32>
  %4 = stablehlo.add %z, %z {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}, {"x"}]>]>} : tensor<6x8xi32>
  return %0, %1, %3, %4 : tensor<8x4xi32>, tensor<7x4xi32>, tensor<8x7xi32>, tensor<6x8xi32>
}
