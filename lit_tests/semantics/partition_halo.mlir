// Borders that devices send each other, and uneven parts: XLA:CPU runs the program before, divided by
// its own partitioner, and after. Integers, so that sums are exact.
// RUN: stablehlo-tools opt %s -p 'partition{choices=shardy}' -o %t.after.mlir
// RUN: filecheck %s --check-prefix=PARTITIONED --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --trials 2 | filecheck %s

// PARTITIONED: sdy.manual_computation
// PARTITIONED-NOT: all_to_all
// PARTITIONED: collective_permute
// PARTITIONED-NOT: all_to_all
// CHECK: identical in exact arithmetic: 6 outputs, 80 elements

// A border that goes round the other way is seen.
// RUN: sed 's/\[\[3, 0\], \[0, 1\], \[1, 2\], \[2, 3\]\]/[[1, 0], [2, 1], [3, 2], [0, 3]]/' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --trials 1 | filecheck %s --check-prefix=RING
// RING: differs in exact arithmetic: output 0,

// And a sum that takes in what is beyond the end.
// RUN: sed 's/compare  *LT/compare GE/' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --trials 1 | filecheck %s --check-prefix=PADDING
// PADDING: differs in exact arithmetic: output
module @program attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=4]>
  func.func public @main(
      %x: tensor<16xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>},
      %w: tensor<1x1x3xi32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}, {}]>}
  ) -> (tensor<16xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>},
        tensor<16xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>},
        tensor<i32> {sdy.sharding = #sdy.sharding<@mesh, []>},
        tensor<16xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>},
        tensor<15xi32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>},
        tensor<16xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) {
    // Round by three.
    %0 = stablehlo.slice %x [13:16] : (tensor<16xi32>) -> tensor<3xi32>
    %1 = stablehlo.slice %x [0:13] : (tensor<16xi32>) -> tensor<13xi32>
    %2 = stablehlo.concatenate %0, %1, dim = 0 : (tensor<3xi32>, tensor<13xi32>) -> tensor<16xi32>
    // A convolution.
    %3 = stablehlo.reshape %x : (tensor<16xi32>) -> tensor<1x1x16xi32>
    %4 = stablehlo.convolution(%3, %w) dim_numbers = [b, f, 0]x[o, i, 0]->[b, f, 0], window = {pad = [[1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : (tensor<1x1x16xi32>, tensor<1x1x3xi32>) -> tensor<1x1x16xi32>
    %5 = stablehlo.reshape %4 : (tensor<1x1x16xi32>) -> tensor<16xi32>
    // The sum of 15 differences.
    %6 = stablehlo.slice %x [1:16] : (tensor<16xi32>) -> tensor<15xi32>
    %7 = stablehlo.slice %x [0:15] : (tensor<16xi32>) -> tensor<15xi32>
    %8 = stablehlo.subtract %6, %7 : tensor<15xi32>
    %9 = stablehlo.multiply %8, %8 : tensor<15xi32>
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %10 = stablehlo.reduce(%9 init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<15xi32>, tensor<i32>) -> tensor<i32>
    // What lies between the ends is overwritten.
    %11 = stablehlo.slice %9 [0:14] : (tensor<15xi32>) -> tensor<14xi32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %12 = stablehlo.dynamic_update_slice %x, %11, %one : (tensor<16xi32>, tensor<14xi32>, tensor<i32>) -> tensor<16xi32>
    // Backwards.
    %13 = stablehlo.reverse %x, dims = [0] : tensor<16xi32>
    return %2, %5, %10, %12, %8, %13 : tensor<16xi32>, tensor<16xi32>, tensor<i32>, tensor<16xi32>, tensor<15xi32>, tensor<16xi32>
  }
}
