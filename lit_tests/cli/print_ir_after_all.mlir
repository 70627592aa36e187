// The module after each pass, on standard error; standard output stays the result alone.
// RUN: stablehlo-tools opt %s -p 'symbol-dce,thread-tokens{minimal},strip-tokens' --print-ir-after-all > %t.out 2> %t.err
// RUN: filecheck %s < %t.err
// RUN: stablehlo-tools opt %s -p symbol-dce | diff -u %t.out -

// CHECK: // -----// IR after symbol-dce //----- //
// CHECK-NEXT: module {
// CHECK-NOT: @unused
// CHECK-NOT: token_link
// CHECK: // -----// IR after thread-tokens{minimal} //----- //
// CHECK-NEXT: module {
// CHECK: token_link
// CHECK: // -----// IR after strip-tokens //----- //
// CHECK-NEXT: module {
// CHECK-NOT: token_link

// The pass that fails is not among them.
// RUN: not stablehlo-tools opt %s -p 'cse,stablehlo-refine-arguments{types=tensor<3xf32>}' --print-ir-after-all 2>&1 \
// RUN:   | filecheck %s --check-prefix=FAILED
// FAILED: IR after cse
// FAILED-NOT: IR after
// FAILED: error: stablehlo-refine-arguments:
func.func @main(%x: tensor<2xf32>, %y: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %1 = "stablehlo.collective_permute"(%y) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0, %1 : tensor<2xf32>, tensor<2xf32>
}

func.func private @unused(%x: tensor<2xf32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
}
