// RUN: stablehlo-tools opt %s -p 'rematerialize{memory-limit=0}' --verify-diagnostics
// RUN: not stablehlo-tools opt %s -p 'rematerialize{margin=1.0}' 2>&1 | filecheck %s

// P1: a limit is positive, and a margin leaves something of it.
// expected-error@+2 {{rematerialize: memory-limit must be a positive number of GiB (P1)}}
// CHECK: error: rematerialize: margin must be at least 0 and less than 1 (P1)
func.func @limit_p1(%x: tensor<4x4xf32>) -> tensor<4x4xf32> {
  return %x : tensor<4x4xf32>
}
