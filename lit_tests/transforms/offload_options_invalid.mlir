// RUN: stablehlo-tools opt %s -p 'offload{memory-limit=0}' --verify-diagnostics
// RUN: not stablehlo-tools opt %s -p 'offload{margin=1.0}' 2>&1 | filecheck %s

// P1: a limit is positive, and a margin leaves something of it.
// expected-error@+2 {{offload: memory-limit must be a positive number of GiB (P1)}}
// CHECK: error: offload: margin must be at least 0 and less than 1 (P1)
func.func @options_p1(%x: tensor<4x4xf32>) -> tensor<4x4xf32> {
  return %x : tensor<4x4xf32>
}
