// An output file is written whole or not at all, and where its name leads.

// An old file is replaced; its permissions stay.
// RUN: echo old > %t.mlir
// RUN: chmod 640 %t.mlir
// RUN: stablehlo-tools opt %s -o %t.mlir
// RUN: filecheck %s < %t.mlir
// RUN: python -c "import os, sys; print(oct(os.stat(sys.argv[1]).st_mode & 0o777))" %t.mlir | filecheck %s --check-prefix=MODE
// MODE: 0o640

// A link is followed, not replaced.
// RUN: rm -f %t.link.mlir
// RUN: ln -s %t.mlir %t.link.mlir
// RUN: stablehlo-tools opt %s -p 'thread-tokens' -o %t.link.mlir
// RUN: test -L %t.link.mlir
// RUN: filecheck %s --check-prefix=THREADED < %t.mlir

// A file may be its own output.
// RUN: stablehlo-tools opt %t.mlir -p strip-tokens -o %t.mlir
// RUN: filecheck %s < %t.mlir

// A refused input leaves an old output as it was.
// RUN: echo 'not MLIR' > %t.bad
// RUN: cp %t.mlir %t.copy
// RUN: not stablehlo-tools opt %t.bad -o %t.mlir
// RUN: cmp %t.mlir %t.copy

// CHECK: func.func @main
// CHECK-NOT: token
// THREADED: stablehlo_tools.token_link
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}
