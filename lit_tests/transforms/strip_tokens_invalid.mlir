// RUN: stablehlo-tools opt %s -p strip-tokens --split-input-file --verify-diagnostics

// P1: nothing but the chain uses its tokens, and every marked op still has its token last.

// Another op was made to use the token.
func.func @token_is_used_p1(%x: tensor<2xf32>) -> !stablehlo.token {
  %0 = stablehlo.after_all {stablehlo_tools.token_link} : !stablehlo.token
  // expected-error@+1 {{stablehlo.send uses a token of the chain: the token chain was changed after thread-tokens wrote it}}
  %1 = "stablehlo.send"(%x, %0) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token
  return %1 : !stablehlo.token
}

// -----

// A simplifier took the token out of a barrier.
func.func @barrier_without_token_p1(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-error@+1 {{stablehlo.optimization_barrier has lost its token}}
  %0 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %x : tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

// The token is there, but no longer last.
func.func @token_not_last_p1(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.after_all {stablehlo_tools.token_link} : !stablehlo.token
  // expected-error@+1 {{stablehlo.optimization_barrier has lost its token}}
  %1:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %0, %x : !stablehlo.token, tensor<2xf32>
  return %1#1 : tensor<2xf32>
}

// -----

// The mark stands on an op that the chain does not use.
func.func @mark_on_another_op_p1(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-error@+1 {{stablehlo.negate is marked as a link of the chain but is not one}}
  %0 = stablehlo.negate %x {stablehlo_tools.token_link} : tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

// A carry was added behind the token.
func.func @carry_behind_the_token_p1(%p: tensor<i1>, %x: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.after_all {stablehlo_tools.token_link} : !stablehlo.token
  // expected-error@+1 {{stablehlo.while no longer carries its tokens last}}
  %1:2 = stablehlo.while(%t = %0, %v = %x) : !stablehlo.token, tensor<f32>
    attributes {stablehlo_tools.tokens_carried = 1 : i64}
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      stablehlo.return %t, %v : !stablehlo.token, tensor<f32>
    }
  return %1#1 : tensor<f32>
}

// -----

// A result was added behind the token of a branch.
func.func @result_behind_the_token_p1(%p: tensor<i1>, %x: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.after_all {stablehlo_tools.token_link} : !stablehlo.token
  // expected-error@+1 {{stablehlo.if no longer carries its tokens last}}
  %1:2 = "stablehlo.if"(%p) ({
    stablehlo.return %0, %x : !stablehlo.token, tensor<f32>
  }, {
    stablehlo.return %0, %x : !stablehlo.token, tensor<f32>
  }) {stablehlo_tools.tokens_carried = 1 : i64} : (tensor<i1>) -> (!stablehlo.token, tensor<f32>)
  return %1#1 : tensor<f32>
}

// -----

// More tokens in the mark than values on the op.
func.func @mark_of_too_many_p1(%p: tensor<i1>, %x: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.after_all {stablehlo_tools.token_link} : !stablehlo.token
  // expected-error@+1 {{stablehlo.while no longer carries its tokens last}}
  %1:2 = stablehlo.while(%v = %x, %t = %0) : tensor<f32>, !stablehlo.token
    attributes {stablehlo_tools.tokens_carried = 3 : i64}
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      stablehlo.return %v, %t : tensor<f32>, !stablehlo.token
    }
  return %1#0 : tensor<f32>
}

// -----

// A mark that counts backwards.
func.func @negative_mark_p1(%p: tensor<i1>, %x: tensor<f32>) -> tensor<f32> {
  // expected-error@+1 {{stablehlo.while says that it carries -1 tokens}}
  %0 = stablehlo.while(%v = %x) : tensor<f32>
    attributes {stablehlo_tools.tokens_carried = -1 : i64}
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      stablehlo.return %v : tensor<f32>
    }
  return %0 : tensor<f32>
}

// -----

// A call whose callee lost the mark: its argument is the user's now, and takes the chain's token.
func.func @callee_without_mark_p1(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.after_all {stablehlo_tools.token_link} : !stablehlo.token
  // expected-error@+1 {{func.call uses a token of the chain}}
  %1:2 = call @callee(%x, %0) : (tensor<2xf32>, !stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  return %1#0 : tensor<2xf32>
}

func.func private @callee(%x: tensor<2xf32>, %token: !stablehlo.token) -> (tensor<2xf32>, !stablehlo.token) {
  return %x, %token : tensor<2xf32>, !stablehlo.token
}

// -----

// A call that lost its mark: without the callee's token it does not fit it.
func.func @call_without_mark_p1(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.after_all {stablehlo_tools.token_link} : !stablehlo.token
  // expected-error@+1 {{func.call uses a token of the chain}}
  %1:2 = call @callee(%x, %0) : (tensor<2xf32>, !stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  return %1#0 : tensor<2xf32>
}

func.func private @callee(
    %x: tensor<2xf32>, %token: !stablehlo.token
) -> (tensor<2xf32>, !stablehlo.token) attributes {stablehlo_tools.tokens_carried = 1 : i64} {
  return %x, %token : tensor<2xf32>, !stablehlo.token
}

// -----

// A composite whose decomposition was replaced by one without the mark.
func.func @decomposition_is_gone_p1(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.after_all {stablehlo_tools.token_link} : !stablehlo.token
  // expected-error@+1 {{the decomposition of a composite is gone}}
  %1:2 = stablehlo.composite "stablehlo_tools.collective_permute" %x, %0 {
    decomposition = @replaced, stablehlo_tools.token_link
  } : (tensor<2xf32>, !stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  return %1#0 : tensor<2xf32>
}

func.func private @replaced(%x: tensor<2xf32>, %token: !stablehlo.token) -> (tensor<2xf32>, !stablehlo.token) {
  return %x, %token : tensor<2xf32>, !stablehlo.token
}

// -----

// A decomposition that was emptied: nothing is left to put in the composite's place.
func.func @decomposition_is_empty_p1(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.after_all {stablehlo_tools.token_link} : !stablehlo.token
  // expected-error@+1 {{stablehlo.composite has lost its token}}
  %1:2 = stablehlo.composite "stablehlo_tools.collective_permute" %x, %0 {
    decomposition = @emptied, stablehlo_tools.token_link
  } : (tensor<2xf32>, !stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  return %1#0 : tensor<2xf32>
}

func.func private @emptied(
    %x: tensor<2xf32>, %token: !stablehlo.token
) -> (tensor<2xf32>, !stablehlo.token) attributes {stablehlo_tools.token_link} {
  return %x, %token : tensor<2xf32>, !stablehlo.token
}

// -----

// The composites were lowered to calls of their decompositions.
func.func @composite_was_lowered_p1(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.after_all {stablehlo_tools.token_link} : !stablehlo.token
  // expected-error@+1 {{func.call uses a token of the chain}}
  %1:2 = call @stablehlo_tools.collective_permute.0(%x, %0) : (tensor<2xf32>, !stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  return %1#0 : tensor<2xf32>
}

func.func private @stablehlo_tools.collective_permute.0(
    %x: tensor<2xf32>, %token: !stablehlo.token
) -> (tensor<2xf32>, !stablehlo.token) attributes {stablehlo_tools.token_link} {
  %0:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %x, %token : tensor<2xf32>, !stablehlo.token
  %1 = "stablehlo.collective_permute"(%0#0) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %2:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %1, %0#1 : tensor<2xf32>, !stablehlo.token
  return %2#0, %2#1 : tensor<2xf32>, !stablehlo.token
}
