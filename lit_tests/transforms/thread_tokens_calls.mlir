// RUN: stablehlo-tools opt %s -p thread-tokens --split-input-file | filecheck %s --enable-var-scope

// A private function that communicates takes and returns the token, last; so does its call.
// CHECK-LABEL: func.func @call
// CHECK-SAME: (%[[X:.+]]: tensor<f32>) -> tensor<f32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[CALL:.+]]:2 = call @callee(%[[X]], %[[ROOT]]) {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: return %[[CALL]]#0 :
func.func @call(%x: tensor<f32>) -> tensor<f32> {
  %0 = call @callee(%x) : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}

// CHECK-LABEL: func.func private @callee
// CHECK-SAME: (%[[X:.+]]: tensor<f32>, %[[TOKEN:.+]]: !stablehlo.token) -> (tensor<f32>, !stablehlo.token)
// CHECK-SAME: attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT]]#1 :
func.func private @callee(%x: tensor<f32>) -> tensor<f32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}

// -----

// Two calls of one function: it is threaded once, and the second call waits for the first.
// CHECK-LABEL: func.func @two_calls
// CHECK-SAME: (%[[X:.+]]: tensor<f32>, %[[Y:.+]]: tensor<f32>) -> (tensor<f32>, tensor<f32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[CALL:.+]]:2 = call @shared(%[[X]], %[[ROOT]]) {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: %[[CALL2:.+]]:2 = call @shared(%[[Y]], %[[CALL]]#1) {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: return %[[CALL]]#0, %[[CALL2]]#0 :
func.func @two_calls(%x: tensor<f32>, %y: tensor<f32>) -> (tensor<f32>, tensor<f32>) {
  %0 = call @shared(%x) : (tensor<f32>) -> tensor<f32>
  %1 = call @shared(%y) : (tensor<f32>) -> tensor<f32>
  return %0, %1 : tensor<f32>, tensor<f32>
}

// CHECK-LABEL: func.func private @shared
// CHECK-SAME: (%[[X:.+]]: tensor<f32>, %[[TOKEN:.+]]: !stablehlo.token) -> (tensor<f32>, !stablehlo.token)
// CHECK-SAME: attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT]]#1 :
func.func private @shared(%x: tensor<f32>) -> tensor<f32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}

// -----

// The callee of a callee: every function on the way to a collective takes the token, no other one.
// CHECK-LABEL: func.func @callee_of_a_callee
// CHECK-SAME: (%[[X:.+]]: tensor<f32>) -> tensor<f32>
// CHECK-NEXT: %[[CALL:.+]] = call @silent(%[[X]])
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[CALL2:.+]]:2 = call @middle(%[[CALL]], %[[ROOT]]) {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: return %[[CALL2]]#0 :
func.func @callee_of_a_callee(%x: tensor<f32>) -> tensor<f32> {
  %0 = call @silent(%x) : (tensor<f32>) -> tensor<f32>
  %1 = call @middle(%0) : (tensor<f32>) -> tensor<f32>
  return %1 : tensor<f32>
}

// CHECK-LABEL: func.func private @middle
// CHECK-SAME: (%[[X:.+]]: tensor<f32>, %[[TOKEN:.+]]: !stablehlo.token) -> (tensor<f32>, !stablehlo.token)
// CHECK-SAME: attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: %[[CALL:.+]]:2 = call @innermost(%[[X]], %[[TOKEN]]) {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: return %[[CALL]]#0, %[[CALL]]#1 :
func.func private @middle(%x: tensor<f32>) -> tensor<f32> {
  %0 = call @innermost(%x) : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}

// CHECK-LABEL: func.func private @innermost
// CHECK-SAME: (%[[X:.+]]: tensor<f32>, %[[TOKEN:.+]]: !stablehlo.token) -> (tensor<f32>, !stablehlo.token)
// CHECK-SAME: attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT]]#1 :
func.func private @innermost(%x: tensor<f32>) -> tensor<f32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}

// CHECK-LABEL: func.func private @silent
// CHECK-SAME: (%[[X:.+]]: tensor<f32>) -> tensor<f32>
// CHECK-NEXT: return %[[X]] :
func.func private @silent(%x: tensor<f32>) -> tensor<f32> {
  return %x : tensor<f32>
}

// -----

// Two public functions share a private one: each passes it the token of its own chain.
// CHECK-LABEL: func.func @first_caller
// CHECK-SAME: (%[[X:.+]]: tensor<f32>) -> tensor<f32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[CALL:.+]]:2 = call @common(%[[X]], %[[ROOT]]) {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: return %[[CALL]]#0 :
func.func @first_caller(%x: tensor<f32>) -> tensor<f32> {
  %0 = call @common(%x) : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}

// CHECK-LABEL: func.func @second_caller
// CHECK-SAME: (%[[X:.+]]: tensor<f32>) -> tensor<f32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[CALL:.+]]:2 = call @common(%[[X]], %[[ROOT]]) {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: return %[[CALL]]#0 :
func.func @second_caller(%x: tensor<f32>) -> tensor<f32> {
  %0 = call @common(%x) : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}

// CHECK-LABEL: func.func private @common
// CHECK-SAME: (%[[X:.+]]: tensor<f32>, %[[TOKEN:.+]]: !stablehlo.token) -> (tensor<f32>, !stablehlo.token)
// CHECK-SAME: attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT]]#1 :
func.func private @common(%x: tensor<f32>) -> tensor<f32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}

// -----

// A composite of the user's whose decomposition communicates takes the token as a call does.
// CHECK-LABEL: func.func @composite_of_the_user
// CHECK-SAME: (%[[X:.+]]: tensor<f32>) -> tensor<f32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[COMPOSITE:.+]]:2 = stablehlo.composite "user.shift" %[[X]], %[[ROOT]]
// CHECK-SAME: {decomposition = @shift, stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: return %[[COMPOSITE]]#0 :
func.func @composite_of_the_user(%x: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.composite "user.shift" %x {decomposition = @shift} : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}

// CHECK-LABEL: func.func private @shift
// CHECK-SAME: (%[[X:.+]]: tensor<f32>, %[[TOKEN:.+]]: !stablehlo.token) -> (tensor<f32>, !stablehlo.token)
// CHECK-SAME: attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT]]#1 :
func.func private @shift(%x: tensor<f32>) -> tensor<f32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}

// -----

// A call inside of a loop: the token comes from the loop's carry.
// CHECK-LABEL: func.func @call_in_a_loop
// CHECK-SAME: (%[[P:.+]]: tensor<i1>, %[[X:.+]]: tensor<f32>) -> tensor<f32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[LOOP:.+]]:2 = stablehlo.while(%[[ITER:.+]] = %[[X]], %[[TOKEN:.+]] = %[[ROOT]])
// CHECK-SAME: : tensor<f32>, !stablehlo.token attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: cond {
// CHECK-NEXT: stablehlo.return %[[P]] :
// CHECK-NEXT: } do {
// CHECK-NEXT: %[[CALL:.+]]:2 = func.call @body(%[[ITER]], %[[TOKEN]]) {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: stablehlo.return %[[CALL]]#0, %[[CALL]]#1 :
// CHECK: return %[[LOOP]]#0 :
func.func @call_in_a_loop(%p: tensor<i1>, %x: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.while(%v = %x) : tensor<f32>
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %1 = func.call @body(%v) : (tensor<f32>) -> tensor<f32>
      stablehlo.return %1 : tensor<f32>
    }
  return %0 : tensor<f32>
}

// CHECK-LABEL: func.func private @body
// CHECK-SAME: (%[[X:.+]]: tensor<f32>, %[[TOKEN:.+]]: !stablehlo.token) -> (tensor<f32>, !stablehlo.token)
// CHECK-SAME: attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT]]#1 :
func.func private @body(%x: tensor<f32>) -> tensor<f32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}

// -----

// What is said of arguments, of results and of the values of a call stays with them; the token's
// place is added.
sdy.mesh @mesh = <["x"=2]>
// CHECK-LABEL: func.func @attributes_of_a_call
// CHECK-SAME: (%[[X:.+]]: tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[CALL:.+]]:2 = call @annotated(%[[X]], %[[ROOT]]) {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>, <@mesh, []>]>, stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: return %[[CALL]]#0 :
func.func @attributes_of_a_call(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @annotated(%x) {
    sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>]>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// CHECK-LABEL: func.func private @annotated
// CHECK-SAME: (%[[X:.+]]: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}, %[[TOKEN:.+]]: !stablehlo.token)
// CHECK-SAME: -> (tensor<4xf32> {jax.result_info = "shifted"}, !stablehlo.token)
// CHECK-SAME: attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT]]#1 :
func.func private @annotated(
    %x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}
) -> (tensor<4xf32> {jax.result_info = "shifted"}) {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// A function without results communicates too.
// CHECK-LABEL: func.func @call_without_results
// CHECK-SAME: (%[[X:.+]]: tensor<f32>, %[[TOKEN:.+]]: !stablehlo.token)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[CALL:.+]] = call @report(%[[X]], %[[TOKEN]], %[[ROOT]]) {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: return
func.func @call_without_results(%x: tensor<f32>, %token: !stablehlo.token) {
  call @report(%x, %token) : (tensor<f32>, !stablehlo.token) -> ()
  return
}

// CHECK-LABEL: func.func private @report
// CHECK-SAME: (%[[X:.+]]: tensor<f32>, %[[TOKEN:.+]]: !stablehlo.token, %[[TOKEN2:.+]]: !stablehlo.token) -> !stablehlo.token
// CHECK-SAME: attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: %[[JOIN:.+]] = stablehlo.after_all %[[TOKEN]], %[[TOKEN2]] {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[OUTFEED:.+]] = "stablehlo.outfeed"(%[[X]], %[[JOIN]])
// CHECK-NEXT: %[[AFTER:.+]] = stablehlo.after_all %[[OUTFEED]] {stablehlo_tools.token_link} :
// CHECK-NEXT: return %[[AFTER]] :
func.func private @report(%x: tensor<f32>, %token: !stablehlo.token) {
  %0 = "stablehlo.outfeed"(%x, %token) {outfeed_config = ""} : (tensor<f32>, !stablehlo.token) -> !stablehlo.token
  return
}

// -----

// A function that is only declared is taken not to communicate: nothing is known of it.
// CHECK-LABEL: func.func @call_of_a_declaration
// CHECK: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %{{.+}}, %{{.+}}#1 :
// CHECK-NEXT: call @declared_only(%[[OUT]]#0) : (tensor<f32>) -> tensor<f32>
// CHECK: func.func private @declared_only(tensor<f32>) -> tensor<f32>{{$}}
func.func @call_of_a_declaration(%x: tensor<f32>) -> tensor<f32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  %1 = call @declared_only(%0) : (tensor<f32>) -> tensor<f32>
  return %1 : tensor<f32>
}

func.func private @declared_only(tensor<f32>) -> tensor<f32>

// -----

// Attributes that a call lists for its values: an empty entry is added for the token.
// CHECK-LABEL: func.func @attribute_lists_of_a_call
// CHECK: call @listed(%{{.+}}, %{{.+}}) <arg_attrs = [{user.note = "argument"}, {}], res_attrs = [{user.note = "result"}, {}]>
// CHECK-SAME: {stablehlo_tools.tokens_carried = 1 : i64} : (tensor<f32>, !stablehlo.token) -> (tensor<f32>, !stablehlo.token)
func.func @attribute_lists_of_a_call(%x: tensor<f32>) -> tensor<f32> {
  %0 = "func.call"(%x) <{
    callee = @listed, arg_attrs = [{user.note = "argument"}], res_attrs = [{user.note = "result"}]
  }> : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}

func.func private @listed(%x: tensor<f32>) -> tensor<f32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}
