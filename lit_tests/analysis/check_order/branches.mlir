// Devices 0 and 1 take one branch, 2 and 3 the other; the groups are those pairs.

// RUN: stablehlo-tools check-order --target none %s | filecheck %s
// RUN: stablehlo-tools check-order --target none %s %s %s %s | filecheck %s --check-prefix=APART
// CHECK: ordered: 1 program on devices 0 to 3, 2 collectives
// CHECK-NEXT: one program, compiled once: every device issues in the same order
// CHECK-NEXT: all participants inside a loop or branch decide it the same way
// APART: ordered: 4 programs on devices 0 to 3, 4 collectives

// RUN: stablehlo-tools check-order --target none %s --json | filecheck %s --check-prefix=JSON
// JSON: "step": "uniform-control-flow"
// JSON: "known": true

// Groups that the branches divide.
// RUN: sed 's/\[\[0, 1\], \[2, 3\]\]/[[0, 2], [1, 3]]/' %s > %t.across.mlir
// RUN: not stablehlo-tools check-order --target none %t.across.mlir > %t.out
// RUN: filecheck %s --check-prefix=ACROSS < %t.out
// ACROSS: may-deadlock: all_gather at {{.*}}across.mlir:{{.*}} is inside a branch at {{.*}}across.mlir:{{.*}}, and the branch to take differs between its participants 0 and 2
// ACROSS-NEXT: device 0 takes branch 0
// ACROSS-NEXT: device 2 takes branch 1

// A case on the same index, computed otherwise.
// RUN: stablehlo-tools check-order --target none %S/Inputs/case.mlir | filecheck %s --check-prefix=CASE
// RUN: sed 's/\[\[0, 1\], \[2, 3\]\]/[[0, 2], [1, 3]]/' %S/Inputs/case.mlir > %t.case.mlir
// RUN: not stablehlo-tools check-order --target none %t.case.mlir > %t.out
// RUN: filecheck %s --check-prefix=DIVIDED < %t.out
// CASE: ordered: 1 program on devices 0 to 3, 1 collective
// DIVIDED: may-deadlock: all_gather at {{.*}}case.mlir:{{.*}} is inside a branch
module attributes {mhlo.num_replicas = 1 : i32, mhlo.num_partitions = 4 : i32} {
  func.func @main(%x: tensor<2xf32>) -> tensor<4xf32> {
    %id = stablehlo.partition_id : tensor<ui32>
    %two = stablehlo.constant dense<2> : tensor<ui32>
    %low = stablehlo.compare LT, %id, %two : (tensor<ui32>, tensor<ui32>) -> tensor<i1>
    %y = "stablehlo.if"(%low) ({
      %g = "stablehlo.all_gather"(%x) {
        all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>,
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, use_global_device_ids
      } : (tensor<2xf32>) -> tensor<4xf32>
      stablehlo.return %g : tensor<4xf32>
    }, {
      %z = stablehlo.negate %x : tensor<2xf32>
      %g = "stablehlo.all_gather"(%z) {
        all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>,
        channel_handle = #stablehlo.channel_handle<handle = 2, type = 0>, use_global_device_ids
      } : (tensor<2xf32>) -> tensor<4xf32>
      stablehlo.return %g : tensor<4xf32>
    }) : (tensor<i1>) -> tensor<4xf32>
    return %y : tensor<4xf32>
  }
}
