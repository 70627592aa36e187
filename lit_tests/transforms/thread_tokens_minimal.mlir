// RUN: stablehlo-tools opt %s -p 'thread-tokens{minimal scope=group}' --split-input-file | filecheck %s --enable-var-scope

// `minimal` leaves out a link where dataflow orders two neighbours of a chain already.

// Nothing comes before the first collective of a public function, nothing after the last.
// CHECK-LABEL: func.func @only_between
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[Y:.+]]: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[X]])
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[ROOT]] :
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[Y]], %[[OUT]]#1 :
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: return %[[OUT]]#0, %[[PERMUTE2]] :
func.func @only_between(%x: tensor<2xf32>, %y: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %1 = "stablehlo.collective_permute"(%y) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0, %1 : tensor<2xf32>, tensor<2xf32>
}

// -----

// One collective alone has no order to keep.
// CHECK-LABEL: func.func @one_alone
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>) -> tensor<2xf32>
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[X]])
// CHECK-NEXT: return %[[PERMUTE]] :
func.func @one_alone(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

// Floats that are added and multiplied keep their dependence, NaN being what it is: no link.
// CHECK-LABEL: func.func @dataflow_of_floats
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>) -> tensor<2xf32>
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[X]])
// CHECK-NEXT: %[[MULTIPLY:.+]] = stablehlo.multiply %[[PERMUTE]], %[[X]] :
// CHECK-NEXT: %[[ADD:.+]] = stablehlo.add %[[MULTIPLY]], %[[X]] :
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[ADD]])
// CHECK-NEXT: return %[[PERMUTE2]] :
func.func @dataflow_of_floats(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %1 = stablehlo.multiply %0, %x : tensor<2xf32>
  %2 = stablehlo.add %1, %x : tensor<2xf32>
  %3 = "stablehlo.collective_permute"(%2) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %3 : tensor<2xf32>
}

// -----

// A product of integers may fold to zero, and the dependence with it: the link stays.
// CHECK-LABEL: func.func @integers_may_fold
// CHECK-SAME: (%[[X:.+]]: tensor<2xi32>) -> tensor<2xi32>
// CHECK-NEXT: %[[C:.+]] = stablehlo.constant dense<0>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[X]])
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[ROOT]] :
// CHECK-NEXT: %[[MULTIPLY:.+]] = stablehlo.multiply %[[OUT]]#0, %[[C]] :
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[MULTIPLY]], %[[OUT]]#1 :
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: return %[[PERMUTE2]] :
func.func @integers_may_fold(%x: tensor<2xi32>) -> tensor<2xi32> {
  %zero = stablehlo.constant dense<0> : tensor<2xi32>
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xi32>) -> tensor<2xi32>
  %1 = stablehlo.multiply %0, %zero : tensor<2xi32>
  %2 = "stablehlo.collective_permute"(%1) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xi32>) -> tensor<2xi32>
  return %2 : tensor<2xi32>
}

// -----

// A slice may drop just the part that depends: the link stays.
// CHECK-LABEL: func.func @slices_may_fold
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>) -> tensor<2xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[X]])
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[ROOT]] :
// CHECK-NEXT: %[[CONCATENATE:.+]] = stablehlo.concatenate %[[OUT]]#0, %[[X]], dim = 0 :
// CHECK-NEXT: %[[SLICE:.+]] = stablehlo.slice %[[CONCATENATE]] [2:4] :
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[SLICE]], %[[OUT]]#1 :
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: return %[[PERMUTE2]] :
func.func @slices_may_fold(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %1 = stablehlo.concatenate %0, %x, dim = 0 : (tensor<2xf32>, tensor<2xf32>) -> tensor<4xf32>
  %2 = stablehlo.slice %1 [2:4] : (tensor<4xf32>) -> tensor<2xf32>
  %3 = "stablehlo.collective_permute"(%2) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %3 : tensor<2xf32>
}

// -----

// Dataflow orders the first two, so no token enters the second. One leaves the first all the same:
// the third must come after it, even if a compiler deletes the second.
// CHECK-LABEL: func.func @links_outlive_a_deletion
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[Y:.+]]: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[X]])
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE2]], %[[IN]]#1 :
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[Y]], %[[OUT]]#1 :
// CHECK-NEXT: %[[PERMUTE3:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
// CHECK-NEXT: return %[[OUT]]#0, %[[PERMUTE3]] :
func.func @links_outlive_a_deletion(
    %x: tensor<2xf32>, %y: tensor<2xf32>
) -> (tensor<2xf32>, tensor<2xf32>) {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %1 = "stablehlo.collective_permute"(%0) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %2 = "stablehlo.collective_permute"(%y) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %1, %2 : tensor<2xf32>, tensor<2xf32>
}

// -----

// A loop is linked on either side. In it both ends are open, since iterations follow each other.
// CHECK-LABEL: func.func @loops_are_linked
// CHECK-SAME: (%[[P:.+]]: tensor<i1>, %[[X:.+]]: tensor<2xf32>) -> tensor<2xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[X]])
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[ROOT]] :
// CHECK-NEXT: %[[LOOP:.+]]:2 = stablehlo.while(%[[ITER:.+]] = %[[OUT]]#0, %[[TOKEN:.+]] = %[[OUT]]#1)
// CHECK-SAME: : tensor<2xf32>, !stablehlo.token attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: cond {
// CHECK-NEXT: stablehlo.return %[[P]] :
// CHECK-NEXT: } do {
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ITER]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE2]], %[[IN]]#1 :
// CHECK-NEXT: %[[PERMUTE3:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
// CHECK-NEXT: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE3]], %[[IN2]]#1 :
// CHECK-NEXT: stablehlo.return %[[OUT2]]#0, %[[OUT2]]#1 :
// CHECK: return %[[LOOP]]#0 :
func.func @loops_are_linked(%p: tensor<i1>, %x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %1 = stablehlo.while(%v = %0) : tensor<2xf32>
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %2 = "stablehlo.collective_permute"(%v) {
        source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
      } : (tensor<2xf32>) -> tensor<2xf32>
      %3 = "stablehlo.collective_permute"(%2) {
        source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
      } : (tensor<2xf32>) -> tensor<2xf32>
      stablehlo.return %3 : tensor<2xf32>
    }
  return %1 : tensor<2xf32>
}

// -----

// A private function may be called between others: both its ends are open.
// CHECK-LABEL: func.func private @private_function
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[TOKEN:.+]]: !stablehlo.token)
// CHECK-SAME: -> (tensor<2xf32>, !stablehlo.token) attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT]]#1 :
func.func private @private_function(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

// Links of each chain by itself: with scope=group the permute between the two is of another chain.
module attributes {mhlo.num_replicas = 4 : i32} {
// CHECK-LABEL: func.func @within_a_chain
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[Y:.+]]: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>)
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[X]])
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[Y]])
// CHECK-NEXT: %[[PERMUTE3:.+]] = "stablehlo.collective_permute"(%[[PERMUTE]])
// CHECK-NEXT: return %[[PERMUTE2]], %[[PERMUTE3]] :
func.func @within_a_chain(%x: tensor<2xf32>, %y: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %1 = "stablehlo.collective_permute"(%y) {
    source_target_pairs = dense<[[2, 3]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %2 = "stablehlo.collective_permute"(%0) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %1, %2 : tensor<2xf32>, tensor<2xf32>
}
}
