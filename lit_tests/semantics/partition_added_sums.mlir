// Rows added to a table, and to zeros, the sum of both and of the table, and a sum of sums.
// XLA:CPU runs the program before and after.
// RUN: stablehlo-tools opt %s -p 'partition{choices=shardy}' -o %t.after.mlir
// RUN: filecheck %s --check-prefix=PARTITIONED --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --trials 2 | filecheck %s

// PARTITIONED-COUNT-2: "stablehlo.scatter"
// PARTITIONED: stablehlo.add {{.*}} tensor<16x4xf32>
// PARTITIONED-NEXT: "stablehlo.reduce_scatter"
// PARTITIONED-COUNT-2: stablehlo.reduce(
// PARTITIONED-NEXT: stablehlo.add {{.*}} tensor<f32>
// PARTITIONED-NEXT: "stablehlo.all_reduce"
// PARTITIONED-NOT: all_reduce
// CHECK: identical in exact arithmetic: 2 outputs, 65 elements
module @program attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=4]>
  func.func public @main(
      %sender: tensor<32x1xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
      %receiver: tensor<32x1xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
      %rows: tensor<32x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
      %table: tensor<16x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
  ) -> (tensor<16x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, tensor<f32>) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %sixteen = stablehlo.constant dense<16> : tensor<32x1xi32>
    %from = stablehlo.remainder %sender, %sixteen : tensor<32x1xi32>
    %to = stablehlo.remainder %receiver, %sixteen : tensor<32x1xi32>
    %zeros = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<f32>) -> tensor<16x4xf32>
    %0 = "stablehlo.scatter"(%table, %from, %rows) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %sum = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %sum : tensor<f32>
    }) : (tensor<16x4xf32>, tensor<32x1xi32>, tensor<32x4xf32>) -> tensor<16x4xf32>
    %1 = "stablehlo.scatter"(%zeros, %to, %rows) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %sum = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %sum : tensor<f32>
    }) : (tensor<16x4xf32>, tensor<32x1xi32>, tensor<32x4xf32>) -> tensor<16x4xf32>
    %2 = stablehlo.add %0, %table : tensor<16x4xf32>
    %3 = stablehlo.add %2, %1 : tensor<16x4xf32>
    %4 = stablehlo.reduce(%rows init: %zero) applies stablehlo.add across dimensions = [0, 1] : (tensor<32x4xf32>, tensor<f32>) -> tensor<f32>
    %5 = stablehlo.reduce(%3 init: %zero) applies stablehlo.add across dimensions = [0, 1] : (tensor<16x4xf32>, tensor<f32>) -> tensor<f32>
    %6 = stablehlo.add %4, %5 : tensor<f32>
    return %3, %6 : tensor<16x4xf32>, tensor<f32>
  }
}
