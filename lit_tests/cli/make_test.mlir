// What a pipeline makes of a module becomes a test: it passes, and not on the module as it was.
// RUN: rm -f %t.made.mlir %t.again.mlir
// RUN: stablehlo-tools make-test %s -p thread-tokens -o %t.made.mlir
// RUN: filecheck %s --check-prefix=MADE --input-file %t.made.mlir
// RUN: stablehlo-tools opt %t.made.mlir -p thread-tokens > %t.after.mlir
// RUN: filecheck %t.made.mlir < %t.after.mlir
// RUN: stablehlo-tools opt %t.made.mlir > %t.before.mlir
// RUN: not filecheck %t.made.mlir < %t.before.mlir

// Made twice it is the same.
// RUN: cp %t.made.mlir %t.first
// RUN: stablehlo-tools make-test %s -p thread-tokens -o %t.made.mlir
// RUN: cmp %t.first %t.made.mlir

// From bytecode too, but for the name of the input.
// RUN: stablehlo-tools opt %s -o %t.mlirbc
// RUN: rm -f %t.bytecode.mlir
// RUN: stablehlo-tools make-test %t.mlirbc -p thread-tokens -o %t.bytecode.mlir
// RUN: grep CHECK %t.made.mlir > %t.checks
// RUN: grep CHECK %t.bytecode.mlir | diff -u %t.checks -

// Values are named after their ops, and function names are captured. The reduction is checked by its
// name, other ops are not.
// MADE: {{^}}// {{R}}UN: stablehlo-tools opt %s -p thread-tokens > %t.after.mlir
// MADE: {{^}}// Made by: stablehlo-tools make-test make_test.mlir -p thread-tokens
// MADE: {{^}}// After a wanted change: stablehlo-tools make-test --update {{.*}}make_test.mlir.tmp.made.mlir
// MADE: COUNT: : 1 communicating ops on 1 x 2
// MADE: CHECK-LABEL: func.func @main(
// MADE{LITERAL}: CHECK-SAME: %{{[^ ,)]+}}: tensor<2xf32>) -> tensor<2xf32>
// MADE{LITERAL}: CHECK: %[[AFTER_ALL:[^ ,)]+]] = stablehlo.after_all
// MADE{LITERAL}: CHECK-NEXT: %[[CALL:[^ ,)]+]]:2 = call @[[SUMMED:[^ ,)]+]](%{{[^ ,)]+}}, %[[AFTER_ALL]])
// MADE{LITERAL}: CHECK-NEXT: return %[[CALL]]#0 :
// MADE{LITERAL}: CHECK: func.func private @[[SUMMED]](%[[ARG:[^ ,)]+]]: tensor<2xf32>,
// MADE{LITERAL}: CHECK-NEXT: %[[BARRIER:[^ ,)]+]]:2 = stablehlo.optimization_barrier
// MADE{LITERAL}: CHECK-NEXT: %[[ALL_REDUCE:[^ ,)]+]] = "stablehlo.all_reduce"(%[[BARRIER]]#0)
// MADE{LITERAL}: <{channel_handle{{.+}}type = 1>,
// MADE{LITERAL}: replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
// MADE: CHECK: stablehlo.maximum{{$}}
// MADE-NEXT: CHECK: }) : (tensor<2xf32>) -> tensor<2xf32>
// MADE-NOT: negate

// What the test does not need has gone: the unused function, the attribute, the constant's numbers.
// MADE: {{^}}module {
// MADE-NEXT: func.func @main(%arg0: tensor<2xf32>) -> tensor<2xf32> {
// MADE: stablehlo.constant dense<0> : tensor<32xi32>
// MADE: stablehlo.negate
// MADE: func.func private @summed_3
// MADE-NOT: @unused
func.func @main(%x: tensor<2xf32>) -> (tensor<2xf32> {jax.result_info = "result"}) {
  %c = stablehlo.constant dense<[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32]> : tensor<32xi32>
  %0 = stablehlo.negate %x : tensor<2xf32>
  %1 = call @summed_3(%0) : (tensor<2xf32>) -> tensor<2xf32>
  return %1 : tensor<2xf32>
}

func.func private @summed_3(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %1 = stablehlo.maximum %a, %b : tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }) {
    channel_handle = #stablehlo.channel_handle<handle = 5, type = 1>,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
    use_global_device_ids
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

func.func private @unused(%x: tensor<2xf32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
}
