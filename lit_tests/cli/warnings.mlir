// A warning is one located line on standard error; the command goes on, and exits with 0.
// What would read alike, of two ops on one line of the model, is said once.
// RUN: stablehlo-tools opt %s -p thread-tokens -o %t.mlir 2> %t.err
// RUN: filecheck %s < %t.err
// RUN: filecheck %s --check-prefix=OUTPUT < %t.mlir

// CHECK: model.py:11 in layer (mlp/ppermute): warning: stablehlo.collective_permute: its results are unused
// CHECK-NOT: {{(error|warning|note):}}
// OUTPUT: func.func @main
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
    loc("mlp/ppermute"(callsite("layer"("model.py":11:4) at "main"("train.py":3:0))))
  %1 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[1, 0]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
    loc("mlp/ppermute"(callsite("layer"("model.py":11:4) at "main"("train.py":3:0))))
  return %x : tensor<2xf32>
}
