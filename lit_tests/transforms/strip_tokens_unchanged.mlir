// Without a chain of thread-tokens nothing changes, to the byte.
// RUN: stablehlo-tools opt %s --split-input-file > %t.before
// RUN: stablehlo-tools opt %s -p strip-tokens --split-input-file | diff -u %t.before -

// A chain of the user's own, of the very shape, but without the marks.
func.func @chain_of_the_user(%x: tensor<2xf32>) -> tensor<4xf32> {
  %0 = stablehlo.after_all : !stablehlo.token
  %1:2 = stablehlo.optimization_barrier %x, %0 : tensor<2xf32>, !stablehlo.token
  %2 = "stablehlo.all_gather"(%1#0) {
    all_gather_dim = 0 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<4xf32>
  %3:2 = stablehlo.optimization_barrier %2, %1#1 : tensor<4xf32>, !stablehlo.token
  return %3#0 : tensor<4xf32>
}

// -----

// A loop, a branch and a call that carry tokens of the user's own.
func.func @carries_of_the_user(%p: tensor<i1>, %token: !stablehlo.token) -> !stablehlo.token {
  %0 = stablehlo.while(%t = %token) : !stablehlo.token
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %1 = "stablehlo.if"(%p) ({
        %2 = func.call @takes_a_token(%t) : (!stablehlo.token) -> !stablehlo.token
        stablehlo.return %2 : !stablehlo.token
      }, {
        stablehlo.return %t : !stablehlo.token
      }) : (tensor<i1>) -> !stablehlo.token
      stablehlo.return %1 : !stablehlo.token
    }
  return %0 : !stablehlo.token
}

func.func private @takes_a_token(%token: !stablehlo.token) -> !stablehlo.token {
  return %token : !stablehlo.token
}

// -----

// A composite that has the name but not the mark, and a decomposition that has neither.
func.func @composite_of_the_user(%x: tensor<2xf32>, %token: !stablehlo.token) -> tensor<2xf32> {
  %0:2 = stablehlo.composite "stablehlo_tools.collective_permute" %x, %token {
    decomposition = @decomposition
  } : (tensor<2xf32>, !stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  return %0#0 : tensor<2xf32>
}

func.func private @decomposition(%x: tensor<2xf32>, %token: !stablehlo.token) -> (tensor<2xf32>, !stablehlo.token) {
  return %x, %token : tensor<2xf32>, !stablehlo.token
}

// -----

// Collectives that were never threaded.
func.func @collective(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

// A mark that is no number is not of the chain.
func.func @mark_without_number(%p: tensor<i1>, %x: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.while(%v = %x) : tensor<f32>
    attributes {stablehlo_tools.tokens_carried = "one"}
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      stablehlo.return %v : tensor<f32>
    }
  return %0 : tensor<f32>
}
