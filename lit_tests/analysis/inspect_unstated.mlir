// A collective among all replicas, of which the module does not say how many: two, the fewest.
// RUN: stablehlo-tools inspect %s | filecheck %s
// RUN: stablehlo-tools inspect %s --json | filecheck %s --check-prefix=JSON

// CHECK: inspect_unstated.mlir: 1 communicating ops on 2 x 1 (replicas x partitions)
// CHECK: all_reduce {0,1} f32
// CHECK: note: the program does not state its number of replicas
// JSON: "replicas": 2,
// JSON: "partitions": 1,
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = "stablehlo.all_reduce"(%x) <{replica_groups = dense<> : tensor<0x0xi64>}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %s = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
