// RUN: stablehlo-tools opt %s -p thread-tokens --split-input-file --verify-diagnostics
// RUN: not stablehlo-tools opt %s -p 'thread-tokens{form=composite minimal}' --split-input-file 2>&1 | filecheck %s --check-prefix=MINIMAL

// P1: every op is of a dialect that is understood.
func.func @mhlo_collective_p1(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-error@+1 {{mhlo.collective_permute communicates in a dialect that cannot be rewritten here}}
  %0 = "mhlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

sdy.mesh @mesh = <["x"=2]>
func.func @sdy_collective_p1(%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<4xf32> {
  // expected-error@+1 {{sdy.all_gather communicates in a dialect that cannot be rewritten here}}
  %0 = sdy.all_gather [{"x"}] %x out_sharding=<@mesh, [{}]> : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

func.func @other_dialect_p1(%x: i32) -> i32 {
  // expected-error@+1 {{arith.addi: unknown dialect 'arith'}}
  %0 = arith.addi %x, %x : i32
  return %0 : i32
}

// -----

// P2: communication stands in functions of one block and in structured control flow.
// expected-error@+1 {{@several_blocks_p2 communicates and has several blocks}}
func.func @several_blocks_p2(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
^bb1:
  return %x : tensor<2xf32>
}

// -----

func.func @in_a_sort_p2(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-note@+1 {{the stablehlo.sort is here}}
  %0 = "stablehlo.sort"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    // expected-error@+1 {{stablehlo.custom_call inside stablehlo.sort: the order of collectives is undefined there}}
    %1 = stablehlo.custom_call @exchange(%a) {has_side_effect = true} : (tensor<f32>) -> tensor<i1>
    stablehlo.return %1 : tensor<i1>
  }) {dimension = 0 : i64} : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

func.func @in_a_reduction_p2(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    // expected-error@+1 {{stablehlo.custom_call inside stablehlo.all_reduce: the order of collectives is undefined there}}
    %1 = stablehlo.custom_call @exchange(%a) {has_side_effect = true} : (tensor<f32>) -> tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    // expected-error@+1 {{func.call inside stablehlo.all_reduce: the order of collectives is undefined there}}
    %1 = func.call @called_in_a_reduction_p2(%a) : (tensor<f32>) -> tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

func.func private @called_in_a_reduction_p2(%x: tensor<f32>) -> tensor<f32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}

// -----

// P2, and no function could be named after it.
%c = stablehlo.constant dense<1.0> : tensor<2xf32>
// expected-error@+1 {{stablehlo.collective_permute is outside any function}}
%0 = "stablehlo.collective_permute"(%c) {
  source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
} : (tensor<2xf32>) -> tensor<2xf32>

// -----

// P3: a function that communicates is not recursive; a public one is not called in the module.
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = call @recursive_p3(%x) : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// expected-error@+1 {{@recursive_p3 communicates and calls itself}}
func.func private @recursive_p3(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %1 = call @recursive_p3(%0) : (tensor<2xf32>) -> tensor<2xf32>
  return %1 : tensor<2xf32>
}

// -----

// A cycle of two, of which only the first communicates itself.
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = call @ping_p3(%x) : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// expected-error@+1 {{@ping_p3 communicates and calls itself}}
func.func private @ping_p3(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %1 = call @pong_p3(%0) : (tensor<2xf32>) -> tensor<2xf32>
  return %1 : tensor<2xf32>
}

func.func private @pong_p3(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = call @ping_p3(%x) : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-note@+1 {{called here}}
  %0 = call @called_public_p3(%x) : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// expected-error@+1 {{@called_public_p3 communicates, is public and is also called inside the module}}
func.func @called_public_p3(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

// A called computation of a custom_call cannot be handed the token.
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-note@+1 {{referred to here}}
  %0 = stablehlo.custom_call @apply(%x) {called_computations = [@called_computation_p3]} : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// expected-error@+1 {{@called_computation_p3 communicates, but stablehlo.custom_call refers to it and cannot pass it a token}}
func.func private @called_computation_p3(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

// P4: a communicating op has an operand a token can enter beside, and a result it leaves beside.
func.func @no_operand_p4() -> tensor<2xf32> {
  // expected-error@+1 {{stablehlo.custom_call has no operand, and a token can only enter beside one}}
  %0 = stablehlo.custom_call @poll() {has_side_effect = true} : () -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

func.func @no_result_p4(%x: tensor<2xf32>) {
  // expected-error@+1 {{stablehlo.custom_call has no result, and a token can only leave beside one}}
  stablehlo.custom_call @report(%x) {has_side_effect = true} : (tensor<2xf32>) -> ()
  return
}

// -----

// So does a function that is referred to as a value.
// expected-error@+1 {{@function_value_p3 communicates, but func.constant refers to it}}
func.func private @function_value_p3(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.custom_call @exchange(%x) {has_side_effect = true} : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-note@+1 {{referred to here}}
  %f = func.constant @function_value_p3 : (tensor<2xf32>) -> tensor<2xf32>
  %0 = func.call_indirect %f(%x) : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

// No barrier takes a tuple.
func.func @tuple_p4(%x: tensor<2xf32>) -> tuple<tensor<2xf32>> {
  // expected-error@+1 {{stablehlo.custom_call has a result of type tuple<tensor<2xf32>>, which no barrier accepts}}
  %0 = stablehlo.custom_call @exchange(%x) {has_side_effect = true} : (tensor<2xf32>) -> tuple<tensor<2xf32>>
  return %0 : tuple<tensor<2xf32>>
}

// -----

// P8: a manual computation takes an operand beside which the token can enter.
sdy.mesh @mesh = <["x"=2]>
func.func @without_operands_p8() -> tensor<4xf32> {
  // expected-error@+1 {{sdy.manual_computation communicates but has no operand: a token cannot enter it}}
  %0 = sdy.manual_computation() in_shardings=[] out_shardings=[<@mesh, [{"x"}]>]
      manual_axes={"x"} () {
    %c = stablehlo.constant dense<1.0> : tensor<2xf32>
    %1 = stablehlo.custom_call @exchange(%c) {has_side_effect = true} : (tensor<2xf32>) -> tensor<2xf32>
    sdy.return %1 : tensor<2xf32>
  } : () -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// A sealed one is entered beside its arguments, so it has to use one.
module attributes {jax.uses_shape_polymorphism = true} {
sdy.mesh @mesh = <["x"=2]>
func.func @sealed_and_unused_p8(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error@+1 {{sdy.manual_computation communicates but uses none of its operands}}
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}]>]
      manual_axes={"x"} (%a: tensor<2xf32>) {
    %c = stablehlo.constant dense<1.0> : tensor<2xf32>
    %1 = stablehlo.custom_call @exchange(%c) {has_side_effect = true} : (tensor<2xf32>) -> tensor<2xf32>
    sdy.return %1 : tensor<2xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
}

// -----

// And it has to return something.
module attributes {jax.uses_shape_polymorphism = true} {
func.func @sealed_without_results_p8(%x: tensor<f32>) {
  // expected-error@+1 {{sdy.manual_computation communicates, but none of its results is used}}
  sdy.manual_computation(%x) in_shardings=[<@mesh, []>] out_shardings=[] manual_axes={} (%a: tensor<f32>) {
    %0 = stablehlo.custom_call @exchange(%a) {has_side_effect = true} : (tensor<f32>) -> tensor<f32>
    sdy.return
  } : (tensor<f32>) -> ()
  return
}
sdy.mesh @mesh = <["x"=2]>
}

// -----

// An empty list of shardings names no mesh that the token's sharding could be on.
func.func @no_mesh(%p: tensor<i1>, %x: tensor<f32>) -> tensor<f32> {
  // expected-error@+1 {{stablehlo.if has an empty list of shardings, so the mesh for a new value is unknown}}
  "stablehlo.if"(%p) ({
    %0 = stablehlo.custom_call @exchange(%x) {has_side_effect = true} : (tensor<f32>) -> tensor<f32>
    stablehlo.return
  }, {
    stablehlo.return
  }) {sdy.sharding = #sdy.sharding_per_value<[]>} : (tensor<i1>) -> ()
  return %x : tensor<f32>
}

// -----

// P5: a start and its done share a block.
func.func @future_leaves_the_block_p5(%x: tensor<2xf32>) -> !stablehlo.future<tensor<2xf32>> {
  // expected-error@+1 {{the async_done of this async_start is not in the same block}}
  %0 = "stablehlo.async_start"(%x) ({
  ^bb0(%a: tensor<2xf32>):
    %1 = "stablehlo.collective_permute"(%a) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    stablehlo.return %1 : tensor<2xf32>
  }) : (tensor<2xf32>) -> !stablehlo.future<tensor<2xf32>>
  return %0 : !stablehlo.future<tensor<2xf32>>
}

// -----

// P6: no op that must carry the token has an mhlo.sharding list of its values.
func.func @gspmd_loop_p6(%p: tensor<i1>, %x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-error@+1 {{stablehlo.while has one mhlo.sharding for all its values}}
  %0 = stablehlo.while(%v = %x) : tensor<2xf32>
    attributes {mhlo.sharding = "{{replicated}}"}
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %1 = "stablehlo.collective_permute"(%v) {
        source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
      } : (tensor<2xf32>) -> tensor<2xf32>
      stablehlo.return %1 : tensor<2xf32>
    }
  return %0 : tensor<2xf32>
}

// -----

func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-error@+1 {{func.call has one mhlo.sharding for all its values}}
  %0 = call @gspmd_call_p6(%x) {mhlo.sharding = "{{replicated}}"} : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

func.func private @gspmd_call_p6(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

// P7: `minimal` is an option of the barrier form. Nothing is wrong with the program itself.
// MINIMAL-NOT: Traceback
// MINIMAL: thread_tokens_invalid.mlir: error: thread-tokens: minimal leaves links out, and a composite
// MINIMAL-SAME: use form=barrier (P7)
func.func @minimal_composites_p7(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}
