// The C++ passes that MLIR has registered run by their names, among those of the toolkit.

// On a module.
// RUN: stablehlo-tools opt %s -p symbol-dce | filecheck %s --check-prefix=MODULE
// MODULE: func.func @main
// MODULE-NOT: @unused

// On each function, where the pass was made for functions.
// RUN: stablehlo-tools opt %s -p chlo-legalize-to-stablehlo | filecheck %s --check-prefix=FUNCTION
// FUNCTION: func.func @main
// FUNCTION-NOT: chlo.
// FUNCTION: func.func private @unused
// FUNCTION-NOT: chlo.

// With options, in the order given; one of them is a list of types.
// RUN: stablehlo-tools opt %s -p 'canonicalize{top-down=false max-iterations=1},chlo-legalize-to-stablehlo' \
// RUN:   | filecheck %s --check-prefix=FUNCTION
// RUN: stablehlo-tools opt %s -p 'symbol-dce,stablehlo-refine-arguments{types=tensor<2xf32>}' | filecheck %s

// Among passes of the toolkit, in order: the chain comes last and so nothing is left to strip it.
// RUN: stablehlo-tools opt %s -p 'thread-tokens,strip-tokens,symbol-dce,thread-tokens' | filecheck %s --check-prefix=MIXED
// MIXED: stablehlo_tools.token_link
// MIXED-NOT: @unused

// What a C++ pass refuses is located like anything else, and led by the name of the pass.
// RUN: python %{inputs}/expect_refusal.py --absent %t.mlir stablehlo-tools opt %s \
// RUN:   -p 'stablehlo-refine-arguments{types=tensor<3xf32>}' -o %t.mlir | filecheck %s --check-prefix=REFUSED
// REFUSED: cxx_passes.mlir:[[LINE:[0-9]+]]:1: error: stablehlo-refine-arguments: 'func.func' op invalid refinement

// CHECK: func.func @main
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = chlo.acos %x : tensor<2xf32> -> tensor<2xf32>
  %1 = "stablehlo.collective_permute"(%0) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %1 : tensor<2xf32>
}

func.func private @unused(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = chlo.acos %x : tensor<2xf32> -> tensor<2xf32>
  return %0 : tensor<2xf32>
}
