// RUN: stablehlo-tools check-order --target none %s | filecheck %s

// A loop may carry nothing, and run until the program is ended.
// CHECK: ordered: 1 program on devices 0 and 1,
module attributes {mhlo.num_replicas = 2 : i32} {
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  stablehlo.while() cond {
    %c = stablehlo.constant dense<true> : tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %0 = "stablehlo.all_reduce"(%x) <{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) : (tensor<8xf32>) -> tensor<8xf32>
    stablehlo.return
  }
  return %x : tensor<8xf32>
}
}
