// `-` is standard input, in any form, and standard output is where text goes by default.

// RUN: stablehlo-tools opt %s > %t.mlir
// RUN: stablehlo-tools opt - < %s | diff -u %t.mlir -
// RUN: stablehlo-tools opt %s -o - | diff -u %t.mlir -
// RUN: stablehlo-tools opt %s -o %t.bc
// RUN: stablehlo-tools opt - < %t.bc | diff -u %t.mlir -
// RUN: filecheck %s < %t.mlir

// One command feeds the next.
// RUN: stablehlo-tools opt %s -p thread-tokens | stablehlo-tools opt - -p strip-tokens | diff -u %t.mlir -

// What is no regular file is written straight to.
// RUN: stablehlo-tools opt %s -o /dev/null

// Messages name the stream.
// RUN: echo 'func.func @f( {' | python %{inputs}/expect_refusal.py stablehlo-tools opt - | filecheck %s --check-prefix=NAMED
// NAMED: <stdin>:1:14: error:

// Without a pipeline a module is read, verified and printed.
// CHECK: module {
// CHECK-NEXT: func.func @main(%arg0: tensor<f32>) -> tensor<f32> {
// CHECK-NEXT: return %arg0 : tensor<f32>
func.func @main(%x: tensor<f32>) -> tensor<f32> {
  return %x : tensor<f32>
}
