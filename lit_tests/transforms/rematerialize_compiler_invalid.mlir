// RUN: stablehlo-tools opt %s -p 'rematerialize{hardware=h100 compiler=tpu}' --verify-diagnostics
// RUN: not stablehlo-tools opt %s -p 'rematerialize{compiler=cpu}' 2>&1 | filecheck %s

// P5: the profile is of a device that the compiler is for.
// expected-error@+2 {{rematerialize: compiler=tpu:}}
// CHECK: compiler
func.func @compiler_p5(%x: tensor<4x4xf32>) -> tensor<4x4xf32> {
  return %x : tensor<4x4xf32>
}
