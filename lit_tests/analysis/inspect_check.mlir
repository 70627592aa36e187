// inspect says what to do, and with --check exits with 1 where that gains enough.
// RUN: not stablehlo-tools inspect --check %s | filecheck %s
// RUN: not stablehlo-tools inspect %s --check=5 --json | filecheck %s --check-prefix=JSON
// RUN: stablehlo-tools inspect %s --check 60 | filecheck %s --check-prefix=NOTHING
// RUN: stablehlo-tools inspect %s --hardware h100 | filecheck %s
// RUN: not stablehlo-tools inspect %s --check=few 2>&1 | filecheck %s --check-prefix=NUMBER
// RUN: not stablehlo-tools inspect --check 2>&1 | filecheck %s --check-prefix=INPUT

// CHECK: what to do, each by itself, of the {{.*}} left after a compiler orders the ops:
// CHECK-NEXT: 1. {{.*}} %: 1 all_reduce of 64.0 MiB in f32, {{.*}} in all; their values were bf16 just before
// CHECK-NEXT: at {{.*}}inspect_check.mlir:{{[0-9]+}}
// JSON: "ordered_ns":
// JSON: "advice": [
// JSON: "id": "wide-reduction",
// JSON-NEXT: "gain_ns":
// JSON-NEXT: "gain_bytes": 0.0,
// JSON-NEXT: "share": 0.3
// JSON-NEXT: "cause":
// JSON-NEXT: "place":
// JSON-NEXT: "remedy":
// JSON-NEXT: "pipeline": null
// NOTHING: no pass or change alone gains more than 60 %
// NUMBER: error: --check few: PERCENT must be a number, 0 or more
// INPUT: error: inspect needs an INPUT
func.func @main(%x: tensor<4096x4096xbf16>) -> tensor<4096x4096xf32> {
  %0 = stablehlo.convert %x : (tensor<4096x4096xbf16>) -> tensor<4096x4096xf32>
  %1 = "stablehlo.all_reduce"(%0) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %2 = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %2 : tensor<f32>
  }) {replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4096x4096xf32>) -> tensor<4096x4096xf32>
  return %1 : tensor<4096x4096xf32>
}
