// What a pipeline refuses becomes a test of the diagnostic, where it stands in the simpler module.
// RUN: rm -f %t.*
// RUN: sed -e 's/^  %%3:2 = .*/  %%3 = stablehlo.negate %%2 {stablehlo_tools.token_link} : tensor<4xf32>/; s/%%3#0/%%3/' %s > %t.broken.mlir
// RUN: stablehlo-tools make-test %t.broken.mlir -p strip-tokens -o %t.refused.mlir
// RUN: filecheck %s --check-prefix=REFUSED --input-file %t.refused.mlir
// RUN: stablehlo-tools opt %t.refused.mlir -p strip-tokens --verify-diagnostics
// REFUSED: {{R}}UN: stablehlo-tools opt %s -p strip-tokens --verify-diagnostics{{$}}
// REFUSED-NOT: {{C}}HECK
// REFUSED: {{^}}    // {{e}}xpected-error@+1 {{[{][{]}}stablehlo.negate is marked as a link of the chain but is not one
// REFUSED-NEXT: stablehlo.negate

// What it leaves alone becomes a test that nothing changes.
// RUN: stablehlo-tools make-test %s -p thread-tokens -o %t.unchanged.mlir
// RUN: filecheck %s --check-prefix=UNCHANGED --input-file %t.unchanged.mlir
// UNCHANGED: {{R}}UN: stablehlo-tools opt %s > %t.before
// UNCHANGED-NEXT: {{R}}UN: stablehlo-tools opt %s -p thread-tokens > %t.after
// UNCHANGED-NEXT: {{R}}UN: diff -u %t.before %t.after
// UNCHANGED-NOT: {{C}}HECK

// What it warns of is expected, too, and the output is checked all the same.
// RUN: sed -e 's/{stablehlo_tools.token_link}//; s/return %%3#0 : tensor<4xf32>/return %%x : tensor<2xf32>/; s/) -> tensor<4xf32> {/) -> tensor<2xf32> {/' %s > %t.unused.mlir
// RUN: stablehlo-tools make-test %t.unused.mlir -p thread-tokens -o %t.warned.mlir
// RUN: filecheck %s --check-prefix=WARNED --input-file %t.warned.mlir
// RUN: stablehlo-tools opt %t.warned.mlir -p thread-tokens --verify-diagnostics | filecheck %t.warned.mlir
// WARNED: {{R}}UN: stablehlo-tools opt %s -p thread-tokens --verify-diagnostics | filecheck %s
// WARNED: {{e}}xpected-warning@+1 {{[{][{]}}stablehlo.all_gather: its results are unused
func.func @chained(%x: tensor<2xf32>) -> tensor<4xf32> {
  %token = stablehlo.after_all {stablehlo_tools.token_link} : !stablehlo.token
  %1:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %x, %token : tensor<2xf32>, !stablehlo.token
  %2 = "stablehlo.all_gather"(%1#0) {
    all_gather_dim = 0 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<4xf32>
  %3:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %2, %1#1 : tensor<4xf32>, !stablehlo.token
  return %3#0 : tensor<4xf32>
}
