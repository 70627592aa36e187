// What the collectives of a program cost, with round figures: a byte of memory takes 1 ns, a byte of
// the network 10 ns, and every collective 500 ns to begin with.

// RUN: stablehlo-tools inspect %s --hardware %{inputs}/round.toml --all | filecheck %s
// RUN: stablehlo-tools inspect %s --hardware %{inputs}/round.toml | filecheck %s --check-prefix=FEW
// RUN: stablehlo-tools inspect %s --hardware %{inputs}/round.toml --json | filecheck %s --check-prefix=JSON

// CHECK: inspect_hardware.mlir, as written, on 2 x Round figures
// CHECK-NEXT: total 81.0 us compute 24.0 us, communication 81.0 us
// CHECK-NEXT: exposed 57.0 us 70 % of the total
// CHECK-NEXT: floor 81.0 us stream net: no order of these tasks is faster; this one takes 1.00 times as long
// CHECK-NEXT: peak 23.4 KiB 0 % of 1.00 GiB

// CHECK: # kind groups axes type bytes times time exposed hidden by hideable place
// CHECK-NEXT: 0 all_gather {0,1} x f32 7.81 KiB 1 40.5 us 32.5 us negate 20 % inspect_hardware.mlir:
// CHECK-NEXT: 1 all_gather {0,1} x f32 7.81 KiB 1 40.5 us 24.5 us add 59 % inspect_hardware.mlir:
// CHECK: reasons why no order hides these whole:
// CHECK-NEXT: #0: only 8.00 us of compute in this program is independent of it
// CHECK-NEXT: #1: only 24.0 us of compute in this program is independent of it

// CHECK: live at the memory peak:
// CHECK-NEXT: 7.81 KiB result 0
// CHECK-NEXT: 7.81 KiB result 1
// CHECK-NEXT: 3.91 KiB argument 0 inspect_hardware.mlir:
// CHECK-NEXT: 3.91 KiB result 2

// FEW: 0 all_gather
// FEW-NEXT: 1 all_gather
// FEW-NEXT: --all also lists loops, kernels and memory at the peak
// FEW-NOT: live at the memory peak

// JSON: "schema": "stablehlo-tools/cost/1"
// JSON: "target": "as written"
// JSON: "exposed_ns": 57000.0
// JSON: "collectives": [
// JSON: "kind": "all_gather"
// JSON: "loops": []
module attributes {mhlo.num_partitions = 2 : i32} {
  sdy.mesh @mesh = <["x"=2]>
  func.func @main(%x: tensor<1000xf32>) -> (tensor<2000xf32>, tensor<2000xf32>, tensor<1000xf32>) {
    %0 = "stablehlo.all_gather"(%x) {
      all_gather_dim = 0 : i64,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids
    } : (tensor<1000xf32>) -> tensor<2000xf32>
    %1 = "stablehlo.all_gather"(%x) {
      all_gather_dim = 0 : i64,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids
    } : (tensor<1000xf32>) -> tensor<2000xf32>
    %2 = stablehlo.negate %x : tensor<1000xf32>
    %3 = stablehlo.add %0, %0 : tensor<2000xf32>
    return %3, %1, %2 : tensor<2000xf32>, tensor<2000xf32>, tensor<1000xf32>
  }
}
