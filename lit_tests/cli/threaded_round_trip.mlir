// The marks of a chain survive the binary forms: it can be stripped, or replaced, after them.

// RUN: stablehlo-tools opt %s > %t.before
// RUN: stablehlo-tools opt %s -p thread-tokens -o %t.bc
// RUN: stablehlo-tools opt %t.bc | filecheck %s
// RUN: stablehlo-tools opt %t.bc -p strip-tokens | diff -u %t.before -
// RUN: stablehlo-tools opt %s -p 'thread-tokens{form=composite}' -o %t.mlirbc
// RUN: stablehlo-tools opt %t.mlirbc -p strip-tokens | diff -u %t.before -

// CHECK: stablehlo.while{{.*}}stablehlo_tools.tokens_carried = 1
// CHECK: stablehlo.optimization_barrier {stablehlo_tools.token_link}
func.func @main(%p: tensor<i1>, %x: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.while(%v = %x) : tensor<f32>
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %1 = "stablehlo.collective_permute"(%v) {
        source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
      } : (tensor<f32>) -> tensor<f32>
      stablehlo.return %1 : tensor<f32>
    }
  return %0 : tensor<f32>
}
