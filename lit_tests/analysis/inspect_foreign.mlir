// RUN: python %{inputs}/expect_refusal.py stablehlo-tools inspect %s | filecheck %s

// Communication of a dialect that is not understood is refused, never left out of the list.
// CHECK: inspect_foreign.mlir:6:8: error: mhlo.collective_permute communicates in a dialect that cannot be rewritten here
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "mhlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}
