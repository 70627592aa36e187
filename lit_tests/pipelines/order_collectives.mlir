// RUN: stablehlo-tools opt %s -p order-collectives | tee %t.named | filecheck %s

// A named pipeline is its passes, in order.
// RUN: stablehlo-tools opt %s -p symbol-dce,thread-tokens | diff -u %t.named -

// It stands among other passes like a pass.
// RUN: stablehlo-tools opt %s -p symbol-dce > %t.before
// RUN: stablehlo-tools opt %s -p order-collectives,strip-tokens | diff -u %t.before -

// A second run changes nothing.
// RUN: stablehlo-tools opt %t.named -p order-collectives | diff -u %t.named -

// Functions that nobody calls are gone before the chain is threaded, and so is the warning that
// nobody uses their collectives.
// RUN: stablehlo-tools opt %s -p order-collectives 2>&1 | filecheck %s --check-prefix=SILENT
// RUN: stablehlo-tools opt %s -p thread-tokens 2>&1 | filecheck %s --check-prefix=WARNED
// SILENT-NOT: warning
// SILENT: func.func @main
// WARNED: warning: stablehlo.collective_permute: its results are unused

// CHECK-LABEL: func.func @main
// CHECK: stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: call @used
// CHECK-NOT: @unused
// CHECK: func.func private @used
// CHECK-SAME: !stablehlo.token
// CHECK-NOT: @unused
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = call @used(%x) : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

func.func private @unused(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

func.func private @used(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}
