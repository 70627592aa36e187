// RUN: stablehlo-tools opt %s -p strip-tokens --split-input-file | filecheck %s --enable-var-scope

// RUN: stablehlo-tools opt %s -p strip-tokens --split-input-file | not grep stablehlo_tools

// The inverse of threading, in each form, through text: what comes out is what went in.
// RUN: cat %S/thread_tokens.mlir %{inputs}/separator.txt %S/thread_tokens_own_tokens.mlir \
// RUN:   %{inputs}/separator.txt %S/thread_tokens_control_flow.mlir \
// RUN:   %{inputs}/separator.txt %S/thread_tokens_calls.mlir \
// RUN:   %{inputs}/separator.txt %S/thread_tokens_sdy.mlir \
// RUN:   %{inputs}/separator.txt %S/thread_tokens_shape_polymorphism.mlir \
// RUN:   %{inputs}/separator.txt %S/thread_tokens_minimal.mlir \
// RUN:   %{inputs}/separator.txt %S/thread_tokens_scope_group.mlir \
// RUN:   %{inputs}/separator.txt %S/thread_tokens_composite.mlir > %t.mlir
// RUN: stablehlo-tools opt %t.mlir --split-input-file > %t.before
// RUN: filecheck %s --input-file %t.before --check-prefix=BEFORE
// RUN: not grep stablehlo_tools.token %t.before
// RUN: stablehlo-tools opt %t.mlir -p thread-tokens --split-input-file > %t.threaded
// RUN: stablehlo-tools opt %t.threaded -p strip-tokens --split-input-file | diff -u %t.before -
// RUN: stablehlo-tools opt %t.mlir -p 'thread-tokens{form=composite}' --split-input-file > %t.threaded
// RUN: stablehlo-tools opt %t.threaded -p strip-tokens --split-input-file | diff -u %t.before -
// RUN: stablehlo-tools opt %t.mlir -p 'thread-tokens{scope=group minimal}' --split-input-file > %t.threaded
// RUN: stablehlo-tools opt %t.threaded -p strip-tokens --split-input-file | diff -u %t.before -

// Locations come back too.
// RUN: stablehlo-tools opt %t.mlir --print-locations --split-input-file > %t.before
// RUN: stablehlo-tools opt %t.mlir -p 'thread-tokens{form=composite},strip-tokens' \
// RUN:   --print-locations --split-input-file | diff -u %t.before -

// Cleaning up in between does no harm: what is left is what cleaning up alone leaves.
// RUN: stablehlo-tools opt %t.mlir -p cse --split-input-file > %t.before
// RUN: stablehlo-tools opt %t.mlir -p 'thread-tokens{scope=group},cse,strip-tokens' \
// RUN:   --split-input-file | diff -u %t.before -

// BEFORE-COUNT-80: func.func

// Barriers and roots go; the collective takes and gives what it took and gave.
// CHECK-LABEL: func.func @barriers
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>) -> tensor<4xf32>
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[X]])
// CHECK-NEXT: return %[[GATHER]] :
func.func @barriers(%x: tensor<2xf32>) -> tensor<4xf32> {
  %0 = stablehlo.after_all {stablehlo_tools.token_link} : !stablehlo.token
  %1:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %x, %0 : tensor<2xf32>, !stablehlo.token
  %2 = "stablehlo.all_gather"(%1#0) {
    all_gather_dim = 0 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<4xf32>
  %3:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %2, %1#1 : tensor<4xf32>, !stablehlo.token
  return %3#0 : tensor<4xf32>
}

// -----

// Of a join before an op that has a token of its own, that token stays.
// CHECK-LABEL: func.func @joins
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[TOKEN:.+]]: !stablehlo.token) -> !stablehlo.token
// CHECK-NEXT: %[[SEND:.+]] = "stablehlo.send"(%[[X]], %[[TOKEN]])
// CHECK-NEXT: return %[[SEND]] :
func.func @joins(%x: tensor<2xf32>, %token: !stablehlo.token) -> !stablehlo.token {
  %0 = stablehlo.after_all {stablehlo_tools.token_link} : !stablehlo.token
  %1 = stablehlo.after_all %token, %0 {stablehlo_tools.token_link} : !stablehlo.token
  %2 = "stablehlo.send"(%x, %1) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token
  %3 = stablehlo.after_all %2 {stablehlo_tools.token_link} : !stablehlo.token
  return %2 : !stablehlo.token
}

// -----

// As many carries go as the mark says; those of the user's that are tokens too stay.
// CHECK-LABEL: func.func @carries
// CHECK-SAME: (%[[P:.+]]: tensor<i1>, %[[X:.+]]: tensor<f32>, %[[TOKEN:.+]]: !stablehlo.token) -> !stablehlo.token
// CHECK-NEXT: %[[LOOP:.+]]:2 = stablehlo.while(%[[ITER:.+]] = %[[X]], %[[TOKEN2:.+]] = %[[TOKEN]])
// CHECK-SAME: : tensor<f32>, !stablehlo.token{{$}}
// CHECK-NEXT: cond {
// CHECK-NEXT: stablehlo.return %[[P]] :
// CHECK-NEXT: } do {
// CHECK-NEXT: stablehlo.return %[[ITER]], %[[TOKEN2]] :
// CHECK: return %[[LOOP]]#1 :
func.func @carries(%p: tensor<i1>, %x: tensor<f32>, %token: !stablehlo.token) -> !stablehlo.token {
  %0 = stablehlo.after_all {stablehlo_tools.token_link} : !stablehlo.token
  %1:4 = stablehlo.while(%v = %x, %t = %token, %a = %0, %b = %0)
      : tensor<f32>, !stablehlo.token, !stablehlo.token, !stablehlo.token
    attributes {stablehlo_tools.tokens_carried = 2 : i64}
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      stablehlo.return %v, %t, %a, %b : tensor<f32>, !stablehlo.token, !stablehlo.token, !stablehlo.token
    }
  return %1#1 : !stablehlo.token
}

// -----

// Arguments, results and their attributes go with the token of a call.
// CHECK-LABEL: func.func @calls
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>) -> tensor<2xf32>
// CHECK-NEXT: %[[CALL:.+]] = call @callee(%[[X]])
// CHECK-NEXT: return %[[CALL]] :
func.func @calls(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.after_all {stablehlo_tools.token_link} : !stablehlo.token
  %1:2 = call @callee(%x, %0) {stablehlo_tools.tokens_carried = 1 : i64}
    : (tensor<2xf32>, !stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  return %1#0 : tensor<2xf32>
}

// CHECK-LABEL: func.func private @callee
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32> {user.note = "kept"}) -> (tensor<2xf32> {user.note = "kept"})
// CHECK-NEXT: return %[[X]] :
func.func private @callee(
    %x: tensor<2xf32> {user.note = "kept"}, %token: !stablehlo.token {user.note = "dropped"}
) -> (tensor<2xf32> {user.note = "kept"}, !stablehlo.token)
    attributes {stablehlo_tools.tokens_carried = 1 : i64} {
  return %x, %token : tensor<2xf32>, !stablehlo.token
}

// -----

// A composite becomes what its decomposition holds; decompositions go, those nobody uses too.
// CHECK-LABEL: func.func @composites
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>) -> tensor<2xf32>
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[X]])
// CHECK-NEXT: return %[[PERMUTE]] :
func.func @composites(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.after_all {stablehlo_tools.token_link} : !stablehlo.token
  %1:2 = stablehlo.composite "stablehlo_tools.collective_permute" %x, %0 {
    decomposition = @stablehlo_tools.collective_permute.0, stablehlo_tools.token_link
  } : (tensor<2xf32>, !stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
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

func.func private @stablehlo_tools.collective_permute.1(
    %x: tensor<2xf32>, %token: !stablehlo.token
) -> (tensor<2xf32>, !stablehlo.token) attributes {stablehlo_tools.token_link} {
  return %x, %token : tensor<2xf32>, !stablehlo.token
}

// -----

// Half a chain is stripped as well: whatever is marked goes.
// CHECK-LABEL: func.func @half_a_chain
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>) -> tensor<2xf32>
// CHECK-NEXT: return %[[X]] :
func.func @half_a_chain(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.after_all {stablehlo_tools.token_link} : !stablehlo.token
  %1:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %x, %0 : tensor<2xf32>, !stablehlo.token
  return %1#0 : tensor<2xf32>
}
