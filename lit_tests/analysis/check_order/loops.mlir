// A loop of three iterations, each of which depends on the one before.

// RUN: stablehlo-tools check-order --target none %s %s | filecheck %s
// CHECK: ordered: 2 programs on devices 0 and 1, 2 collectives
// CHECK: run once in text order, all 1 meetings take place

// It is matched without running it: a thousand million iterations take no time.
// RUN: sed 's/dense<3>/dense<1000000000>/' %s > %t.long.mlir
// RUN: timeout 20 stablehlo-tools check-order --target none %t.long.mlir %t.long.mlir | filecheck %s

// Another number of iterations.
// RUN: sed 's/dense<3>/dense<4>/' %s > %t.four.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.four.mlir > %t.out
// RUN: filecheck %s --check-prefix=FOUR < %t.out
// FOUR: mismatch: device 1 issues collective_permute {{.*}} 4 times ({{.*}}four.mlir:{{.*}}); its participant device 0 does 3 times ({{.*}}loops.mlir)

// A loop that never runs, and one that counts down.
// RUN: sed 's/dense<3>/dense<0>/' %s > %t.never.mlir
// RUN: stablehlo-tools check-order --target none %t.never.mlir %t.never.mlir | filecheck %s --check-prefix=NEVER
// NEVER: ordered: 2 programs
// RUN: sed 's/LT, %i, %n/GT, %i, %n/; s/dense<3>/dense<-3>/; s/stablehlo.add %i/stablehlo.subtract %i/' %s > %t.down.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.down.mlir | filecheck %s --check-prefix=OPEN
// OPEN: ordered unless a compiler rewrites

// The same without a loop.
// RUN: not stablehlo-tools check-order --target none %s %S/Inputs/unrolled.mlir | filecheck %s --check-prefix=OPEN
// RUN: not stablehlo-tools check-order --target none %t.four.mlir %S/Inputs/unrolled.mlir > %t.out
// RUN: filecheck %s --check-prefix=UNLIKE < %t.out
// UNLIKE: mismatch: device 0 issues collective_permute {{.*}} 4 times {{.*}}; its participant device 1 does 3 times

// Iterations that do not depend on each other: a compiler that unrolls them may turn them round.
// RUN: sed 's/"stablehlo.collective_permute"(%v)/"stablehlo.collective_permute"(%x)/; s/return %next, %moved/return %next, %added/' %s > %t.loose.mlir
// RUN: not stablehlo-tools check-order --target none %t.loose.mlir %t.loose.mlir > %t.out
// RUN: filecheck %s --check-prefix=LOOSE < %t.out
// RUN: stablehlo-tools check-order --target none %t.loose.mlir | filecheck %s --check-prefix=ONCE
// RUN: stablehlo-tools opt %t.loose.mlir -p thread-tokens -o %t.tied.mlir
// RUN: stablehlo-tools check-order --target none %t.tied.mlir %t.tied.mlir | filecheck %s
// LOOSE: may-deadlock: nothing orders the iterations of the loop at {{.*}}loose.mlir:{{.*}}: a compiler that unrolls it may let them overlap, {{.*}}and devices 0 and 1 are compiled separately
// LOOSE: not replayed: this may be a false alarm (see the page of check-order)
// ONCE: ordered: 1 program on devices 0 and 1, 1 collective
module attributes {mhlo.num_replicas = 2 : i32, mhlo.num_partitions = 1 : i32} {
  func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %w:2 = stablehlo.while(%i = %zero, %v = %x) : tensor<i32>, tensor<2xf32> cond {
      %n = stablehlo.constant dense<3> : tensor<i32>
      %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %one = stablehlo.constant dense<1> : tensor<i32>
      %next = stablehlo.add %i, %one : tensor<i32>
      %moved = "stablehlo.collective_permute"(%v) {
        source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
      } : (tensor<2xf32>) -> tensor<2xf32>
      %added = stablehlo.add %v, %moved : tensor<2xf32>
      stablehlo.return %next, %moved : tensor<i32>, tensor<2xf32>
    }
    return %w#1 : tensor<2xf32>
  }
}
