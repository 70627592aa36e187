// What only looks like a pseudo-token stays as it is, to the byte, and nothing is said about it.
// RUN: stablehlo-tools opt %s --split-input-file > %t.before
// RUN: stablehlo-tools opt %s -p import-pseudo-tokens --split-input-file > %t.after 2> %t.said
// RUN: diff -u %t.before %t.after
// RUN: stablehlo-tools opt %s -p 'import-pseudo-tokens{fork=preserve drop-token-argument}' --split-input-file > %t.after 2>> %t.said
// RUN: diff -u %t.before %t.after
// RUN: diff -u /dev/null %t.said

// A second run changes nothing and says nothing, in either form.
// RUN: cat %S/import_pseudo_tokens.mlir %{inputs}/separator.txt %S/import_pseudo_tokens_control_flow.mlir > %t.mlir
// RUN: stablehlo-tools opt %t.mlir -p import-pseudo-tokens --split-input-file > %t.once 2>/dev/null
// RUN: filecheck %s --input-file %t.once
// RUN: stablehlo-tools opt %t.once -p import-pseudo-tokens --split-input-file > %t.twice 2> %t.said
// RUN: diff -u %t.once %t.twice
// RUN: diff -u /dev/null %t.said
// RUN: stablehlo-tools opt %S/import_pseudo_tokens.mlir -p 'import-pseudo-tokens{fork=preserve}' --split-input-file > %t.once 2>/dev/null
// RUN: stablehlo-tools opt %t.once -p 'import-pseudo-tokens{fork=preserve}' --split-input-file | diff -u %t.once -

// The same input makes the same bytes, whatever the order of Python's sets.
// RUN: env PYTHONHASHSEED=1 stablehlo-tools opt %t.mlir -p import-pseudo-tokens --split-input-file > %t.first 2>&1
// RUN: env PYTHONHASHSEED=2 stablehlo-tools opt %t.mlir -p import-pseudo-tokens --split-input-file > %t.second 2>&1
// RUN: cmp %t.first %t.second

// That there was a chain in the first place:
// CHECK-COUNT-30: stablehlo_tools.token_link

// A bias that is added to the input of one collective.
func.func @bias(%bias: tensor<f32>, %x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.broadcast_in_dim %bias, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %1 = stablehlo.add %x, %0 : tensor<2xf32>
  %2 = "stablehlo.collective_permute"(%1) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %2 : tensor<2xf32>
}

// -----

// A bias of several collectives: no token comes out of any.
func.func @one_bias_for_two(%bias: tensor<f32>, %x: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) {
  %0 = stablehlo.broadcast_in_dim %bias, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %1 = stablehlo.add %x, %0 : tensor<2xf32>
  %2 = "stablehlo.collective_permute"(%1) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %3 = stablehlo.add %2, %0 : tensor<2xf32>
  %4 = "stablehlo.collective_permute"(%3) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %2, %4 : tensor<2xf32>, tensor<2xf32>
}

// -----

// A sum with zero, in front of a collective, and a product of zero with its first element, which
// no further collective takes.
func.func @zeros(%x: tensor<2xf32>) -> (tensor<2xf32>, tensor<f32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %zeros = stablehlo.constant dense<0.0> : tensor<2xf32>
  %0 = stablehlo.add %x, %zeros : tensor<2xf32>
  %1 = "stablehlo.collective_permute"(%0) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %2 = stablehlo.slice %1 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
  %3 = stablehlo.reshape %2 : (tensor<1xf32>) -> tensor<f32>
  %4 = stablehlo.multiply %zero, %3 : tensor<f32>
  return %1, %4 : tensor<2xf32>, tensor<f32>
}

// -----

// The element of another collective than the one that the number went into.
func.func @other_collective(%x: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>, tensor<2xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %zeros = stablehlo.constant dense<0.0> : tensor<2xf32>
  %0 = stablehlo.add %x, %zeros : tensor<2xf32>
  %1 = "stablehlo.collective_permute"(%0) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %2 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %3 = stablehlo.slice %2 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
  %4 = stablehlo.reshape %3 : (tensor<1xf32>) -> tensor<f32>
  %5 = stablehlo.multiply %zero, %4 : tensor<f32>
  %6 = stablehlo.broadcast_in_dim %5, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %7 = stablehlo.add %x, %6 : tensor<2xf32>
  %8 = "stablehlo.collective_permute"(%7) {
    source_target_pairs = dense<[[1, 0]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %1, %2, %8 : tensor<2xf32>, tensor<2xf32>, tensor<2xf32>
}

// -----

// Not the first element.
func.func @not_the_first(%x: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %zeros = stablehlo.constant dense<0.0> : tensor<2xf32>
  %0 = stablehlo.add %x, %zeros : tensor<2xf32>
  %1 = "stablehlo.collective_permute"(%0) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %2 = stablehlo.slice %1 [1:2] : (tensor<2xf32>) -> tensor<1xf32>
  %3 = stablehlo.reshape %2 : (tensor<1xf32>) -> tensor<f32>
  %4 = stablehlo.multiply %zero, %3 : tensor<f32>
  %5 = stablehlo.broadcast_in_dim %4, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %6 = stablehlo.add %x, %5 : tensor<2xf32>
  %7 = "stablehlo.collective_permute"(%6) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %1, %7 : tensor<2xf32>, tensor<2xf32>
}

// -----

// -0.0 is no token.
func.func @minus_zero(%x: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %minus = stablehlo.constant dense<-0.0> : tensor<2xf32>
  %0 = stablehlo.add %x, %minus : tensor<2xf32>
  %1 = "stablehlo.collective_permute"(%0) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %2 = stablehlo.slice %1 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
  %3 = stablehlo.reshape %2 : (tensor<1xf32>) -> tensor<f32>
  %4 = stablehlo.multiply %zero, %3 : tensor<f32>
  %5 = stablehlo.broadcast_in_dim %4, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %6 = stablehlo.add %x, %5 : tensor<2xf32>
  %7 = "stablehlo.collective_permute"(%6) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %1, %7 : tensor<2xf32>, tensor<2xf32>
}

// -----

// The user sums a zero, or a loss, over the devices and reads the sum.
func.func @sums_are_used(%x: tensor<2xf32>, %loss: tensor<f32>) -> (tensor<2xf32>, tensor<f32>, tensor<2xf32>, tensor<f32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0:2 = "stablehlo.all_reduce"(%x, %zero) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %sum = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %sum : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>, tensor<f32>) -> (tensor<2xf32>, tensor<f32>)
  %1:2 = "stablehlo.all_reduce"(%x, %loss) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %sum = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %sum : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>, tensor<f32>) -> (tensor<2xf32>, tensor<f32>)
  return %0#0, %0#1, %1#0, %1#1 : tensor<2xf32>, tensor<f32>, tensor<2xf32>, tensor<f32>
}

// -----

// A reduction that makes something of zeros: its result, unused or not, comes from no token.
func.func @reduction_with_a_constant(%x: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %one = stablehlo.constant dense<1.0> : tensor<f32>
  %0:2 = "stablehlo.all_reduce"(%x, %zero) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %sum = stablehlo.add %a, %one : tensor<f32>
    stablehlo.return %sum : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>, tensor<f32>) -> (tensor<2xf32>, tensor<f32>)
  %1 = stablehlo.broadcast_in_dim %0#1, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %2 = stablehlo.add %x, %1 : tensor<2xf32>
  %3 = "stablehlo.collective_permute"(%2) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0#0, %3 : tensor<2xf32>, tensor<2xf32>
}

// -----

// What a loop makes of its zero is none, though it looks like a chain inside.
func.func @counter(%x: tensor<2xf32>, %p: tensor<i1>) -> tensor<2xf32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %one = stablehlo.constant dense<1.0> : tensor<f32>
  %0:2 = stablehlo.while(%v = %x, %t = %zero) : tensor<2xf32>, tensor<f32>
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %1 = stablehlo.broadcast_in_dim %t, dims = [] : (tensor<f32>) -> tensor<2xf32>
      %2 = stablehlo.add %v, %1 : tensor<2xf32>
      %3 = "stablehlo.collective_permute"(%2) {
        source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
      } : (tensor<2xf32>) -> tensor<2xf32>
      %4 = stablehlo.slice %3 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
      %5 = stablehlo.reshape %4 : (tensor<1xf32>) -> tensor<f32>
      %6 = stablehlo.multiply %t, %5 : tensor<f32>
      %7 = stablehlo.broadcast_in_dim %6, dims = [] : (tensor<f32>) -> tensor<2xf32>
      %8 = stablehlo.add %v, %7 : tensor<2xf32>
      %9 = "stablehlo.collective_permute"(%8) {
        source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
      } : (tensor<2xf32>) -> tensor<2xf32>
      %10 = stablehlo.add %t, %one : tensor<f32>
      stablehlo.return %9, %10 : tensor<2xf32>, tensor<f32>
    }
  return %0#0 : tensor<2xf32>
}

// -----

// A function that gets zero from one caller and something else from another.
func.func @main(%x: tensor<2xf32>, %a: tensor<f32>) -> (tensor<2xf32>, tensor<2xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = call @exchange(%x, %zero) : (tensor<2xf32>, tensor<f32>) -> tensor<2xf32>
  %1 = call @exchange(%x, %a) : (tensor<2xf32>, tensor<f32>) -> tensor<2xf32>
  return %0, %1 : tensor<2xf32>, tensor<2xf32>
}
func.func private @exchange(%x: tensor<2xf32>, %t: tensor<f32>) -> tensor<2xf32> {
  %0 = stablehlo.broadcast_in_dim %t, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %1 = stablehlo.add %x, %0 : tensor<2xf32>
  %2 = "stablehlo.collective_permute"(%1) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %3 = stablehlo.slice %2 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
  %4 = stablehlo.reshape %3 : (tensor<1xf32>) -> tensor<f32>
  %5 = stablehlo.multiply %t, %4 : tensor<f32>
  %6 = stablehlo.broadcast_in_dim %5, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %7 = stablehlo.add %2, %6 : tensor<2xf32>
  %8 = "stablehlo.collective_permute"(%7) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %8 : tensor<2xf32>
}
