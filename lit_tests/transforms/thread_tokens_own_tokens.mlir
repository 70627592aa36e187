// RUN: stablehlo-tools opt %s -p thread-tokens --split-input-file | filecheck %s --enable-var-scope

// Ops that have a token of their own: the chain enters by after_all, which keeps the user's token,
// and goes on from the op's token result.

// A send needs no barrier; what its token joins is the user's token and the chain's.
// CHECK-LABEL: func.func @send
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>) -> !stablehlo.token
// CHECK-NEXT: %[[TOKEN:.+]] = stablehlo.create_token :
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[JOIN:.+]] = stablehlo.after_all %[[TOKEN]], %[[ROOT]] {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[SEND:.+]] = "stablehlo.send"(%[[X]], %[[JOIN]])
// CHECK-NEXT: %[[AFTER:.+]] = stablehlo.after_all %[[SEND]] {stablehlo_tools.token_link} :
// CHECK-NEXT: return %[[SEND]] :
func.func @send(%x: tensor<2xf32>) -> !stablehlo.token {
  %token = stablehlo.create_token : !stablehlo.token
  %0 = "stablehlo.send"(%x, %token) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token
  return %0 : !stablehlo.token
}

// -----

// A collective after a recv waits for the recv, though the recv's token reaches nothing else.
// CHECK-LABEL: func.func @recv_before_collective
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>) -> (tensor<2xf32>, tensor<4xf32>)
// CHECK-NEXT: %[[TOKEN:.+]] = stablehlo.after_all : !stablehlo.token
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[JOIN:.+]] = stablehlo.after_all %[[TOKEN]], %[[ROOT]] {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[RECV:.+]]:2 = "stablehlo.recv"(%[[JOIN]])
// CHECK-NEXT: %[[AFTER:.+]] = stablehlo.after_all %[[RECV]]#1 {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[AFTER]] :
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[GATHER]], %[[IN]]#1 :
// CHECK-NEXT: return %[[RECV]]#0, %[[OUT]]#0 :
func.func @recv_before_collective(%x: tensor<2xf32>) -> (tensor<2xf32>, tensor<4xf32>) {
  %token = stablehlo.after_all : !stablehlo.token
  %0:2 = "stablehlo.recv"(%token) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  %1 = "stablehlo.all_gather"(%x) {
    all_gather_dim = 0 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<4xf32>
  return %0#0, %1 : tensor<2xf32>, tensor<4xf32>
}

// -----

// A chain of the user's is kept as it is, and joined where it communicates.
// CHECK-LABEL: func.func @user_chain_is_kept
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>) -> tensor<2xf32>
// CHECK-NEXT: %[[TOKEN:.+]] = stablehlo.after_all : !stablehlo.token
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[JOIN:.+]] = stablehlo.after_all %[[TOKEN]], %[[ROOT]] {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[SEND:.+]] = "stablehlo.send"(%[[X]], %[[JOIN]])
// CHECK-NEXT: %[[AFTER:.+]] = stablehlo.after_all %[[SEND]] {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier %[[X]], %[[SEND]] :
// CHECK-NEXT: %[[JOIN2:.+]] = stablehlo.after_all %[[OUT]]#1, %[[AFTER]] {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[RECV:.+]]:2 = "stablehlo.recv"(%[[JOIN2]])
// CHECK-NEXT: %[[AFTER2:.+]] = stablehlo.after_all %[[RECV]]#1 {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[ADD:.+]] = stablehlo.add %[[OUT]]#0, %[[RECV]]#0 :
// CHECK-NEXT: return %[[ADD]] :
func.func @user_chain_is_kept(%x: tensor<2xf32>) -> tensor<2xf32> {
  %token = stablehlo.after_all : !stablehlo.token
  %0 = "stablehlo.send"(%x, %token) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token
  %1:2 = stablehlo.optimization_barrier %x, %0 : tensor<2xf32>, !stablehlo.token
  %2:2 = "stablehlo.recv"(%1#1) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  %3 = stablehlo.add %1#0, %2#0 : tensor<2xf32>
  return %3 : tensor<2xf32>
}

// -----

// Host transfers stand in the same order as collectives.
// CHECK-LABEL: func.func @infeed_outfeed
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[TOKEN:.+]]: !stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[JOIN:.+]] = stablehlo.after_all %[[TOKEN]], %[[ROOT]] {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[INFEED:.+]]:2 = "stablehlo.infeed"(%[[JOIN]])
// CHECK-NEXT: %[[AFTER:.+]] = stablehlo.after_all %[[INFEED]]#1 {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[AFTER]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: %[[JOIN2:.+]] = stablehlo.after_all %[[INFEED]]#1, %[[OUT]]#1 {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[OUTFEED:.+]] = "stablehlo.outfeed"(%[[OUT]]#0, %[[JOIN2]])
// CHECK-NEXT: %[[AFTER2:.+]] = stablehlo.after_all %[[OUTFEED]] {stablehlo_tools.token_link} :
// CHECK-NEXT: return %[[INFEED]]#0, %[[OUTFEED]] :
func.func @infeed_outfeed(
    %x: tensor<2xf32>, %token: !stablehlo.token
) -> (tensor<2xf32>, !stablehlo.token) {
  %0:2 = "stablehlo.infeed"(%token) {
    infeed_config = "", layout = [[0]]
  } : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  %1 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %2 = "stablehlo.outfeed"(%1, %0#1) {
    outfeed_config = ""
  } : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token
  return %0#0, %2 : tensor<2xf32>, !stablehlo.token
}

// -----

// A custom call with a side effect may communicate: it is tied as a collective is.
// CHECK-LABEL: func.func @custom_call_with_side_effect
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[Y:.+]]: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[CUSTOM:.+]] = stablehlo.custom_call @exchange(%[[IN]]#0) {has_side_effect = true}
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[CUSTOM]], %[[IN]]#1 :
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[Y]], %[[OUT]]#1 :
// CHECK-NEXT: %[[CUSTOM2:.+]] = stablehlo.custom_call @exchange(%[[IN2]]#0) {has_side_effect = true}
// CHECK-NEXT: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[CUSTOM2]], %[[IN2]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT2]]#0 :
func.func @custom_call_with_side_effect(
    %x: tensor<2xf32>, %y: tensor<2xf32>
) -> (tensor<2xf32>, tensor<2xf32>) {
  %0 = stablehlo.custom_call @exchange(%x) {has_side_effect = true} : (tensor<2xf32>) -> tensor<2xf32>
  %1 = stablehlo.custom_call @exchange(%y) {has_side_effect = true} : (tensor<2xf32>) -> tensor<2xf32>
  return %0, %1 : tensor<2xf32>, tensor<2xf32>
}

// -----

// An ordered effect of JAX: the custom call has a token, wherever it stands among the values.
// CHECK-LABEL: func.func @custom_call_with_token
// CHECK-SAME: (%[[TOKEN:.+]]: !stablehlo.token, %[[X:.+]]: tensor<2xf32>)
// CHECK-SAME: -> (!stablehlo.token, tensor<2xf32>, tensor<4xf32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[GATHER]], %[[IN]]#1 :
// CHECK-NEXT: %[[JOIN:.+]] = stablehlo.after_all %[[TOKEN]], %[[OUT]]#1 {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[CUSTOM:.+]]:2 = stablehlo.custom_call @ordered(%[[JOIN]], %[[X]])
// CHECK-NEXT: %[[AFTER:.+]] = stablehlo.after_all %[[CUSTOM]]#0 {stablehlo_tools.token_link} :
// CHECK-NEXT: return %[[CUSTOM]]#0, %[[CUSTOM]]#1, %[[OUT]]#0 :
func.func @custom_call_with_token(
    %token: !stablehlo.token, %x: tensor<2xf32>
) -> (!stablehlo.token, tensor<2xf32>, tensor<4xf32>) {
  %0 = "stablehlo.all_gather"(%x) {
    all_gather_dim = 0 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<4xf32>
  %1:2 = stablehlo.custom_call @ordered(%token, %x) : (!stablehlo.token, tensor<2xf32>) -> (!stablehlo.token, tensor<2xf32>)
  return %1#0, %1#1, %0 : !stablehlo.token, tensor<2xf32>, tensor<4xf32>
}

// -----

// A token that only goes in: the chain leaves beside the results instead.
// CHECK-LABEL: func.func @custom_call_that_takes_a_token
// CHECK-SAME: (%[[TOKEN:.+]]: !stablehlo.token, %[[X:.+]]: tensor<2xf32>) -> tensor<2xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[JOIN:.+]] = stablehlo.after_all %[[TOKEN]], %[[ROOT]] {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[CUSTOM:.+]] = stablehlo.custom_call @sink(%[[JOIN]], %[[X]])
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[CUSTOM]], %[[ROOT]] :
// CHECK-NEXT: return %[[OUT]]#0 :
func.func @custom_call_that_takes_a_token(
    %token: !stablehlo.token, %x: tensor<2xf32>
) -> tensor<2xf32> {
  %0 = stablehlo.custom_call @sink(%token, %x) : (!stablehlo.token, tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

// A token that only comes out: the chain enters beside the operands instead.
// CHECK-LABEL: func.func @custom_call_that_gives_a_token
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>) -> (tensor<2xf32>, !stablehlo.token)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[CUSTOM:.+]]:2 = stablehlo.custom_call @source(%[[IN]]#0)
// CHECK-NEXT: %[[AFTER:.+]] = stablehlo.after_all %[[CUSTOM]]#1 {stablehlo_tools.token_link} :
// CHECK-NEXT: return %[[CUSTOM]]#0, %[[CUSTOM]]#1 :
func.func @custom_call_that_gives_a_token(%x: tensor<2xf32>) -> (tensor<2xf32>, !stablehlo.token) {
  %0:2 = stablehlo.custom_call @source(%x) : (tensor<2xf32>) -> (tensor<2xf32>, !stablehlo.token)
  return %0#0, %0#1 : tensor<2xf32>, !stablehlo.token
}

// -----

// A ragged all-to-all is a custom call without a side-effect flag, and a collective all the same.
// CHECK-LABEL: func.func @ragged_all_to_all
// CHECK-SAME: (%[[X:.+]]: tensor<8xf32>, %[[I:.+]]: tensor<2xi64>) -> tensor<8xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:7 = stablehlo.optimization_barrier {stablehlo_tools.token_link}
// CHECK-SAME: %[[X]], %[[X]], %[[I]], %[[I]], %[[I]], %[[I]], %[[ROOT]] :
// CHECK-NEXT: %[[RAGGED:.+]] = stablehlo.custom_call @ragged_all_to_all(%[[IN]]#0, %[[IN]]#1, %[[IN]]#2,
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[RAGGED]], %[[IN]]#6 :
// CHECK-NEXT: return %[[OUT]]#0 :
func.func @ragged_all_to_all(%x: tensor<8xf32>, %i: tensor<2xi64>) -> tensor<8xf32> {
  %0 = stablehlo.custom_call @ragged_all_to_all(%x, %x, %i, %i, %i, %i) {
    api_version = 4 : i32,
    backend_config = {channel_id = 1 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}
  } : (tensor<8xf32>, tensor<8xf32>, tensor<2xi64>, tensor<2xi64>, tensor<2xi64>, tensor<2xi64>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}

// -----

// Neither a side effect nor a token: the custom call is taken to be pure.
// CHECK-LABEL: func.func @pure_custom_call
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>) -> tensor<2xf32>
// CHECK-NEXT: %[[CUSTOM:.+]] = stablehlo.custom_call @pure(%[[X]])
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[CUSTOM]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0 :
func.func @pure_custom_call(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.custom_call @pure(%x) : (tensor<2xf32>) -> tensor<2xf32>
  %1 = "stablehlo.collective_permute"(%0) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %1 : tensor<2xf32>
}

// -----

// Custom calls that only annotate the program are no part of the order, side effect or not.
// CHECK-LABEL: func.func @annotations
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[P:.+]]: tensor<i1>) -> tensor<2xf32>
// CHECK-NEXT: stablehlo.custom_call @shape_assertion(%[[P]]) {has_side_effect = true} : (tensor<i1>) -> ()
// CHECK-NEXT: %[[CUSTOM:.+]] = stablehlo.custom_call @Sharding(%[[X]]) {has_side_effect = true}
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[CUSTOM]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: %[[CUSTOM2:.+]] = stablehlo.custom_call @annotate_device_placement(%[[IN2]]#0) {has_side_effect = true}
// CHECK-NEXT: return %[[CUSTOM2]] :
func.func @annotations(%x: tensor<2xf32>, %p: tensor<i1>) -> tensor<2xf32> {
  stablehlo.custom_call @shape_assertion(%p) {has_side_effect = true} : (tensor<i1>) -> ()
  %0 = stablehlo.custom_call @Sharding(%x) {has_side_effect = true} : (tensor<2xf32>) -> tensor<2xf32>
  %1 = "stablehlo.collective_permute"(%0) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %2 = stablehlo.custom_call @annotate_device_placement(%1) {has_side_effect = true} : (tensor<2xf32>) -> tensor<2xf32>
  return %2 : tensor<2xf32>
}
