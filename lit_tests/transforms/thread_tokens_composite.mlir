// RUN: stablehlo-tools opt %s -p 'thread-tokens{form=composite}' --split-input-file | filecheck %s --enable-var-scope
// RUN: stablehlo-tools opt %s -p 'thread-tokens{form=composite},stablehlo-legalize-composite-to-call' --split-input-file | filecheck %s --check-prefix=LOWERED

// Each collective becomes a composite that takes and returns the token; its decomposition is the
// barrier form.
// CHECK-LABEL: func.func @all_gather
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>) -> tensor<4xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[COMPOSITE:.+]]:2 = stablehlo.composite "stablehlo_tools.all_gather" %[[X]], %[[ROOT]]
// CHECK-SAME: {decomposition = @stablehlo_tools.all_gather.0, stablehlo_tools.token_link}
// CHECK-NEXT: return %[[COMPOSITE]]#0 :

// A compiler that does not know the composite calls its decomposition.
// LOWERED-LABEL: func.func @all_gather
// LOWERED: call @stablehlo_tools.all_gather.0(%{{.+}}, %{{.+}}) : (tensor<2xf32>, !stablehlo.token)
// LOWERED-NOT: stablehlo.composite
// LOWERED: "stablehlo.all_gather"
func.func @all_gather(%x: tensor<2xf32>) -> tensor<4xf32> {
  %0 = "stablehlo.all_gather"(%x) {
    all_gather_dim = 0 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// CHECK-LABEL: func.func private @stablehlo_tools.all_gather.0
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[TOKEN:.+]]: !stablehlo.token)
// CHECK-SAME: -> (tensor<4xf32>, !stablehlo.token) attributes {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[TOKEN]] :
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[GATHER]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT]]#1 :

// -----

// A decomposition holds the reduction of its collective.
// CHECK-LABEL: func.func @reduce_scatter
// CHECK-SAME: (%[[X:.+]]: tensor<4xf32>) -> tensor<2xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[COMPOSITE:.+]]:2 = stablehlo.composite "stablehlo_tools.reduce_scatter" %[[X]], %[[ROOT]]
// CHECK-SAME: {decomposition = @stablehlo_tools.reduce_scatter.0, stablehlo_tools.token_link}
// CHECK-NEXT: return %[[COMPOSITE]]#0 :
func.func @reduce_scatter(%x: tensor<4xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.reduce_scatter"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %max = stablehlo.maximum %a, %b : tensor<f32>
    stablehlo.return %max : tensor<f32>
  }) {
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
    scatter_dimension = 0 : i64
  } : (tensor<4xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// CHECK-LABEL: func.func private @stablehlo_tools.reduce_scatter.0
// CHECK-SAME: (%[[X:.+]]: tensor<4xf32>, %[[TOKEN:.+]]: !stablehlo.token)
// CHECK-SAME: -> (tensor<2xf32>, !stablehlo.token) attributes {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[TOKEN]] :
// CHECK-NEXT: %[[SCATTER:.+]] = "stablehlo.reduce_scatter"(%[[IN]]#0)
// CHECK: stablehlo.maximum
// CHECK: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[SCATTER]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT]]#1 :

// -----

// The token stands behind all operands and all results of a variadic collective.
// CHECK-LABEL: func.func @all_to_all
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[Y:.+]]: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[COMPOSITE:.+]]:3 = stablehlo.composite "stablehlo_tools.all_to_all" %[[X]], %[[Y]], %[[ROOT]]
// CHECK-SAME: {decomposition = @stablehlo_tools.all_to_all.0, stablehlo_tools.token_link}
// CHECK-NEXT: return %[[COMPOSITE]]#0, %[[COMPOSITE]]#1 :
func.func @all_to_all(%x: tensor<2xf32>, %y: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) {
  %0:2 = "stablehlo.all_to_all"(%x, %y) {
    concat_dimension = 0 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
    split_count = 2 : i64,
    split_dimension = 0 : i64
  } : (tensor<2xf32>, tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>)
  return %0#0, %0#1 : tensor<2xf32>, tensor<2xf32>
}

// CHECK-LABEL: func.func private @stablehlo_tools.all_to_all.0
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[Y:.+]]: tensor<2xf32>, %[[TOKEN:.+]]: !stablehlo.token)
// CHECK-SAME: -> (tensor<2xf32>, tensor<2xf32>, !stablehlo.token) attributes {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:3 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[Y]], %[[TOKEN]] :
// CHECK-NEXT: %[[EXCHANGE:.+]]:2 = "stablehlo.all_to_all"(%[[IN]]#0, %[[IN]]#1)
// CHECK-NEXT: %[[OUT:.+]]:3 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[EXCHANGE]]#0, %[[EXCHANGE]]#1, %[[IN]]#2 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT]]#1, %[[OUT]]#2 :

// -----

// Collectives that are alike share one decomposition; other pairs or another type make one of
// their own.
// CHECK-LABEL: func.func @alike
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[Y:.+]]: tensor<4xf32>)
// CHECK-SAME: -> (tensor<2xf32>, tensor<2xf32>, tensor<2xf32>, tensor<4xf32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[COMPOSITE:.+]]:2 = stablehlo.composite "stablehlo_tools.collective_permute" %[[X]], %[[ROOT]]
// CHECK-SAME: {decomposition = @stablehlo_tools.collective_permute.0, stablehlo_tools.token_link}
// CHECK-NEXT: %[[COMPOSITE2:.+]]:2 = stablehlo.composite "stablehlo_tools.collective_permute" %[[COMPOSITE]]#0, %[[COMPOSITE]]#1
// CHECK-SAME: {decomposition = @stablehlo_tools.collective_permute.0, stablehlo_tools.token_link}
// CHECK-NEXT: %[[COMPOSITE3:.+]]:2 = stablehlo.composite "stablehlo_tools.collective_permute" %[[X]], %[[COMPOSITE2]]#1
// CHECK-SAME: {decomposition = @stablehlo_tools.collective_permute.1, stablehlo_tools.token_link}
// CHECK-NEXT: %[[COMPOSITE4:.+]]:2 = stablehlo.composite "stablehlo_tools.collective_permute" %[[Y]], %[[COMPOSITE3]]#1
// CHECK-SAME: {decomposition = @stablehlo_tools.collective_permute.2, stablehlo_tools.token_link}
// CHECK-NEXT: return %[[COMPOSITE]]#0, %[[COMPOSITE2]]#0, %[[COMPOSITE3]]#0, %[[COMPOSITE4]]#0 :
func.func @alike(
    %x: tensor<2xf32>, %y: tensor<4xf32>
) -> (tensor<2xf32>, tensor<2xf32>, tensor<2xf32>, tensor<4xf32>) {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %1 = "stablehlo.collective_permute"(%0) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %2 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[1, 0]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %3 = "stablehlo.collective_permute"(%y) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0, %1, %2, %3 : tensor<2xf32>, tensor<2xf32>, tensor<2xf32>, tensor<4xf32>
}

// CHECK-LABEL: func.func private @stablehlo_tools.collective_permute.0
// CHECK: "stablehlo.collective_permute"{{.*}}dense<{{\[\[}}0, 1{{\]\]}}>{{.*}} -> tensor<2xf32>

// CHECK-LABEL: func.func private @stablehlo_tools.collective_permute.1
// CHECK: "stablehlo.collective_permute"{{.*}}dense<{{\[\[}}1, 0{{\]\]}}>{{.*}} -> tensor<2xf32>

// CHECK-LABEL: func.func private @stablehlo_tools.collective_permute.2
// CHECK: "stablehlo.collective_permute"{{.*}}dense<{{\[\[}}0, 1{{\]\]}}>{{.*}} -> tensor<4xf32>

// -----

// The same op over another reduction is not alike.
// CHECK-LABEL: func.func @other_reduction
// CHECK-SAME: (%[[X:.+]]: tensor<f32>) -> (tensor<f32>, tensor<f32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[COMPOSITE:.+]]:2 = stablehlo.composite "stablehlo_tools.all_reduce" %[[X]], %[[ROOT]]
// CHECK-SAME: {decomposition = @stablehlo_tools.all_reduce.0, stablehlo_tools.token_link}
// CHECK-NEXT: %[[COMPOSITE2:.+]]:2 = stablehlo.composite "stablehlo_tools.all_reduce" %[[X]], %[[COMPOSITE]]#1
// CHECK-SAME: {decomposition = @stablehlo_tools.all_reduce.1, stablehlo_tools.token_link}
// CHECK-NEXT: return %[[COMPOSITE]]#0, %[[COMPOSITE2]]#0 :
func.func @other_reduction(%x: tensor<f32>) -> (tensor<f32>, tensor<f32>) {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %sum = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %sum : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<f32>) -> tensor<f32>
  %1 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %max = stablehlo.maximum %a, %b : tensor<f32>
    stablehlo.return %max : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<f32>) -> tensor<f32>
  return %0, %1 : tensor<f32>, tensor<f32>
}

// CHECK-LABEL: func.func private @stablehlo_tools.all_reduce.0
// CHECK: stablehlo.add

// CHECK-LABEL: func.func private @stablehlo_tools.all_reduce.1
// CHECK: stablehlo.maximum

// -----

// Names that are taken are passed over.
// CHECK-LABEL: func.func @name_is_taken
// CHECK-SAME: (%[[X:.+]]: tensor<f32>) -> tensor<f32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[COMPOSITE:.+]]:2 = stablehlo.composite "stablehlo_tools.collective_permute" %[[X]], %[[ROOT]]
// CHECK-SAME: {decomposition = @stablehlo_tools.collective_permute.1, stablehlo_tools.token_link}
// CHECK-NEXT: return %[[COMPOSITE]]#0 :
func.func @name_is_taken(%x: tensor<f32>) -> tensor<f32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}

// CHECK-LABEL: func.func private @stablehlo_tools.collective_permute.0
// CHECK-SAME: ()
// CHECK-NEXT: return
func.func private @stablehlo_tools.collective_permute.0() {
  return
}

// CHECK-LABEL: func.func private @stablehlo_tools.collective_permute.1
// CHECK: "stablehlo.collective_permute"

// -----

// Composites stand on the same carries as barriers do.
// CHECK-LABEL: func.func @composite_in_a_loop
// CHECK-SAME: (%[[P:.+]]: tensor<i1>, %[[X:.+]]: tensor<f32>) -> tensor<f32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[LOOP:.+]]:2 = stablehlo.while(%[[ITER:.+]] = %[[X]], %[[TOKEN:.+]] = %[[ROOT]])
// CHECK-SAME: : tensor<f32>, !stablehlo.token attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: cond {
// CHECK-NEXT: stablehlo.return %[[P]] :
// CHECK-NEXT: } do {
// CHECK-NEXT: %[[COMPOSITE:.+]]:2 = stablehlo.composite "stablehlo_tools.collective_permute" %[[ITER]], %[[TOKEN]]
// CHECK-SAME: {decomposition = @stablehlo_tools.collective_permute.0, stablehlo_tools.token_link}
// CHECK-NEXT: stablehlo.return %[[COMPOSITE]]#0, %[[COMPOSITE]]#1 :
// CHECK: return %[[LOOP]]#0 :
func.func @composite_in_a_loop(%p: tensor<i1>, %x: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.while(%v = %x) : tensor<f32>
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %1 = "stablehlo.collective_permute"(%v) {
        source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
      } : (tensor<f32>) -> tensor<f32>
      stablehlo.return %1 : tensor<f32>
    }
  return %0 : tensor<f32>
}

// -----

// An op with a token of its own, and an async pair, are tied as in the barrier form.
// CHECK-LABEL: func.func @not_a_composite
// CHECK-SAME: (%[[X:.+]]: tensor<f32>, %[[TOKEN:.+]]: !stablehlo.token) -> (tensor<f32>, !stablehlo.token)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[JOIN:.+]] = stablehlo.after_all %[[TOKEN]], %[[ROOT]] {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[SEND:.+]] = "stablehlo.send"(%[[X]], %[[JOIN]])
// CHECK-NEXT: %[[AFTER:.+]] = stablehlo.after_all %[[SEND]] {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[AFTER]] :
// CHECK-NEXT: %[[START:.+]] = "stablehlo.async_start"(%[[IN]]#0) ({
// CHECK-NEXT: ^bb0(%[[ARG:.+]]: tensor<f32>):
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[ARG]])
// CHECK-NEXT: stablehlo.return %[[PERMUTE]] :
// CHECK-NEXT: })
// CHECK-NEXT: %[[DONE:.+]] = "stablehlo.async_done"(%[[START]])
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[DONE]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[SEND]] :
func.func @not_a_composite(
    %x: tensor<f32>, %token: !stablehlo.token
) -> (tensor<f32>, !stablehlo.token) {
  %0 = "stablehlo.send"(%x, %token) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>, !stablehlo.token) -> !stablehlo.token
  %1 = "stablehlo.async_start"(%x) ({
  ^bb0(%a: tensor<f32>):
    %2 = "stablehlo.collective_permute"(%a) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<f32>) -> tensor<f32>
    stablehlo.return %2 : tensor<f32>
  }) : (tensor<f32>) -> !stablehlo.future<tensor<f32>>
  %3 = "stablehlo.async_done"(%1) : (!stablehlo.future<tensor<f32>>) -> tensor<f32>
  return %3, %0 : tensor<f32>, !stablehlo.token
}

// -----

// The second composite takes the token that the first returns.
// CHECK-LABEL: func.func @two_in_program_order
// CHECK-SAME: (%[[X:.+]]: tensor<f32>, %[[Y:.+]]: tensor<f32>) -> (tensor<f32>, tensor<f32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[COMPOSITE:.+]]:2 = stablehlo.composite "stablehlo_tools.collective_permute" %[[X]], %[[ROOT]]
// CHECK-SAME: {decomposition = @stablehlo_tools.collective_permute.0, stablehlo_tools.token_link}
// CHECK-NEXT: %[[COMPOSITE2:.+]]:2 = stablehlo.composite "stablehlo_tools.collective_permute" %[[Y]], %[[COMPOSITE]]#1
// CHECK-SAME: {decomposition = @stablehlo_tools.collective_permute.0, stablehlo_tools.token_link}
// CHECK-NEXT: return %[[COMPOSITE]]#0, %[[COMPOSITE2]]#0 :
func.func @two_in_program_order(%x: tensor<f32>, %y: tensor<f32>) -> (tensor<f32>, tensor<f32>) {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  %1 = "stablehlo.collective_permute"(%y) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0, %1 : tensor<f32>, tensor<f32>
}

// -----

// Reductions that differ deep inside only share no decomposition.
// CHECK-LABEL: func.func @unlike_in_a_nested_region
// CHECK: stablehlo.composite "stablehlo_tools.all_reduce" {{.+}} {decomposition = @stablehlo_tools.all_reduce.0
// CHECK: stablehlo.composite "stablehlo_tools.all_reduce" {{.+}} {decomposition = @stablehlo_tools.all_reduce.1
// LOWERED-LABEL: func.func @unlike_in_a_nested_region
// LOWERED: call @stablehlo_tools.all_reduce.0(
// LOWERED: call @stablehlo_tools.all_reduce.1(
func.func @unlike_in_a_nested_region(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %p = stablehlo.compare LT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1> loc(unknown)
    %c = "stablehlo.if"(%p) ({
      %d = stablehlo.add %a, %b : tensor<f32> loc(unknown)
      stablehlo.return %d : tensor<f32> loc(unknown)
    }, {
      stablehlo.return %b : tensor<f32> loc(unknown)
    }) : (tensor<i1>) -> tensor<f32> loc(unknown)
    stablehlo.return %c : tensor<f32> loc(unknown)
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  %1 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %p = stablehlo.compare LT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1> loc(unknown)
    %c = "stablehlo.if"(%p) ({
      %d = stablehlo.maximum %a, %b : tensor<f32> loc(unknown)
      stablehlo.return %d : tensor<f32> loc(unknown)
    }, {
      stablehlo.return %b : tensor<f32> loc(unknown)
    }) : (tensor<i1>) -> tensor<f32> loc(unknown)
    stablehlo.return %c : tensor<f32> loc(unknown)
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  return %0, %1 : tensor<4xf32>, tensor<4xf32>
}
