// XLA deletes a collective whose results nobody uses: the one here, but not the one of the other.

// RUN: sed 's/return %x/return %moved/' %s > %t.used.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.used.mlir > %t.out
// RUN: filecheck %s < %t.out
// RUN: not stablehlo-tools check-order --target none %s %t.used.mlir --json | filecheck %s --check-prefix=JSON
// RUN: stablehlo-tools check-order --target none %s %s | filecheck %s --check-prefix=NEITHER
// RUN: stablehlo-tools check-order --target none %t.used.mlir %t.used.mlir | filecheck %s --check-prefix=BOTH

// CHECK: mismatch: device 1 issues collective_permute tensor<2xf32> -> tensor<2xf32> pairs [(0, 1)] ({{.*}}used.mlir:[[PLACE:[0-9]+]]:{{[0-9]+}}); its participant device 0 never does ({{.*}}dead_collective.mlir)
// CHECK-NEXT: device 1 waits in collective_permute for device 0 for ever
// CHECK-NEXT: {{.*}}dead_collective.mlir has it ({{.*}}dead_collective.mlir:[[PLACE]]:{{[0-9]+}}), but nothing reads its results: XLA deletes it
// JSON: "deleted": [
// JSON-NEXT: dead_collective.mlir:
// JSON: "rule": "dead-collective"
// NEITHER: ordered: 2 programs on devices 0 and 1, 0 collectives
// BOTH: ordered: 2 programs on devices 0 and 1, 2 collectives

// A token keeps nothing alive.
// RUN: stablehlo-tools opt %s -p thread-tokens -o %t.threaded.mlir 2> %t.warning
// RUN: not stablehlo-tools check-order --target none %t.threaded.mlir %t.used.mlir --json | filecheck %s --check-prefix=THREADED
// THREADED: "rule": "dead-collective"
module attributes {mhlo.num_replicas = 2 : i32, mhlo.num_partitions = 1 : i32} {
  func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
    %moved = "stablehlo.collective_permute"(%x) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    return %x : tensor<2xf32>
  }
}
