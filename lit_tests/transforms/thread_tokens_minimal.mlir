// RUN: stablehlo-tools opt %s -p 'thread-tokens{minimal}' --split-input-file | filecheck %s --enable-var-scope

// `minimal` leaves out a link where dataflow orders two neighbours already.

// Nothing comes before the first collective of a public function, nothing after the last.
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
func.func @one_alone(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

// Floats that are added and multiplied keep their dependence, NaN being what it is: no link.
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

// Only neighbours are compared: first and second are ordered by dataflow, second and third by a link.
func.func @each_pair_by_itself(
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

// A loop is linked on either side, and in it both ends are open: iterations follow each other.
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
