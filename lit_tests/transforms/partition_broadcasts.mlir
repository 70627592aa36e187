// A broadcast that two ops want in different divisions is written for each: its small operand moves.

// RUN: stablehlo-tools opt %s -p partition | filecheck %s
// RUN: stablehlo-tools opt %s -p partition -o %t.mlirbc && stablehlo-tools verify %s %t.mlirbc --exact
module attributes {mhlo.num_partitions = 4 : i32} {
  sdy.mesh @mesh = <["x"=4]>

  // CHECK-LABEL: func.func @main
  // CHECK: %[[SINE:.*]] = stablehlo.sine %{{.*}} : tensor<16xf32>
  // CHECK: stablehlo.broadcast_in_dim %[[SINE]], dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
  // CHECK-NOT: all_to_all
  // CHECK: stablehlo.broadcast_in_dim %[[SINE]], dims = [2] : (tensor<16xf32>) -> tensor<8x2x16xf32>
  // CHECK-NOT: all_to_all
  func.func @main(
      %a: tensor<8x8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}, {}]>},
      %c: tensor<8x8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}, {}]>},
      %k: tensor<16xf32>)
      -> (tensor<8x8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}, {}]>},
          tensor<8x8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}, {}]>}) {
    %sine = stablehlo.sine %k : tensor<16xf32>
    %whole = stablehlo.broadcast_in_dim %sine, dims = [2] {
      sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}, {}, {}]>]>
    } : (tensor<16xf32>) -> tensor<8x8x16xf32>
    %first = stablehlo.multiply %a, %whole : tensor<8x8x16xf32>
    %second = stablehlo.multiply %c, %whole : tensor<8x8x16xf32>
    return %first, %second : tensor<8x8x16xf32>, tensor<8x8x16xf32>
  }
}
