// Rows added by two indices, some of them out of bounds by the one or the other, and by three where
// one dimension is that of rows of one: XLA:CPU runs the program before and after.
// RUN: stablehlo-tools opt %s -p partition -o %t.after.mlir
// RUN: filecheck %s --check-prefix=PARTITIONED --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --trials 2 | filecheck %s

// PARTITIONED: update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],
// PARTITIONED: inserted_window_dims = [0, 1], scatter_dims_to_operand_dims = [0, 1]>
// CHECK: identical in exact arithmetic: 2 outputs, 96 elements

// RUN: sed 's/dense<-1>/dense<1>/' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --trials 1 | filecheck %s --check-prefix=BOUNDS
// BOUNDS: differs in exact arithmetic: output 0,
module @program attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=4]>
  func.func public @main(
      %t: tensor<8x6xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
      %u: tensor<8x1x6xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}, {}]>},
      %v: tensor<1x8x6xi32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}, {}]>},
      %s: tensor<2x4x6xi32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}, {}]>}
  ) -> (tensor<8x6xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
        tensor<2x4x6xi32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}, {}]>}) {
    %two = stablehlo.constant dense<[[0, 0], [3, 0], [3, 0], [5, 1], [7, 0], [-1, 0], [8, 0], [2, -1]]> : tensor<8x2xi32>
    %0 = "stablehlo.scatter"(%t, %two, %u) ({
    ^bb0(%a: tensor<i32>, %b: tensor<i32>):
      %1 = stablehlo.add %a, %b : tensor<i32>
      stablehlo.return %1 : tensor<i32>
    }) {
      scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1, 2], scatter_dims_to_operand_dims = [0, 1], index_vector_dim = 1>
    } : (tensor<8x6xi32>, tensor<8x2xi32>, tensor<8x1x6xi32>) -> tensor<8x6xi32>
    %three = stablehlo.constant dense<[[0, 1, 0, 1, 1, 0, 2, 1], [0, 3, 3, 1, 4, 0, 1, -1], [0, 0, 0, 0, 0, 1, 0, 0]]> : tensor<3x8xi32>
    %2 = "stablehlo.scatter"(%s, %three, %v) ({
    ^bb0(%a: tensor<i32>, %b: tensor<i32>):
      %3 = stablehlo.add %a, %b : tensor<i32>
      stablehlo.return %3 : tensor<i32>
    }) {
      scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [0, 2], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0, 1, 2], index_vector_dim = 0>
    } : (tensor<2x4x6xi32>, tensor<3x8xi32>, tensor<1x8x6xi32>) -> tensor<2x4x6xi32>
    return %0, %2 : tensor<8x6xi32>, tensor<2x4x6xi32>
  }
}
