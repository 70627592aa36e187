// A collective that another program waits for and nobody here uses is given a use: the smallest
// value that is returned depends on it, and keeps its bits.

// RUN: sed 's/return %y, %x/return %kept, %x/' %s > %t.used.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.used.mlir > %t.out
// RUN: filecheck %s --check-prefix=BEFORE < %t.out
// RUN: rm -rf %t.dir && stablehlo-tools align-order --target none %s %t.used.mlir -o %t.dir 2> %t.warning
// RUN: filecheck %s --check-prefix=WARNING < %t.warning
// RUN: filecheck %s < %t.dir/align_order_keep_alive.mlir
// BEFORE: mismatch: {{.*}} its participant device 0 never does
// WARNING: align_order_keep_alive.mlir:{{[0-9]+:[0-9]+}}: warning: stablehlo.all_reduce: others wait for it, so a returned value now uses it

// CHECK: func.func @main(%[[X:.+]]: tensor<4xf32>, %[[Y:.+]]: tensor<bf16>)
// CHECK: %[[REDUCE:.+]] = "stablehlo.all_reduce"
// CHECK: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[REDUCE]], %{{.+}}
// CHECK: stablehlo.convert %{{.+}} : (tensor<f32>) -> tensor<bf16>
// CHECK-NEXT: %[[FIRST:.+]] = stablehlo.slice %[[OUT]]#0 [0:1] : (tensor<4xf32>) -> tensor<1xf32>
// CHECK-NEXT: %[[ELEMENT:.+]] = stablehlo.reshape %[[FIRST]]
// CHECK-NEXT: %[[BITS:.+]] = stablehlo.bitcast_convert %[[ELEMENT]] : (tensor<f32>) -> tensor<ui32>
// CHECK: %[[LOW:.+]] = stablehlo.and %[[BITS]], %{{.+}} : tensor<ui32>
// CHECK: %[[TRUE:.+]] = stablehlo.compare LT, %[[LOW]], %{{.+}}
// CHECK: %[[KEPT:.+]] = stablehlo.select %[[TRUE]], %[[Y]], %{{.+}} : tensor<i1>, tensor<bf16>
// CHECK: return %[[KEPT]], %[[X]] : tensor<bf16>, tensor<4xf32>

// In a loop there is nothing beside it that is returned.
// RUN: sed 's/return %y, %x/return %kept, %x/' %S/Inputs/align_order_in_a_loop.mlir > %t.other.mlir
// RUN: rm -rf %t.none
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools align-order --target none %S/Inputs/align_order_in_a_loop.mlir %t.other.mlir -o %t.none \
// RUN:   | filecheck %s --check-prefix=LOOP
// RUN: not ls %t.none
// LOOP: align_order_in_a_loop.mlir:{{[0-9]+:[0-9]+}}: error: stablehlo.all_gather: its results are unused, and no returned value can be made to use them: it is in a loop or branch, or has no element
module attributes {mhlo.num_replicas = 2 : i32, mhlo.num_partitions = 1 : i32} {
  func.func @main(%x: tensor<4xf32>, %y: tensor<bf16>) -> (tensor<bf16>, tensor<4xf32>) {
    %r = "stablehlo.all_reduce"(%x) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
    %first = stablehlo.slice %r [0:1] : (tensor<4xf32>) -> tensor<1xf32>
    %one = stablehlo.reshape %first : (tensor<1xf32>) -> tensor<f32>
    %kept = stablehlo.convert %one : (tensor<f32>) -> tensor<bf16>
    return %y, %x : tensor<bf16>, tensor<4xf32>
  }
}
