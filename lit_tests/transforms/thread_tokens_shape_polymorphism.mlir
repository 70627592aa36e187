// RUN: stablehlo-tools opt %s -p thread-tokens --split-input-file | filecheck %s --enable-var-scope

// Where jax refines shapes at the call, no token enters a manual computation: what goes in and what
// comes out is tied outside of it, what arrives and what is returned inside.
module attributes {jax.uses_shape_polymorphism = true} {
sdy.mesh @mesh = <["x"=2]>
// CHECK-LABEL: func.func @sealed
// CHECK-SAME: (%[[X:.+]]: tensor<4xf32>, %[[Y:.+]]: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:3 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[Y]], %[[ROOT]] :
// CHECK-NEXT: %[[MANUAL:.+]]:2 = sdy.manual_computation(%[[IN]]#0, %[[IN]]#1)
// CHECK-SAME: in_shardings=[<@mesh, [{"x"}]>, <@mesh, [{"x"}]>]
// CHECK-SAME: out_shardings=[<@mesh, [{"x"}]>, <@mesh, [{"x"}]>]
// CHECK-SAME: manual_axes={"x"} (%[[ARG:.+]]: tensor<2xf32>, %[[ARG2:.+]]: tensor<2xf32>) {
// CHECK-NEXT: %[[INNER:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[ARGUMENTS:.+]]:3 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ARG]], %[[ARG2]], %[[INNER]] :
// CHECK-NEXT: %[[ENTER:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ARGUMENTS]]#0, %[[ARGUMENTS]]#2 :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[ENTER]]#0)
// CHECK-NEXT: %[[LEFT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[ENTER]]#1 :
// CHECK-NEXT: %[[RETURNED:.+]]:3 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[LEFT]]#0, %[[ARGUMENTS]]#1, %[[LEFT]]#1 :
// CHECK-NEXT: sdy.return %[[RETURNED]]#0, %[[RETURNED]]#1 :
// CHECK-NEXT: } : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
// CHECK-NEXT: %[[RESULTS:.+]]:3 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[MANUAL]]#0, %[[MANUAL]]#1, %[[IN]]#2 :
// CHECK-NEXT: return %[[RESULTS]]#0, %[[RESULTS]]#1 :
func.func @sealed(%x: tensor<4xf32>, %y: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %0:2 = sdy.manual_computation(%x, %y)
      in_shardings=[<@mesh, [{"x"}]>, <@mesh, [{"x"}]>]
      out_shardings=[<@mesh, [{"x"}]>, <@mesh, [{"x"}]>]
      manual_axes={"x"} (%a: tensor<2xf32>, %b: tensor<2xf32>) {
    %1 = "stablehlo.collective_permute"(%a) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    sdy.return %1, %b : tensor<2xf32>, tensor<2xf32>
  } : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  return %0#0, %0#1 : tensor<4xf32>, tensor<4xf32>
}
}

// -----

// The second waits for the results of the first.
module attributes {jax.uses_shape_polymorphism = true} {
sdy.mesh @mesh = <["x"=2]>
// CHECK-LABEL: func.func @two_sealed
// CHECK-SAME: (%[[X:.+]]: tensor<4xf32>, %[[Y:.+]]: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[MANUAL:.+]] = sdy.manual_computation(%[[IN]]#0) in_shardings=[<@mesh, [{"x"}]>]
// CHECK-SAME: out_shardings=[<@mesh, [{"x"}]>] manual_axes={"x"} (%[[ARG:.+]]: tensor<2xf32>) {
// CHECK-NEXT: %[[ROOT2:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ARG]], %[[ROOT2]] :
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[OUT]]#0, %[[OUT]]#1 :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
// CHECK-NEXT: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN2]]#1 :
// CHECK-NEXT: %[[OUT3:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[OUT2]]#0, %[[OUT2]]#1 :
// CHECK-NEXT: sdy.return %[[OUT3]]#0 :
// CHECK-NEXT: } : (tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT: %[[OUT4:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[MANUAL]], %[[IN]]#1 :
// CHECK-NEXT: %[[IN3:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[Y]], %[[OUT4]]#1 :
// CHECK-NEXT: %[[MANUAL2:.+]] = sdy.manual_computation(%[[IN3]]#0) in_shardings=[<@mesh, [{"x"}]>]
// CHECK-SAME: out_shardings=[<@mesh, [{"x"}]>] manual_axes={"x"} (%[[ARG2:.+]]: tensor<2xf32>) {
// CHECK-NEXT: %[[ROOT3:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[OUT5:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ARG2]], %[[ROOT3]] :
// CHECK-NEXT: %[[IN4:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[OUT5]]#0, %[[OUT5]]#1 :
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[IN4]]#0)
// CHECK-NEXT: %[[OUT6:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE2]], %[[IN4]]#1 :
// CHECK-NEXT: %[[OUT7:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[OUT6]]#0, %[[OUT6]]#1 :
// CHECK-NEXT: sdy.return %[[OUT7]]#0 :
// CHECK-NEXT: } : (tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT: %[[OUT8:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[MANUAL2]], %[[IN3]]#1 :
// CHECK-NEXT: return %[[OUT4]]#0, %[[OUT8]]#0 :
func.func @two_sealed(%x: tensor<4xf32>, %y: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
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
}

// -----

// Inside, the chain goes on as anywhere else: a loop carries the token.
module attributes {jax.uses_shape_polymorphism = true} {
sdy.mesh @mesh = <["x"=2]>
// CHECK-LABEL: func.func @loop_in_a_sealed_one
// CHECK-SAME: (%[[P:.+]]: tensor<i1>, %[[X:.+]]: tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[MANUAL:.+]] = sdy.manual_computation(%[[P]], %[[IN]]#0)
// CHECK-SAME: in_shardings=[<@mesh, []>, <@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}]>]
// CHECK-SAME: manual_axes={"x"} (%[[ARG:.+]]: tensor<i1>, %[[ARG2:.+]]: tensor<2xf32>) {
// CHECK-NEXT: %[[ROOT2:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ARG2]], %[[ROOT2]] :
// CHECK-NEXT: %[[LOOP:.+]]:2 = stablehlo.while(%[[ITER:.+]] = %[[OUT]]#0, %[[TOKEN:.+]] = %[[OUT]]#1)
// CHECK-SAME: : tensor<2xf32>, !stablehlo.token attributes {stablehlo_tools.tokens_carried = 1 : i64}
// CHECK-NEXT: cond {
// CHECK-NEXT: stablehlo.return %[[ARG]] :
// CHECK-NEXT: } do {
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ITER]], %[[TOKEN]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
// CHECK-NEXT: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN2]]#1 :
// CHECK-NEXT: stablehlo.return %[[OUT2]]#0, %[[OUT2]]#1 :
// CHECK: %[[OUT3:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[LOOP]]#0, %[[LOOP]]#1 :
// CHECK-NEXT: sdy.return %[[OUT3]]#0 :
// CHECK-NEXT: } : (tensor<i1>, tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT: %[[OUT4:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[MANUAL]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT4]]#0 :
func.func @loop_in_a_sealed_one(%p: tensor<i1>, %x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = sdy.manual_computation(%p, %x)
      in_shardings=[<@mesh, []>, <@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}]>]
      manual_axes={"x"} (%q: tensor<i1>, %a: tensor<2xf32>) {
    %1 = stablehlo.while(%v = %a) : tensor<2xf32>
      cond {
        stablehlo.return %q : tensor<i1>
      } do {
        %2 = "stablehlo.collective_permute"(%v) {
          channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
          source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
        } : (tensor<2xf32>) -> tensor<2xf32>
        stablehlo.return %2 : tensor<2xf32>
      }
    sdy.return %1 : tensor<2xf32>
  } : (tensor<i1>, tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
}

// -----

// Said to be false, it is like not said.
module attributes {jax.uses_shape_polymorphism = false} {
sdy.mesh @mesh = <["x"=2]>
// CHECK-LABEL: func.func @not_sealed
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
func.func @not_sealed(%x: tensor<4xf32>) -> tensor<4xf32> {
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
}

// -----

// An integer of rank 0 may be the platform's index, which has to fold: it is not tied.
module attributes {jax.uses_shape_polymorphism = true} {
sdy.mesh @mesh = <["x"=2]>
// CHECK-LABEL: func.func @platform_index
// CHECK-SAME: (%[[INDEX:.+]]: tensor<i32>, %[[X:.+]]: tensor<4xf32>)
// CHECK: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %{{.+}} : tensor<4xf32>, !stablehlo.token
// CHECK: sdy.manual_computation(%[[INDEX]], %[[IN]]#0)
// CHECK-SAME: (%[[INNER:.+]]: tensor<i32>, %[[ARG:.+]]: tensor<2xf32>) {
// CHECK: stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[ARG]], %{{.+}} : tensor<2xf32>, !stablehlo.token
// CHECK: "stablehlo.case"(%[[INNER]])
func.func @platform_index(%i: tensor<i32>, %x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = sdy.manual_computation(%i, %x)
      in_shardings=[<@mesh, []>, <@mesh, [{"x"}]>]
      out_shardings=[<@mesh, [{"x"}]>]
      manual_axes={"x"} (%j: tensor<i32>, %a: tensor<2xf32>) {
    %1 = "stablehlo.case"(%j) ({
      %2 = "stablehlo.collective_permute"(%a) {
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
        source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
      } : (tensor<2xf32>) -> tensor<2xf32>
      stablehlo.return %2 : tensor<2xf32>
    }, {
      stablehlo.return %a : tensor<2xf32>
    }) : (tensor<i32>) -> tensor<2xf32>
    sdy.return %1 : tensor<2xf32>
  } : (tensor<i32>, tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
}
