// The interpreter runs neither what is to be divided yet nor manual computations: XLA:CPU runs the
// program before, divided by its own partitioner, and after. Integers, so that sums are exact.
// RUN: stablehlo-tools opt %s -p 'partition{choices=shardy}' -o %t.after.mlir 2> %t.warnings
// RUN: filecheck %s --check-prefix=PARTITIONED --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --trials 2 | filecheck %s

// PARTITIONED: sdy.manual_computation
// PARTITIONED: all_gather
// PARTITIONED: all_reduce
// PARTITIONED: all_to_all
// CHECK: identical in exact arithmetic: 6 outputs, 94 elements

// An iota that counts from the other device's start is seen.
// RUN: sed 's/dense<\[0, 2\]>/dense<[2, 0]>/' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --trials 1 | filecheck %s --check-prefix=STARTS
// STARTS: differs in exact arithmetic: output 4,

// And parts that are gathered in the wrong order.
// RUN: sed 's/\(all_gather.*\)\[\[0, 1\]\]/\1[[1, 0]]/' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --trials 1 | filecheck %s --check-prefix=ORDER
// ORDER: differs in exact arithmetic: output 0,
module @program attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=2]>
  func.func public @main(
      %x: tensor<4x6xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
      %w: tensor<6x4xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
      %i: tensor<5x1xi32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}
  ) -> (tensor<4x4xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
        tensor<4xi32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>},
        tensor<5x4xi32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>},
        tensor<6x4xi32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>},
        tensor<4x6xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
        tensor<6xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) {
    // A contraction; a sum of columns.
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x6xi32>, tensor<6x4xi32>) -> tensor<4x4xi32>
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %1 = stablehlo.reduce(%w init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<6x4xi32>, tensor<i32>) -> tensor<4xi32>
    // Rows of a divided table; the table itself is returned too, divided otherwise.
    %2 = "stablehlo.gather"(%w, %i) {
      dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
      slice_sizes = array<i64: 1, 4>
    } : (tensor<6x4xi32>, tensor<5x1xi32>) -> tensor<5x4xi32>
    // An iota, and rows in the opposite order.
    %3 = stablehlo.iota dim = 0 : tensor<4x6xi32>
    %4 = stablehlo.reverse %x, dims = [0] : tensor<4x6xi32>
    %5 = stablehlo.add %3, %4 : tensor<4x6xi32>
    // A count of indices, summed into a table.
    %table = stablehlo.constant dense<[1, 2, 3, 4, 5, 6]> : tensor<6xi32>
    %ones = stablehlo.constant dense<1> : tensor<5xi32>
    %6 = "stablehlo.scatter"(%table, %i, %ones) ({
    ^bb0(%a: tensor<i32>, %b: tensor<i32>):
      %7 = stablehlo.add %a, %b : tensor<i32>
      stablehlo.return %7 : tensor<i32>
    }) {
      scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>
    } : (tensor<6xi32>, tensor<5x1xi32>, tensor<5xi32>) -> tensor<6xi32>
    return %0, %1, %2, %w, %5, %6
      : tensor<4x4xi32>, tensor<4xi32>, tensor<5x4xi32>, tensor<6x4xi32>, tensor<4x6xi32>, tensor<6xi32>
  }
}
