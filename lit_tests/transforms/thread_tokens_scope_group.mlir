// RUN: stablehlo-tools opt %s -p 'thread-tokens{scope=group}' --split-input-file | filecheck %s --enable-var-scope

// `scope=group` keeps a chain for each set of collectives whose participants never meet the others'.

// Disjoint participants: two chains, and neither waits for the other.
module attributes {mhlo.num_replicas = 4 : i32} {
// CHECK-LABEL: func.func @disjoint
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[Y:.+]]: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: %[[ROOT2:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[Y]], %[[ROOT2]] :
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
// CHECK-NEXT: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE2]], %[[IN2]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT2]]#0 :
func.func @disjoint(%x: tensor<2xf32>, %y: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %1 = "stablehlo.collective_permute"(%y) {
    source_target_pairs = dense<[[2, 3]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0, %1 : tensor<2xf32>, tensor<2xf32>
}
}

// -----

// A third collective that meets both makes one chain of all, before it and after it.
module attributes {mhlo.num_replicas = 4 : i32} {
// CHECK-LABEL: func.func @met_through_a_third
// CHECK-SAME: (%[[X:.+]]: tensor<f32>) -> (tensor<f32>, tensor<f32>, tensor<f32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[OUT]]#1 :
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
// CHECK-NEXT: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE2]], %[[IN2]]#1 :
// CHECK-NEXT: %[[IN3:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[OUT2]]#1 :
// CHECK-NEXT: %[[PERMUTE3:.+]] = "stablehlo.collective_permute"(%[[IN3]]#0)
// CHECK-NEXT: %[[OUT3:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE3]], %[[IN3]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT2]]#0, %[[OUT3]]#0 :
func.func @met_through_a_third(%x: tensor<f32>) -> (tensor<f32>, tensor<f32>, tensor<f32>) {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  %1 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[2, 3]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  %2 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[1, 2]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0, %1, %2 : tensor<f32>, tensor<f32>, tensor<f32>
}
}

// -----

// Several groups in one op: all its participants are in one chain, since one op is one place in
// the program of each.
module attributes {mhlo.num_replicas = 4 : i32} {
// CHECK-LABEL: func.func @groups_of_one_op
// CHECK-SAME: (%[[X:.+]]: tensor<f32>) -> (tensor<f32>, tensor<f32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[BROADCAST:.+]] = "stablehlo.collective_broadcast"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[BROADCAST]], %[[IN]]#1 :
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[OUT]]#1 :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
// CHECK-NEXT: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN2]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT2]]#0 :
func.func @groups_of_one_op(%x: tensor<f32>) -> (tensor<f32>, tensor<f32>) {
  %0 = "stablehlo.collective_broadcast"(%x) {
    replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  %1 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[2, 3]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0, %1 : tensor<f32>, tensor<f32>
}
}

// -----

// Whom a custom call talks to is not known: it meets everyone.
module attributes {mhlo.num_replicas = 4 : i32} {
// CHECK-LABEL: func.func @custom_call_meets_all
// CHECK-SAME: (%[[X:.+]]: tensor<f32>) -> (tensor<f32>, tensor<f32>, tensor<f32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[OUT]]#1 :
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
// CHECK-NEXT: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE2]], %[[IN2]]#1 :
// CHECK-NEXT: %[[IN3:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[OUT2]]#1 :
// CHECK-NEXT: %[[CUSTOM:.+]] = stablehlo.custom_call @exchange(%[[IN3]]#0) {has_side_effect = true}
// CHECK-NEXT: %[[OUT3:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[CUSTOM]], %[[IN3]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT2]]#0, %[[OUT3]]#0 :
func.func @custom_call_meets_all(%x: tensor<f32>) -> (tensor<f32>, tensor<f32>, tensor<f32>) {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  %1 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[2, 3]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  %2 = stablehlo.custom_call @exchange(%x) {has_side_effect = true} : (tensor<f32>) -> tensor<f32>
  return %0, %1, %2 : tensor<f32>, tensor<f32>, tensor<f32>
}
}

// -----

// A loop carries the tokens of the chains that pass through it, and no other.
module attributes {mhlo.num_replicas = 6 : i32} {
// CHECK-LABEL: func.func @loop_with_two_of_three
// CHECK-SAME: (%[[P:.+]]: tensor<i1>, %[[X:.+]]: tensor<f32>) -> (tensor<f32>, tensor<f32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: %[[ROOT2:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[ROOT3:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[LOOP:.+]]:3 = stablehlo.while(%[[ITER:.+]] = %[[X]], %[[TOKEN:.+]] = %[[ROOT2]], %[[TOKEN2:.+]] = %[[ROOT3]])
// CHECK-SAME: : tensor<f32>, !stablehlo.token, !stablehlo.token
// CHECK-SAME: attributes {stablehlo_tools.tokens_carried = 2 : i64}
// CHECK-NEXT: cond {
// CHECK-NEXT: stablehlo.return %[[P]] :
// CHECK-NEXT: } do {
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ITER]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
// CHECK-NEXT: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE2]], %[[IN2]]#1 :
// CHECK-NEXT: %[[IN3:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[OUT2]]#0, %[[TOKEN2]] :
// CHECK-NEXT: %[[PERMUTE3:.+]] = "stablehlo.collective_permute"(%[[IN3]]#0)
// CHECK-NEXT: %[[OUT3:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE3]], %[[IN3]]#1 :
// CHECK-NEXT: stablehlo.return %[[OUT3]]#0, %[[OUT2]]#1, %[[OUT3]]#1 :
// CHECK: return %[[OUT]]#0, %[[LOOP]]#0 :
func.func @loop_with_two_of_three(%p: tensor<i1>, %x: tensor<f32>) -> (tensor<f32>, tensor<f32>) {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  %1 = stablehlo.while(%v = %x) : tensor<f32>
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %2 = "stablehlo.collective_permute"(%v) {
        source_target_pairs = dense<[[2, 3]]> : tensor<1x2xi64>
      } : (tensor<f32>) -> tensor<f32>
      %3 = "stablehlo.collective_permute"(%2) {
        source_target_pairs = dense<[[4, 5]]> : tensor<1x2xi64>
      } : (tensor<f32>) -> tensor<f32>
      stablehlo.return %3 : tensor<f32>
    }
  return %0, %1 : tensor<f32>, tensor<f32>
}
}

// -----

// A call passes the chains of its callee.
module attributes {mhlo.num_replicas = 4 : i32} {
// CHECK-LABEL: func.func @call_with_one_of_two
// CHECK-SAME: (%[[X:.+]]: tensor<f32>) -> (tensor<f32>, tensor<f32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: %[[ROOT2:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[CALL:.+]]:2 = call @callee(%[[X]], %[[ROOT2]]) {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: return %[[OUT]]#0, %[[CALL]]#0 :
func.func @call_with_one_of_two(%x: tensor<f32>) -> (tensor<f32>, tensor<f32>) {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  %1 = call @callee(%x) : (tensor<f32>) -> tensor<f32>
  return %0, %1 : tensor<f32>, tensor<f32>
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
    source_target_pairs = dense<[[2, 3]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}
}

// -----

// Collectives along one axis of a mesh have a group in every row: they meet those along the other.
module attributes {mhlo.num_partitions = 4 : i32} {
sdy.mesh @mesh = <["x"=2, "y"=2]>
// CHECK-LABEL: func.func @axes_of_one_mesh_meet
// CHECK-SAME: (%[[X:.+]]: tensor<f32>) -> (tensor<f32>, tensor<f32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[BROADCAST:.+]] = "stablehlo.collective_broadcast"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[BROADCAST]], %[[IN]]#1 :
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[OUT]]#1 :
// CHECK-NEXT: %[[BROADCAST2:.+]] = "stablehlo.collective_broadcast"(%[[IN2]]#0)
// CHECK-NEXT: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[BROADCAST2]], %[[IN2]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT2]]#0 :
func.func @axes_of_one_mesh_meet(%x: tensor<f32>) -> (tensor<f32>, tensor<f32>) {
  %0 = "stablehlo.collective_broadcast"(%x) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
    replica_groups = #stablehlo.replica_group_mesh_axes<
      mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">]>
  } : (tensor<f32>) -> tensor<f32>
  %1 = "stablehlo.collective_broadcast"(%x) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
    replica_groups = #stablehlo.replica_group_mesh_axes<
      mesh = @mesh, axes = [#stablehlo.axis_ref<name = "y">]>
  } : (tensor<f32>) -> tensor<f32>
  return %0, %1 : tensor<f32>, tensor<f32>
}
}
