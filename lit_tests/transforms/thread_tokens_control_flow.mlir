// RUN: stablehlo-tools opt %s -p thread-tokens --split-input-file | filecheck %s --enable-var-scope

// A loop that communicates carries the token: the last operand, argument, returned value and result.
// CHECK-LABEL: func.func @while_carries_the_token
// CHECK-SAME: (%[[X:.+]]: tensor<f32>, %[[N:.+]]: tensor<i32>) -> tensor<f32>
// CHECK-NEXT: %[[C:.+]] = stablehlo.constant dense<0>
// CHECK-NEXT: %[[C2:.+]] = stablehlo.constant dense<1>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[LOOP:.+]]:3 = stablehlo.while(%[[ITER:.+]] = %[[C]], %[[ITER2:.+]] = %[[X]], %[[TOKEN:.+]] = %[[ROOT]])
// CHECK-SAME: : tensor<i32>, tensor<f32>, !stablehlo.token
// CHECK-SAME: attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: cond {
// CHECK-NEXT: %[[LT:.+]] = stablehlo.compare LT, %[[ITER]], %[[N]] :
// CHECK-NEXT: stablehlo.return %[[LT]] :
// CHECK-NEXT: } do {
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ITER2]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: %[[ADD:.+]] = stablehlo.add %[[ITER]], %[[C2]] :
// CHECK-NEXT: stablehlo.return %[[ADD]], %[[OUT]]#0, %[[OUT]]#1 :
// CHECK: return %[[LOOP]]#1 :
func.func @while_carries_the_token(%x: tensor<f32>, %n: tensor<i32>) -> tensor<f32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %v = %x) : tensor<i32>, tensor<f32>
    cond {
      %p = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %p : tensor<i1>
    } do {
      %1 = "stablehlo.collective_permute"(%v) {
        source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
      } : (tensor<f32>) -> tensor<f32>
      %2 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %2, %1 : tensor<i32>, tensor<f32>
    }
  return %0#1 : tensor<f32>
}

// -----

// The chain passes what stands before the loop, the loop, and what stands behind it.
// CHECK-LABEL: func.func @before_in_and_after_a_loop
// CHECK-SAME: (%[[X:.+]]: tensor<f32>, %[[P:.+]]: tensor<i1>) -> (tensor<f32>, tensor<f32>, tensor<f32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: %[[LOOP:.+]]:2 = stablehlo.while(%[[ITER:.+]] = %[[X]], %[[TOKEN:.+]] = %[[OUT]]#1)
// CHECK-SAME: : tensor<f32>, !stablehlo.token attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: cond {
// CHECK-NEXT: stablehlo.return %[[P]] :
// CHECK-NEXT: } do {
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ITER]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
// CHECK-NEXT: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE2]], %[[IN2]]#1 :
// CHECK-NEXT: stablehlo.return %[[OUT2]]#0, %[[OUT2]]#1 :
// CHECK: %[[IN3:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[LOOP]]#1 :
// CHECK-NEXT: %[[PERMUTE3:.+]] = "stablehlo.collective_permute"(%[[IN3]]#0)
// CHECK-NEXT: %[[OUT3:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE3]], %[[IN3]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[LOOP]]#0, %[[OUT3]]#0 :
func.func @before_in_and_after_a_loop(
    %x: tensor<f32>, %p: tensor<i1>
) -> (tensor<f32>, tensor<f32>, tensor<f32>) {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  %1 = stablehlo.while(%v = %x) : tensor<f32>
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %2 = "stablehlo.collective_permute"(%v) {
        source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
      } : (tensor<f32>) -> tensor<f32>
      stablehlo.return %2 : tensor<f32>
    }
  %3 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0, %1, %3 : tensor<f32>, tensor<f32>, tensor<f32>
}

// -----

// A condition sees the token but returns none, so behind the loop the token is tied to the loop's
// results, which the condition decides. That it runs before the body is the loop's doing.
// CHECK-LABEL: func.func @collective_in_a_condition
// CHECK-SAME: (%[[X:.+]]: tensor<i1>) -> tensor<i1>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[LOOP:.+]]:2 = stablehlo.while(%[[ITER:.+]] = %[[X]], %[[TOKEN:.+]] = %[[ROOT]])
// CHECK-SAME: : tensor<i1>, !stablehlo.token attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: cond {
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ITER]], %[[TOKEN]] :
// CHECK-NEXT: %[[REDUCE:.+]] = "stablehlo.all_reduce"(%[[IN]]#0)
// CHECK: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[REDUCE]], %[[IN]]#1 :
// CHECK-NEXT: stablehlo.return %[[OUT]]#0 :
// CHECK-NEXT: } do {
// CHECK-NEXT: stablehlo.return %[[ITER]], %[[TOKEN]] :
// CHECK: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[LOOP]]#0, %[[LOOP]]#1 :
// CHECK-NEXT: return %[[OUT2]]#0 :
func.func @collective_in_a_condition(%x: tensor<i1>) -> tensor<i1> {
  %0 = stablehlo.while(%v = %x) : tensor<i1>
    cond {
      %1 = "stablehlo.all_reduce"(%v) ({
      ^bb0(%a: tensor<i1>, %b: tensor<i1>):
        %or = stablehlo.or %a, %b : tensor<i1>
        stablehlo.return %or : tensor<i1>
      }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<i1>) -> tensor<i1>
      stablehlo.return %1 : tensor<i1>
    } do {
      stablehlo.return %v : tensor<i1>
    }
  return %0 : tensor<i1>
}

// -----

// Both a condition and a body: each threads the token that the loop carries.
// CHECK-LABEL: func.func @collectives_in_condition_and_body
// CHECK-SAME: (%[[X:.+]]: tensor<i1>) -> tensor<i1>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[LOOP:.+]]:2 = stablehlo.while(%[[ITER:.+]] = %[[X]], %[[TOKEN:.+]] = %[[ROOT]])
// CHECK-SAME: : tensor<i1>, !stablehlo.token attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: cond {
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ITER]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: stablehlo.return %[[OUT]]#0 :
// CHECK-NEXT: } do {
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ITER]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
// CHECK-NEXT: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE2]], %[[IN2]]#1 :
// CHECK-NEXT: stablehlo.return %[[OUT2]]#0, %[[OUT2]]#1 :
// CHECK: %[[OUT3:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[LOOP]]#0, %[[LOOP]]#1 :
// CHECK-NEXT: return %[[OUT3]]#0 :
func.func @collectives_in_condition_and_body(%x: tensor<i1>) -> tensor<i1> {
  %0 = stablehlo.while(%v = %x) : tensor<i1>
    cond {
      %1 = "stablehlo.collective_permute"(%v) {
        source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
      } : (tensor<i1>) -> tensor<i1>
      stablehlo.return %1 : tensor<i1>
    } do {
      %1 = "stablehlo.collective_permute"(%v) {
        source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
      } : (tensor<i1>) -> tensor<i1>
      stablehlo.return %1 : tensor<i1>
    }
  return %0 : tensor<i1>
}

// -----

// Branches see the token from outside, and each returns its last one.
// CHECK-LABEL: func.func @if_returns_the_token
// CHECK-SAME: (%[[P:.+]]: tensor<i1>, %[[X:.+]]: tensor<f32>) -> tensor<f32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IF:.+]]:2 = "stablehlo.if"(%[[P]]) ({
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: stablehlo.return %[[OUT]]#0, %[[OUT]]#1 :
// CHECK-NEXT: }, {
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
// CHECK-NEXT: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE2]], %[[IN2]]#1 :
// CHECK-NEXT: stablehlo.return %[[OUT2]]#0, %[[OUT2]]#1 :
// CHECK-NEXT: }) {stablehlo_tools.tokens_carried = 1 : i64} : (tensor<i1>) -> (tensor<f32>, !stablehlo.token)
// CHECK-NEXT: return %[[IF]]#0 :
func.func @if_returns_the_token(%p: tensor<i1>, %x: tensor<f32>) -> tensor<f32> {
  %0 = "stablehlo.if"(%p) ({
    %1 = "stablehlo.collective_permute"(%x) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<f32>) -> tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }, {
    %1 = "stablehlo.collective_permute"(%x) {
      source_target_pairs = dense<[[1, 0]]> : tensor<1x2xi64>
    } : (tensor<f32>) -> tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }) : (tensor<i1>) -> tensor<f32>
  return %0 : tensor<f32>
}

// -----

// A branch without communication returns the token as it came.
// CHECK-LABEL: func.func @case_with_silent_branches
// CHECK-SAME: (%[[K:.+]]: tensor<i32>, %[[X:.+]]: tensor<f32>) -> tensor<f32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[CASE:.+]]:2 = "stablehlo.case"(%[[K]]) ({
// CHECK-NEXT: stablehlo.return %[[X]], %[[ROOT]] :
// CHECK-NEXT: }, {
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: stablehlo.return %[[OUT]]#0, %[[OUT]]#1 :
// CHECK-NEXT: }, {
// CHECK-NEXT: %[[NEGATE:.+]] = stablehlo.negate %[[X]] :
// CHECK-NEXT: stablehlo.return %[[NEGATE]], %[[ROOT]] :
// CHECK-NEXT: }) {stablehlo_tools.tokens_carried = 1 : i64} : (tensor<i32>) -> (tensor<f32>, !stablehlo.token)
// CHECK-NEXT: return %[[CASE]]#0 :
func.func @case_with_silent_branches(%k: tensor<i32>, %x: tensor<f32>) -> tensor<f32> {
  %0 = "stablehlo.case"(%k) ({
    stablehlo.return %x : tensor<f32>
  }, {
    %1 = "stablehlo.collective_permute"(%x) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<f32>) -> tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }, {
    %1 = stablehlo.negate %x : tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }) : (tensor<i32>) -> tensor<f32>
  return %0 : tensor<f32>
}

// -----

// A branch whose only communication has no result that leaves it: the op gains its first result.
// CHECK-LABEL: func.func @if_without_results
// CHECK-SAME: (%[[P:.+]]: tensor<i1>, %[[X:.+]]: tensor<f32>, %[[TOKEN:.+]]: !stablehlo.token) -> tensor<f32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IF:.+]] = "stablehlo.if"(%[[P]]) ({
// CHECK-NEXT: %[[JOIN:.+]] = stablehlo.after_all %[[TOKEN]], %[[ROOT]] {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[OUTFEED:.+]] = "stablehlo.outfeed"(%[[X]], %[[JOIN]])
// CHECK-NEXT: %[[AFTER:.+]] = stablehlo.after_all %[[OUTFEED]] {stablehlo_tools.token_link} :
// CHECK-NEXT: stablehlo.return %[[AFTER]] :
// CHECK-NEXT: }, {
// CHECK-NEXT: stablehlo.return %[[ROOT]] :
// CHECK-NEXT: }) {stablehlo_tools.tokens_carried = 1 : i64} : (tensor<i1>) -> !stablehlo.token
// CHECK-NEXT: return %[[X]] :
func.func @if_without_results(
    %p: tensor<i1>, %x: tensor<f32>, %token: !stablehlo.token
) -> tensor<f32> {
  "stablehlo.if"(%p) ({
    %0 = "stablehlo.outfeed"(%x, %token) {outfeed_config = ""} : (tensor<f32>, !stablehlo.token) -> !stablehlo.token
    stablehlo.return
  }, {
    stablehlo.return
  }) : (tensor<i1>) -> ()
  return %x : tensor<f32>
}

// -----

// The token goes down through every level around a collective, and comes up again.
// CHECK-LABEL: func.func @while_in_case_in_while
// CHECK-SAME: (%[[K:.+]]: tensor<i32>, %[[P:.+]]: tensor<i1>, %[[X:.+]]: tensor<f32>) -> tensor<f32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[LOOP:.+]]:2 = stablehlo.while(%[[ITER:.+]] = %[[X]], %[[TOKEN:.+]] = %[[ROOT]])
// CHECK-SAME: : tensor<f32>, !stablehlo.token attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: cond {
// CHECK-NEXT: stablehlo.return %[[P]] :
// CHECK-NEXT: } do {
// CHECK-NEXT: %[[CASE:.+]]:2 = "stablehlo.case"(%[[K]]) ({
// CHECK-NEXT: stablehlo.return %[[ITER]], %[[TOKEN]] :
// CHECK-NEXT: }, {
// CHECK-NEXT: %[[LOOP2:.+]]:2 = stablehlo.while(%[[ITER2:.+]] = %[[ITER]], %[[TOKEN2:.+]] = %[[TOKEN]])
// CHECK-SAME: : tensor<f32>, !stablehlo.token attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: cond {
// CHECK-NEXT: stablehlo.return %[[P]] :
// CHECK-NEXT: } do {
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ITER2]], %[[TOKEN2]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: stablehlo.return %[[OUT]]#0, %[[OUT]]#1 :
// CHECK: stablehlo.return %[[LOOP2]]#0, %[[LOOP2]]#1 :
// CHECK-NEXT: }) {stablehlo_tools.tokens_carried = 1 : i64} : (tensor<i32>) -> (tensor<f32>, !stablehlo.token)
// CHECK-NEXT: stablehlo.return %[[CASE]]#0, %[[CASE]]#1 :
// CHECK: return %[[LOOP]]#0 :
func.func @while_in_case_in_while(%k: tensor<i32>, %p: tensor<i1>, %x: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.while(%v = %x) : tensor<f32>
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %1 = "stablehlo.case"(%k) ({
        stablehlo.return %v : tensor<f32>
      }, {
        %2 = stablehlo.while(%w = %v) : tensor<f32>
          cond {
            stablehlo.return %p : tensor<i1>
          } do {
            %3 = "stablehlo.collective_permute"(%w) {
              source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
            } : (tensor<f32>) -> tensor<f32>
            stablehlo.return %3 : tensor<f32>
          }
        stablehlo.return %2 : tensor<f32>
      }) : (tensor<i32>) -> tensor<f32>
      stablehlo.return %1 : tensor<f32>
    }
  return %0 : tensor<f32>
}

// -----

// Control flow without communication keeps its carry, though the function communicates.
// CHECK-LABEL: func.func @silent_loop_stays
// CHECK-SAME: (%[[P:.+]]: tensor<i1>, %[[X:.+]]: tensor<f32>) -> tensor<f32>
// CHECK-NEXT: %[[LOOP:.+]] = stablehlo.while(%[[ITER:.+]] = %[[X]]) : tensor<f32>
// CHECK-NEXT: cond {
// CHECK-NEXT: stablehlo.return %[[P]] :
// CHECK-NEXT: } do {
// CHECK-NEXT: %[[NEGATE:.+]] = stablehlo.negate %[[ITER]] :
// CHECK-NEXT: stablehlo.return %[[NEGATE]] :
// CHECK: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[LOOP]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0 :
func.func @silent_loop_stays(%p: tensor<i1>, %x: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.while(%v = %x) : tensor<f32>
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %1 = stablehlo.negate %v : tensor<f32>
      stablehlo.return %1 : tensor<f32>
    }
  %2 = "stablehlo.collective_permute"(%0) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %2 : tensor<f32>
}

// -----

// A list of shardings grows with the results: the token's is that of a replicated scalar.
sdy.mesh @mesh = <["x"=2]>
// CHECK-LABEL: func.func @shardings_of_a_while_grow
// CHECK-SAME: (%[[P:.+]]: tensor<i1>, %[[X:.+]]: tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[LOOP:.+]]:2 = stablehlo.while(%[[ITER:.+]] = %[[X]], %[[TOKEN:.+]] = %[[ROOT]])
// CHECK-SAME: : tensor<4xf32>, !stablehlo.token
// CHECK-SAME: attributes {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>, <@mesh, []>]>, stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: cond {
// CHECK-NEXT: stablehlo.return %[[P]] :
// CHECK-NEXT: } do {
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ITER]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: stablehlo.return %[[OUT]]#0, %[[OUT]]#1 :
// CHECK: return %[[LOOP]]#0 :
func.func @shardings_of_a_while_grow(%p: tensor<i1>, %x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.while(%v = %x) : tensor<4xf32>
    attributes {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>]>}
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %1 = "stablehlo.collective_permute"(%v) {
        source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
      } : (tensor<4xf32>) -> tensor<4xf32>
      stablehlo.return %1 : tensor<4xf32>
    }
  return %0 : tensor<4xf32>
}

// -----

sdy.mesh @mesh = <["x"=2]>
// CHECK-LABEL: func.func @shardings_of_an_if_grow
// CHECK-SAME: (%[[P:.+]]: tensor<i1>, %[[X:.+]]: tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IF:.+]]:2 = "stablehlo.if"(%[[P]]) ({
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: stablehlo.return %[[OUT]]#0, %[[OUT]]#1 :
// CHECK-NEXT: }, {
// CHECK-NEXT: stablehlo.return %[[X]], %[[ROOT]] :
// CHECK-NEXT: }) {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>, <@mesh, []>]>, stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-SAME: : (tensor<i1>) -> (tensor<4xf32>, !stablehlo.token)
// CHECK-NEXT: return %[[IF]]#0 :
func.func @shardings_of_an_if_grow(%p: tensor<i1>, %x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = "stablehlo.if"(%p) ({
    %1 = "stablehlo.collective_permute"(%x) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<4xf32>) -> tensor<4xf32>
    stablehlo.return %1 : tensor<4xf32>
  }, {
    stablehlo.return %x : tensor<4xf32>
  }) {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>]>} : (tensor<i1>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
