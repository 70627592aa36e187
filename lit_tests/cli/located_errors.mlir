// The innermost line of Python is what an error shows, with its notes below it.
// RUN: python %{inputs}/expect_refusal.py --absent %t.mlir stablehlo-tools opt %s -p thread-tokens -o %t.mlir | filecheck %s

// CHECK: model.py:5 in helper (ppermute): error: @helper communicates, is public and is also called
// CHECK-NEXT: train.py:3 in main (call): note: called here
// CHECK-NOT: {{(error|warning|note):}}
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = call @helper(%x) : (tensor<2xf32>) -> tensor<2xf32> loc("call"("main"("train.py":3:0)))
  return %0 : tensor<2xf32>
}

func.func @helper(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
} loc("ppermute"("helper"("model.py":5:0)))
