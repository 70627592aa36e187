// RUN: not stablehlo-tools opt %s -p "offload{memory-limit=0}" 2>&1 | filecheck %s --check-prefix=LIMIT
// RUN: not stablehlo-tools opt %s -p "offload{margin=1.0}" 2>&1 | filecheck %s --check-prefix=MARGIN
// RUN: stablehlo-tools opt %s -p "offload{hardware=tpu-v5p}" --verify-diagnostics
// RUN: not stablehlo-tools opt %s -p "rematerialize{hardware=tpu-v5p offload}" 2>&1 | filecheck %s --check-prefix=REMATERIALIZE

// P1: a limit is positive, and a margin leaves something of it. P2: the link to the host is known.
// LIMIT: error: offload: memory-limit is a positive number of GiB (P1)
// MARGIN: error: offload: margin is at least 0 and less than 1 (P1)
// REMATERIALIZE: error: rematerialize: the profile 'tpu-v5p' has no [host]: how fast its link to the host copies is not known (P4)
// expected-error@+1 {{offload: the profile 'tpu-v5p' has no [host]: how fast its link to the host copies is not known (P2)}}
func.func @options_p1_p2(%x: tensor<4x4xf32>) -> tensor<4x4xf32> {
  return %x : tensor<4x4xf32>
}
