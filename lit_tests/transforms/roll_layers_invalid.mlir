// RUN: stablehlo-tools opt %s -p roll-layers --split-input-file --verify-diagnostics

// P1: tokens order what is to become a loop.
func.func @token_p1(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error@+1 {{stablehlo.after_all has a token, and tokens fix an order that roll-layers changes: run roll-layers before thread-tokens, or strip-tokens first (P1)}}
  %t = stablehlo.after_all : !stablehlo.token
  return %x : tensor<4xf32>
}
