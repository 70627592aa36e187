// All devices take part in a permute, in whatever pairs; those must be the same everywhere.

// RUN: stablehlo-tools check-order --target none %s %s %s | filecheck %s
// RUN: sed 's/dense<\[\[0, 1\], \[1, 2\]\]>/dense<[[1, 2], [0, 1]]>/' %s > %t.listed.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.listed.mlir %s | filecheck %s --check-prefix=LISTED
// LISTED: ordered unless a compiler rewrites
// CHECK: ordered: 3 programs on devices 0 to 2, 6 collectives

// RUN: sed 's/\[1, 2\]/[1, 0]/' %s > %t.pairs.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.pairs.mlir %s > %t.out
// RUN: filecheck %s --check-prefix=PAIRS < %t.out
// PAIRS: mismatch: device 0 issues collective_permute tensor<2xf32> -> tensor<2xf32> pairs [(0, 1), (1, 2)] ({{.*}}permutes.mlir:{{.*}}); its participant device 1 never does ({{.*}}pairs.mlir)
// PAIRS: {{.*}}pairs.mlir issues collective_permute tensor<2xf32> -> tensor<2xf32> pairs [(0, 1), (1, 0)] among [0, 1, 2]

// A device without a pair waits all the same.
// RUN: sed '/^    %back = /,/last$/c %back = stablehlo.negate %moved : tensor<2xf32>' %s > %t.without.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.without.mlir %s > %t.out
// RUN: filecheck %s --check-prefix=WITHOUT < %t.out
// WITHOUT: mismatch: device 0 issues collective_permute {{.*}} pairs [(2, 0)] ({{.*}}); its participant device 1 never does ({{.*}}without.mlir)

// A target, or a source, that is named twice.
// RUN: sed 's/\[1, 2\]/[2, 1]/' %s > %t.twice.mlir
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools check-order --target none %t.twice.mlir | filecheck %s --check-prefix=TARGET
// TARGET: twice.mlir:{{.*}}: error: {{.*}}duplicate targets
// RUN: sed 's/\[1, 2\]/[0, 2]/' %s > %t.source.mlir
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools check-order --target none %t.source.mlir | filecheck %s --check-prefix=SOURCE
// SOURCE: source.mlir:{{.*}}: error: {{.*}}duplicate sources
module attributes {mhlo.num_replicas = 3 : i32, mhlo.num_partitions = 1 : i32} {
  func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
    %moved = "stablehlo.collective_permute"(%x) {
      source_target_pairs = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    %back = "stablehlo.collective_permute"(%moved) {
      source_target_pairs = dense<[[2, 0]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32> // last
    return %back : tensor<2xf32>
  }
}
