// RUN: stablehlo-tools inspect %s | filecheck %s
// RUN: stablehlo-tools opt %s -o %t.mlirbc
// RUN: stablehlo-tools inspect %t.mlirbc | filecheck %s
// RUN: stablehlo-tools inspect - < %t.mlirbc | filecheck %s --check-prefix=STDIN

// A place is the innermost line of Python, its function, and the name that JAX gave the op.

// STDIN: <stdin>: 4 communicating ops
// CHECK: 4 communicating ops
module attributes {mhlo.num_replicas = 2 : i32} {
  func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
    // CHECK: collective_permute {{.*}} model.py:11 in layer (mlp/ppermute)
    %0 = "stablehlo.collective_permute"(%x) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
      loc("mlp/ppermute"(callsite("layer"("model.py":11:4 to :20) at "main"("train.py":3:0))))

    // CHECK: collective_permute {{.*}} other.py:7
    %1 = "stablehlo.collective_permute"(%0) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32> loc("other.py":7:1)

    // Fused: the first that says anything.
    // CHECK: collective_permute {{.*}} third.py:8 in step
    %2 = "stablehlo.collective_permute"(%1) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32> loc(fused[unknown, "step"("third.py":8:1), "fourth.py":9:1])

    // CHECK: collective_permute {{.*}} (only a name)
    %3 = "stablehlo.collective_permute"(%2) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32> loc("only a name")
    return %3 : tensor<2xf32>
  }
}
