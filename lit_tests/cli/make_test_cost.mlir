// With --cost a test also fails where what the pipeline makes costs more than it did.
// RUN: rm -f %t.made.mlir %t.default.mlir
// RUN: stablehlo-tools make-test %s -p thread-tokens --cost=a100 -o %t.made.mlir
// RUN: filecheck %s --check-prefix=MADE --input-file %t.made.mlir
// MADE: {{R}}UN: stablehlo-tools opt %s -p thread-tokens > %t.after.mlir
// MADE: {{R}}UN: stablehlo-tools inspect %t.after.mlir --hardware a100 --at-most exposed_ns={{[1-9][0-9]*}} --at-most bytes=8 --at-most peak_bytes=16
// MADE: Made by: stablehlo-tools make-test make_test_cost.mlir -p thread-tokens --cost=a100

// The bounds hold, and nothing is advised; below them it is said what is above.
// RUN: stablehlo-tools opt %t.made.mlir -p thread-tokens -o %t.after.mlir
// RUN: stablehlo-tools inspect %t.after.mlir --hardware a100 --at-most bytes=8 --at-most peak_bytes=16 | filecheck %s --check-prefix=HOLDS
// HOLDS-NOT: what to do
// RUN: not stablehlo-tools inspect %t.after.mlir --hardware a100 --at-most bytes=7 2>&1 | filecheck %s --check-prefix=ABOVE
// ABOVE: after.mlir, as written: bytes is 8, above the limit 7

// A changed bound is made anew; another input, or none, is refused.
// RUN: sed -i 's/bytes=8/bytes=9/' %t.made.mlir
// RUN: not stablehlo-tools make-test --update --check %t.made.mlir
// RUN: stablehlo-tools make-test --update %t.made.mlir
// RUN: stablehlo-tools make-test --update --check %t.made.mlir
// RUN: not stablehlo-tools make-test %s -p thread-tokens --cost=h1000 -o %t.default.mlir 2>&1 | filecheck %s --check-prefix=UNKNOWN
// UNKNOWN: error:{{.*}}h1000
// RUN: not stablehlo-tools inspect %s --at-most total=1 2>&1 | filecheck %s --check-prefix=FIGURE
// FIGURE: 'total=1' is not FIGURE=NUMBER, with FIGURE one of exposed_ns, bytes, peak_bytes
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %1 = stablehlo.maximum %a, %b : tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}
