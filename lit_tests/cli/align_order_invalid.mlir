// Where no order suits all, or a collective is missing, nothing is written and the reason is told.

// In the other program the all_gather is computed first, and the all_reduce from it.
// RUN: rm -rf %t.dir
// RUN: not stablehlo-tools align-order --target none %s %S/Inputs/align_order_otherwise.mlir -o %t.dir > %t.out
// RUN: filecheck %s < %t.out
// RUN: not ls %t.dir
// CHECK: may-deadlock: no order of the collectives suits all programs: one program computes first what another one computes last
// CHECK-NEXT: in {{.*}}align_order_{{.*}}.mlir, {{.*}} is computed from {{.*}}, so it comes after it
// CHECK-NEXT: in {{.*}}align_order_{{.*}}.mlir, {{.*}} is computed from {{.*}}, so it comes after it
// CHECK-NOT: not replayed

// A collective of the first program that the other lacks.
// RUN: sed '/"stablehlo.all_gather"/,/tensor<8xf32>$/d; s/return %g : tensor<8xf32>/return %r : tensor<4xf32>/; s/-> tensor<8xf32> {$/-> tensor<4xf32> {/' %S/Inputs/align_order_base.mlir > %t.less.mlir
// RUN: not stablehlo-tools align-order --target none %S/Inputs/align_order_base.mlir %t.less.mlir -o %t.dir > %t.out
// RUN: filecheck %s --check-prefix=MISSING < %t.out
// RUN: not ls %t.dir
// MISSING: mismatch: device 0 issues all_gather {{.*}}; its participant device 1 never does ({{.*}}less.mlir)
module attributes {mhlo.num_replicas = 2 : i32, mhlo.num_partitions = 1 : i32} {
  func.func @main(%x: tensor<4xf32>) -> tensor<8xf32> {
    %r = "stablehlo.all_reduce"(%x) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
    %g = "stablehlo.all_gather"(%r) {
      all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<4xf32>) -> tensor<8xf32>
    return %g : tensor<8xf32>
  }
}
