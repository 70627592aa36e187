// RUN: stablehlo-tools opt %s -p 'offload{hardware=tpu-v5p}' --verify-diagnostics

// P2: how fast the link to the host copies is known.
// expected-error@+1 {{offload: the profile 'tpu-v5p' has no [host] section with the speed of its link to the host (P2)}}
func.func @profile_p2(%x: tensor<4x4xf32>) -> tensor<4x4xf32> {
  return %x : tensor<4x4xf32>
}
