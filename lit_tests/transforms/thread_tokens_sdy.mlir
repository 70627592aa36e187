// RUN: stablehlo-tools opt %s -p thread-tokens --split-input-file | filecheck %s --enable-var-scope

// A manual computation takes the token as an operand and returns it as a result; both lists of
// shardings grow by that of a replicated scalar on the mesh.
sdy.mesh @mesh = <["x"=2]>
// CHECK-LABEL: func.func @manual_computation
// CHECK-SAME: (%[[X:.+]]: tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[MANUAL:.+]]:2 = sdy.manual_computation(%[[X]], %[[ROOT]])
// CHECK-SAME: in_shardings=[<@mesh, [{"x"}]>, <@mesh, []>] out_shardings=[<@mesh, [{"x"}]>, <@mesh, []>]
// CHECK-SAME: manual_axes={"x"} (%[[ARG:.+]]: tensor<2xf32>, %[[TOKEN:.+]]: !stablehlo.token) {
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ARG]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: sdy.return %[[OUT]]#0, %[[OUT]]#1 :
// CHECK-NEXT: } {stablehlo_tools.tokens_carried = 1 : i64} : (tensor<4xf32>, !stablehlo.token)
// CHECK-SAME: -> (tensor<4xf32>, !stablehlo.token)
// CHECK-NEXT: return %[[MANUAL]]#0 :
func.func @manual_computation(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}]>]
      manual_axes={"x"} (%a: tensor<2xf32>) {
    %1 = "stablehlo.collective_permute"(%a) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    sdy.return %1 : tensor<2xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// Two manual computations, as forward and backward pass are: the token crosses between them.
sdy.mesh @mesh = <["x"=2]>
// CHECK-LABEL: func.func @token_crosses_between_manual_computations
// CHECK-SAME: (%[[X:.+]]: tensor<4xf32>, %[[Y:.+]]: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[MANUAL:.+]]:2 = sdy.manual_computation(%[[X]], %[[ROOT]])
// CHECK-SAME: in_shardings=[<@mesh, [{"x"}]>, <@mesh, []>] out_shardings=[<@mesh, [{"x"}]>, <@mesh, []>]
// CHECK-SAME: manual_axes={"x"} (%[[ARG:.+]]: tensor<2xf32>, %[[TOKEN:.+]]: !stablehlo.token) {
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ARG]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: sdy.return %[[OUT]]#0, %[[OUT]]#1 :
// CHECK-NEXT: } {stablehlo_tools.tokens_carried = 1 : i64} : (tensor<4xf32>, !stablehlo.token)
// CHECK-SAME: -> (tensor<4xf32>, !stablehlo.token)
// CHECK-NEXT: %[[MANUAL2:.+]]:2 = sdy.manual_computation(%[[Y]], %[[MANUAL]]#1)
// CHECK-SAME: in_shardings=[<@mesh, [{"x"}]>, <@mesh, []>] out_shardings=[<@mesh, [{"x"}]>, <@mesh, []>]
// CHECK-SAME: manual_axes={"x"} (%[[ARG2:.+]]: tensor<2xf32>, %[[TOKEN2:.+]]: !stablehlo.token) {
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ARG2]], %[[TOKEN2]] :
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
// CHECK-NEXT: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE2]], %[[IN2]]#1 :
// CHECK-NEXT: sdy.return %[[OUT2]]#0, %[[OUT2]]#1 :
// CHECK-NEXT: } {stablehlo_tools.tokens_carried = 1 : i64} : (tensor<4xf32>, !stablehlo.token)
// CHECK-SAME: -> (tensor<4xf32>, !stablehlo.token)
// CHECK-NEXT: return %[[MANUAL]]#0, %[[MANUAL2]]#0 :
func.func @token_crosses_between_manual_computations(
    %x: tensor<4xf32>, %y: tensor<4xf32>
) -> (tensor<4xf32>, tensor<4xf32>) {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}]>]
      manual_axes={"x"} (%a: tensor<2xf32>) {
    %1 = "stablehlo.collective_permute"(%a) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    sdy.return %1 : tensor<2xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  %2 = sdy.manual_computation(%y) in_shardings=[<@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}]>]
      manual_axes={"x"} (%a: tensor<2xf32>) {
    %3 = "stablehlo.collective_permute"(%a) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    sdy.return %3 : tensor<2xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0, %2 : tensor<4xf32>, tensor<4xf32>
}

// -----

// Nested, over one axis each.
sdy.mesh @mesh = <["x"=2, "y"=2]>
// CHECK-LABEL: func.func @nested_manual_computations
// CHECK-SAME: (%[[X:.+]]: tensor<4x4xf32>) -> tensor<4x4xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[MANUAL:.+]]:2 = sdy.manual_computation(%[[X]], %[[ROOT]])
// CHECK-SAME: in_shardings=[<@mesh, [{"x"}, {"y", ?}]>, <@mesh, []>]
// CHECK-SAME: out_shardings=[<@mesh, [{"x"}, {"y", ?}]>, <@mesh, []>]
// CHECK-SAME: manual_axes={"x"} (%[[ARG:.+]]: tensor<2x4xf32>, %[[TOKEN:.+]]: !stablehlo.token) {
// CHECK-NEXT: %[[MANUAL2:.+]]:2 = sdy.manual_computation(%[[ARG]], %[[TOKEN]])
// CHECK-SAME: in_shardings=[<@mesh, [{}, {"y"}]>, <@mesh, []>]
// CHECK-SAME: out_shardings=[<@mesh, [{}, {"y"}]>, <@mesh, []>]
// CHECK-SAME: manual_axes={"y"} (%[[ARG2:.+]]: tensor<2x2xf32>, %[[TOKEN2:.+]]: !stablehlo.token) {
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ARG2]], %[[TOKEN2]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: sdy.return %[[OUT]]#0, %[[OUT]]#1 :
// CHECK-NEXT: } {stablehlo_tools.tokens_carried = 1 : i64} : (tensor<2x4xf32>, !stablehlo.token)
// CHECK-SAME: -> (tensor<2x4xf32>, !stablehlo.token)
// CHECK-NEXT: sdy.return %[[MANUAL2]]#0, %[[MANUAL2]]#1 :
// CHECK-NEXT: } {stablehlo_tools.tokens_carried = 1 : i64} : (tensor<4x4xf32>, !stablehlo.token)
// CHECK-SAME: -> (tensor<4x4xf32>, !stablehlo.token)
// CHECK-NEXT: return %[[MANUAL]]#0 :
func.func @nested_manual_computations(%x: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %0 = sdy.manual_computation(%x)
      in_shardings=[<@mesh, [{"x"}, {"y", ?}]>] out_shardings=[<@mesh, [{"x"}, {"y", ?}]>]
      manual_axes={"x"} (%a: tensor<2x4xf32>) {
    %1 = sdy.manual_computation(%a)
        in_shardings=[<@mesh, [{}, {"y"}]>] out_shardings=[<@mesh, [{}, {"y"}]>]
        manual_axes={"y"} (%b: tensor<2x2xf32>) {
      %2 = "stablehlo.collective_permute"(%b) {
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
        source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
      } : (tensor<2x2xf32>) -> tensor<2x2xf32>
      sdy.return %2 : tensor<2x2xf32>
    } : (tensor<2x4xf32>) -> tensor<2x4xf32>
    sdy.return %1 : tensor<2x4xf32>
  } : (tensor<4x4xf32>) -> tensor<4x4xf32>
  return %0 : tensor<4x4xf32>
}

// -----

// A manual computation inside of a loop.
sdy.mesh @mesh = <["x"=2]>
// CHECK-LABEL: func.func @manual_computation_in_a_loop
// CHECK-SAME: (%[[P:.+]]: tensor<i1>, %[[X:.+]]: tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[LOOP:.+]]:2 = stablehlo.while(%[[ITER:.+]] = %[[X]], %[[TOKEN:.+]] = %[[ROOT]])
// CHECK-SAME: : tensor<4xf32>, !stablehlo.token attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: cond {
// CHECK-NEXT: stablehlo.return %[[P]] :
// CHECK-NEXT: } do {
// CHECK-NEXT: %[[MANUAL:.+]]:2 = sdy.manual_computation(%[[ITER]], %[[TOKEN]])
// CHECK-SAME: in_shardings=[<@mesh, [{"x"}]>, <@mesh, []>] out_shardings=[<@mesh, [{"x"}]>, <@mesh, []>]
// CHECK-SAME: manual_axes={"x"} (%[[ARG:.+]]: tensor<2xf32>, %[[TOKEN2:.+]]: !stablehlo.token) {
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ARG]], %[[TOKEN2]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: sdy.return %[[OUT]]#0, %[[OUT]]#1 :
// CHECK-NEXT: } {stablehlo_tools.tokens_carried = 1 : i64} : (tensor<4xf32>, !stablehlo.token)
// CHECK-SAME: -> (tensor<4xf32>, !stablehlo.token)
// CHECK-NEXT: stablehlo.return %[[MANUAL]]#0, %[[MANUAL]]#1 :
// CHECK: return %[[LOOP]]#0 :
func.func @manual_computation_in_a_loop(%p: tensor<i1>, %x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.while(%v = %x) : tensor<4xf32>
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %1 = sdy.manual_computation(%v) in_shardings=[<@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}]>]
          manual_axes={"x"} (%a: tensor<2xf32>) {
        %2 = "stablehlo.collective_permute"(%a) {
          channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
          source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
        } : (tensor<2xf32>) -> tensor<2xf32>
        sdy.return %2 : tensor<2xf32>
      } : (tensor<4xf32>) -> tensor<4xf32>
      stablehlo.return %1 : tensor<4xf32>
    }
  return %0 : tensor<4xf32>
}

// -----

// A named computation without shardings gets none.
// CHECK-LABEL: func.func @named_computation
// CHECK-SAME: (%[[X:.+]]: tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[NAMED:.+]]:2 = sdy.named_computation<"block">(%[[X]], %[[ROOT]]) (%[[ARG:.+]]: tensor<4xf32>, %[[TOKEN:.+]]: !stablehlo.token) {
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ARG]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: sdy.return %[[OUT]]#0, %[[OUT]]#1 :
// CHECK-NEXT: } {stablehlo_tools.tokens_carried = 1 : i64} : (tensor<4xf32>, !stablehlo.token)
// CHECK-SAME: -> (tensor<4xf32>, !stablehlo.token)
// CHECK-NEXT: return %[[NAMED]]#0 :
func.func @named_computation(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = sdy.named_computation<"block">(%x) (%a: tensor<4xf32>) {
    %1 = "stablehlo.collective_permute"(%a) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<4xf32>) -> tensor<4xf32>
    sdy.return %1 : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// A named computation with shardings: the lists grow.
sdy.mesh @mesh = <["x"=2]>
// CHECK-LABEL: func.func @sharded_named_computation
// CHECK-SAME: (%[[X:.+]]: tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[NAMED:.+]]:2 = sdy.named_computation<"block">(%[[X]], %[[ROOT]])
// CHECK-SAME: in_shardings=[<@mesh, [{"x"}]>, <@mesh, []>]
// CHECK-SAME: out_shardings=[<@mesh, [{"x"}]>, <@mesh, []>] (%[[ARG:.+]]: tensor<4xf32>, %[[TOKEN:.+]]: !stablehlo.token) {
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ARG]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: sdy.return %[[OUT]]#0, %[[OUT]]#1 :
// CHECK-NEXT: } {stablehlo_tools.tokens_carried = 1 : i64} : (tensor<4xf32>, !stablehlo.token)
// CHECK-SAME: -> (tensor<4xf32>, !stablehlo.token)
// CHECK-NEXT: return %[[NAMED]]#0 :
func.func @sharded_named_computation(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = sdy.named_computation<"block">(%x) in_shardings=[<@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}]>] (%a: tensor<4xf32>) {
    %1 = "stablehlo.collective_permute"(%a) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<4xf32>) -> tensor<4xf32>
    sdy.return %1 : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
