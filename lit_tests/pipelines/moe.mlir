// RUN: stablehlo-tools opt %s -p moe | filecheck %s

// A named pipeline is its passes, in order.
// RUN: stablehlo-tools opt %s -p 'moe{hardware=b200}' > %t.named
// RUN: stablehlo-tools opt %s -p 'partition,create-reduce-scatter,schedule-overlap{hardware=b200}' | diff -u %t.named -

// Tokens that are divided go to the ranks of their experts and back, by an exchange each way.
// CHECK-LABEL: func.func @main
// CHECK: "stablehlo.all_to_all"
// CHECK: stablehlo.dot_general {{.+}} -> tensor<2x64x32xf32>
// CHECK: "stablehlo.all_to_all"
// CHECK-NOT: "stablehlo.all_{{reduce|gather}}"
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["expert"=4]>
  func.func @main(
      %tokens: tensor<8x64x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"expert"}, {}]>},
      %experts: tensor<8x32x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"expert"}, {}, {}]>})
      -> (tensor<8x64x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"expert"}, {}]>}) {
    %0 = sdy.sharding_constraint %tokens <@mesh, [{"expert"}, {}, {}]> : tensor<8x64x32xf32>
    %1 = stablehlo.dot_general %0, %experts, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<8x64x32xf32>, tensor<8x32x32xf32>) -> tensor<8x64x32xf32>
    %2 = sdy.sharding_constraint %1 <@mesh, [{}, {"expert"}, {}]> : tensor<8x64x32xf32>
    return %2 : tensor<8x64x32xf32>
  }
}
