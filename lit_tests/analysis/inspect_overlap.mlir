// RUN: python %{inputs}/expect_refusal.py stablehlo-tools inspect %s | filecheck %s
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools inspect %s --json | filecheck %s

// Groups that overlap, in an op that MLIR does not verify.
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  // CHECK: inspect_overlap.mlir:7:8: error: stablehlo.cross-replica-sum: replica groups overlap: an id appears in two of them
  %0 = "stablehlo.cross-replica-sum"(%x) {
    replica_groups = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}
