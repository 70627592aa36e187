// RUN: stablehlo-tools opt %s -p 'rematerialize{hardware=tpu-v5p offload}' --verify-diagnostics

// P4: with `offload`, how fast the link to the host copies is known.
// expected-error@+1 {{rematerialize: the profile 'tpu-v5p' has no [host] section with the speed of its link to the host (P4)}}
func.func @profile_p4(%x: tensor<4x4xf32>) -> tensor<4x4xf32> {
  return %x : tensor<4x4xf32>
}
