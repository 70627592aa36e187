// Programs without communication stay as they are, to the byte.
// RUN: stablehlo-tools opt %s --split-input-file > %t.before
// RUN: stablehlo-tools opt %s -p thread-tokens --split-input-file | diff -u %t.before -
// RUN: stablehlo-tools opt %s -p 'thread-tokens{form=composite scope=group}' --split-input-file | diff -u %t.before -

// A second run changes nothing, of any form, whatever the program.
// RUN: cat %S/thread_tokens.mlir %{inputs}/separator.txt %S/thread_tokens_own_tokens.mlir \
// RUN:   %{inputs}/separator.txt %S/thread_tokens_control_flow.mlir \
// RUN:   %{inputs}/separator.txt %S/thread_tokens_calls.mlir \
// RUN:   %{inputs}/separator.txt %S/thread_tokens_sdy.mlir \
// RUN:   %{inputs}/separator.txt %S/thread_tokens_shape_polymorphism.mlir \
// RUN:   %{inputs}/separator.txt %S/thread_tokens_scope_group.mlir > %t.mlir
// RUN: stablehlo-tools opt %t.mlir -p thread-tokens --split-input-file | tee %t.once | filecheck %s
// RUN: stablehlo-tools opt %t.once -p thread-tokens --split-input-file | diff -u %t.once -
// RUN: stablehlo-tools opt %t.mlir -p 'thread-tokens{form=composite}' --split-input-file > %t.once
// RUN: stablehlo-tools opt %t.once -p 'thread-tokens{form=composite}' --split-input-file | diff -u %t.once -
// RUN: stablehlo-tools opt %t.mlir -p 'thread-tokens{scope=group minimal}' --split-input-file > %t.once
// RUN: stablehlo-tools opt %t.once -p 'thread-tokens{scope=group minimal}' --split-input-file | diff -u %t.once -

// A chain of another form is replaced, not added to.
// RUN: stablehlo-tools opt %t.mlir -p 'thread-tokens{form=composite},thread-tokens{minimal}' \
// RUN:   --split-input-file > %t.replaced
// RUN: stablehlo-tools opt %t.mlir -p 'thread-tokens{minimal}' --split-input-file | diff -u - %t.replaced

// The same input makes the same bytes, whatever the order of Python's sets.
// RUN: env PYTHONHASHSEED=1 stablehlo-tools opt %t.mlir -p 'thread-tokens{form=composite scope=group}' \
// RUN:   --split-input-file > %t.first
// RUN: env PYTHONHASHSEED=2 stablehlo-tools opt %t.mlir -p 'thread-tokens{form=composite scope=group}' \
// RUN:   --split-input-file > %t.second
// RUN: cmp %t.first %t.second

// That there was a chain in the first place:
// CHECK-COUNT-100: stablehlo_tools.token_link

// Nothing that communicates, in any region.
func.func @no_collective(%p: tensor<i1>, %x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.while(%v = %x) : tensor<2xf32>
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %1 = func.call @silent(%v) : (tensor<2xf32>) -> tensor<2xf32>
      stablehlo.return %1 : tensor<2xf32>
    }
  return %0 : tensor<2xf32>
}

func.func private @silent(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.negate %x : tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

// Custom calls that annotate, side effect or not.
func.func @annotations_only(%p: tensor<i1>, %x: tensor<2xf32>) -> tensor<2xf32> {
  stablehlo.custom_call @shape_assertion(%p) {has_side_effect = true} : (tensor<i1>) -> ()
  %0 = stablehlo.custom_call @Sharding(%x) {has_side_effect = true} : (tensor<2xf32>) -> tensor<2xf32>
  %1 = stablehlo.custom_call @LayoutConstraint(%0) {has_side_effect = true} : (tensor<2xf32>) -> tensor<2xf32>
  return %1 : tensor<2xf32>
}

// -----

// A pure custom call, one with the side-effect flag set to false among them.
func.func @pure_custom_calls(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.custom_call @pure(%x) : (tensor<2xf32>) -> tensor<2xf32>
  %1 = stablehlo.custom_call @pure(%0) {has_side_effect = false} : (tensor<2xf32>) -> tensor<2xf32>
  return %1 : tensor<2xf32>
}

// -----

// Tokens and barriers of the user's own that order nothing.
func.func @tokens_alone(%x: tensor<2xf32>, %token: !stablehlo.token) -> (tensor<2xf32>, !stablehlo.token) {
  %0 = stablehlo.after_all %token, %token : !stablehlo.token
  %1:2 = stablehlo.optimization_barrier %x, %0 : tensor<2xf32>, !stablehlo.token
  return %1#0, %1#1 : tensor<2xf32>, !stablehlo.token
}

// -----

// Multi-block functions are fine as long as they do not communicate.
func.func @several_blocks(%x: tensor<2xf32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
^bb1:
  return %x : tensor<2xf32>
}

// -----

// Ops that divide work between partitions without talking to any.
func.func @partition_id() -> tensor<ui32> {
  %0 = stablehlo.partition_id : tensor<ui32>
  %1 = stablehlo.replica_id : tensor<ui32>
  %2 = stablehlo.add %0, %1 : tensor<ui32>
  return %2 : tensor<ui32>
}
