// RUN: stablehlo-tools opt %s -p tensor-parallel | tee %t.named | filecheck %s

// A named pipeline is its passes, in order.
// RUN: stablehlo-tools opt %s -p partition,create-reduce-scatter | diff -u %t.named -

// RUN: not stablehlo-tools opt %s -p 'tensor-parallel{hardware=a100}' 2>&1 | filecheck %s --check-prefix=OPTION
// OPTION: error: pipeline 'tensor-parallel' has no options; list its passes instead

// Columns of the first weight, rows of the second: the product is in parts, summed by one all_reduce.
// CHECK-LABEL: func.func @main
// CHECK: stablehlo.dot_general {{.+}} -> tensor<128x128xf32>
// CHECK: stablehlo.dot_general {{.+}} -> tensor<128x64xf32>
// CHECK: "stablehlo.all_reduce"
// CHECK-NOT: "stablehlo.all_{{reduce|gather}}"
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["model"=2]>
  func.func @main(
      %x: tensor<128x64xf32>,
      %up: tensor<64x256xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"model"}]>},
      %down: tensor<256x64xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"model"}, {}]>})
      -> (tensor<128x64xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
    %0 = stablehlo.dot_general %x, %up, contracting_dims = [1] x [0] : (tensor<128x64xf32>, tensor<64x256xf32>) -> tensor<128x256xf32>
    %1 = stablehlo.tanh %0 : tensor<128x256xf32>
    %2 = stablehlo.dot_general %1, %down, contracting_dims = [1] x [0] : (tensor<128x256xf32>, tensor<256x64xf32>) -> tensor<128x64xf32>
    return %2 : tensor<128x64xf32>
  }
}
