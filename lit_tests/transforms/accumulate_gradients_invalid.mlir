// RUN: stablehlo-tools opt %s -p accumulate-gradients --split-input-file --verify-diagnostics
// RUN: not stablehlo-tools opt %s -p 'accumulate-gradients{microbatches=1}' --split-input-file 2>&1 | filecheck %s --check-prefix=ONE
// RUN: not stablehlo-tools opt %s -p 'accumulate-gradients{dimension=1}' --split-input-file 2>&1 | filecheck %s --check-prefix=UNNAMED
// RUN: not stablehlo-tools opt %s -p 'accumulate-gradients{arguments=2}' --split-input-file 2>&1 | filecheck %s --check-prefix=THIRD
// RUN: not stablehlo-tools opt %s -p 'accumulate-gradients{arguments=0 dimension=2}' --split-input-file 2>&1 | filecheck %s --check-prefix=RANK
// RUN: not stablehlo-tools opt %s -p 'accumulate-gradients{arguments=0 microbatches=3}' --split-input-file 2>&1 | filecheck %s --check-prefix=THREE

// P1: there are at least two microbatches, and `dimension` has arguments.
// ONE: error: accumulate-gradients: microbatches=1: there must be at least two (P1)
// UNNAMED: error: accumulate-gradients: dimension=1 needs `arguments`, the numbers of the arguments that carry the batch (P1)
// P3: the arguments have the dimension, and the microbatches divide it.
// THIRD: error: accumulate-gradients: there is no argument 2: the program takes 2 (P3)
// RANK: error: accumulate-gradients: argument 0, tensor<4x6xf32>, has no dimension 2 of a static size: it has 2, from 0 on (P3)
// THREE: error: accumulate-gradients: dimension 0 of argument 0 has 4 elements, which 3 microbatches do not divide (P3)
func.func @options_p1(%x: tensor<4x6xf32>, %w: tensor<6x3xf32>) -> tensor<4x3xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x6xf32>, tensor<6x3xf32>) -> tensor<4x3xf32>
  return %0 : tensor<4x3xf32>
}

// -----

// P2: the program has no tokens.
func.func @token_p2(%x: tensor<4x6xf32>) -> tensor<4x6xf32> {
  // expected-error@+1 {{stablehlo.after_all has a token, and tokens fix an order that accumulate-gradients changes: run accumulate-gradients before thread-tokens, or strip-tokens first (P2)}}
  %t = stablehlo.after_all : !stablehlo.token
  %0, %u = stablehlo.optimization_barrier %x, %t : tensor<4x6xf32>, !stablehlo.token
  return %0 : tensor<4x6xf32>
}

// -----

// P3: some argument can be divided.
// expected-error@+1 {{accumulate-gradients: 2 microbatches do not divide the batch: argument 0 has 3 rows; take 3 microbatches, or a batch of a multiple of 2 (P3)}}
func.func @odd_p3(%x: tensor<3x5xf32>, %w: tensor<5x7xf32>) -> tensor<3x7xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<3x5xf32>, tensor<5x7xf32>) -> tensor<3x7xf32>
  return %0 : tensor<3x7xf32>
}

// -----

// P4: the batch is independent; here activations are centred by their mean, and go on to a layer.
func.func @centred_p4(%w: tensor<5x3xf32>, %v: tensor<3x7xf32>, %x: tensor<4x5xf32>) -> tensor<4x7xf32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x5xf32>, tensor<5x3xf32>) -> tensor<4x3xf32>
  // expected-error@+1 {{accumulate-gradients: stablehlo.reduce needs all samples of the batch (dimension 0 of argument 2), and its result meets samples again, so no microbatch can pass this op before all have reached it (P4): compute statistics of each sample separately, let per-microbatch=true compute them for each microbatch, or name another batch with `arguments` and `dimension`}}
  %1 = stablehlo.reduce(%0 init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4x3xf32>, tensor<f32>) -> tensor<3xf32>
  %2 = stablehlo.broadcast_in_dim %1, dims = [1] : (tensor<3xf32>) -> tensor<4x3xf32>
  %3 = stablehlo.subtract %0, %2 : tensor<4x3xf32>
  // expected-note@+1 {{stablehlo.dot_general works on samples and depends on it}}
  %4 = stablehlo.dot_general %3, %v, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x7xf32>) -> tensor<4x7xf32>
  return %4 : tensor<4x7xf32>
}

// -----

// P4: nobody knows what a custom call does with each sample.
func.func @opaque_p4(%w: tensor<5x3xf32>, %v: tensor<3x7xf32>, %x: tensor<4x5xf32>) -> tensor<4x7xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x5xf32>, tensor<5x3xf32>) -> tensor<4x3xf32>
  // expected-error@+2 {{accumulate-gradients: a kernel reads samples of the batch (dimension 0 of argument 2) and cannot run on one microbatch (P4): stablehlo.custom_call @"unknown" is opaque: its independent dimensions are unknown; if it computes each sample by itself, state that in the file of --rules: `unknown: b d1 -> b d2; b free`}}
  // expected-note@+1 {{stablehlo.custom_call works on samples and depends on it}}
  %1 = stablehlo.custom_call @unknown(%0) : (tensor<4x3xf32>) -> tensor<4x3xf32>
  %2 = stablehlo.dot_general %1, %v, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x7xf32>) -> tensor<4x7xf32>
  return %2 : tensor<4x7xf32>
}

// -----

// P5: a random number that is drawn in each layer would be drawn for each microbatch.
func.func @random_p5(%w: tensor<5x5xf32>, %x: tensor<4x5xf32>) -> tensor<4x5xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %two = stablehlo.constant dense<2> : tensor<i32>
  %low = stablehlo.constant dense<0.0> : tensor<f32>
  %high = stablehlo.constant dense<1.0> : tensor<f32>
  %shape = stablehlo.constant dense<5> : tensor<1xi64>
  // expected-error@+1 {{accumulate-gradients: stablehlo.while or an op in it has an effect, which would happen on each microbatch, or earlier than now (P5)}}
  %0:2 = stablehlo.while(%i = %zero, %h = %x) : tensor<i32>, tensor<4x5xf32>
  cond {
    %1 = stablehlo.compare LT, %i, %two : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %1 : tensor<i1>
  } do {
    %1 = stablehlo.dot_general %h, %w, contracting_dims = [1] x [0] : (tensor<4x5xf32>, tensor<5x5xf32>) -> tensor<4x5xf32>
    %2 = stablehlo.rng %low, %high, %shape, distribution = UNIFORM : (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<5xf32>
    %3 = stablehlo.broadcast_in_dim %2, dims = [1] : (tensor<5xf32>) -> tensor<4x5xf32>
    %4 = stablehlo.multiply %1, %3 : tensor<4x5xf32>
    %5 = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %5, %4 : tensor<i32>, tensor<4x5xf32>
  }
  return %0#1 : tensor<4x5xf32>
}

// -----

// P2: nor an edge of Shardy's propagation, whose value nothing else may use.
func.func @edge_p2(%x: tensor<32x96xf32>, %w: tensor<96x96xf32>) -> tensor<32x96xf32> {
  // expected-error@+1 {{sdy.data_flow_edge must be the only use of its value, but accumulate-gradients may add others: run sdy-sink-data-flow-edges before accumulate-gradients (P2)}}
  %0 = sdy.data_flow_edge %x : tensor<32x96xf32>
  %1 = stablehlo.dot_general %0, %w, contracting_dims = [1] x [0] : (tensor<32x96xf32>, tensor<96x96xf32>) -> tensor<32x96xf32>
  return %1 : tensor<32x96xf32>
}

// -----

// P6: a microbatch of 4 samples on 8 devices, with the gradient of a convolution.
sdy.mesh @mesh = <["data"=8]>
func.func @convolution_p6(%w: tensor<3x3x2x2xf32>, %x: tensor<8x6x6x2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}, {}, {}]>}) -> tensor<3x3x2x2xf32> {
  %0 = stablehlo.convolution(%x, %w) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : (tensor<8x6x6x2xf32>, tensor<3x3x2x2xf32>) -> tensor<8x6x6x2xf32>
  // expected-error@+1 {{accumulate-gradients: argument 1 is divided over 8 devices along the batch, and a microbatch has 4 samples: several devices will compute the same samples; use fewer microbatches, or run partition next: XLA's partitioner computes such gradients of convolutions wrongly (P6)}}
  %1 = stablehlo.convolution(%x, %0) dim_numbers = [f, 0, 1, b]x[i, 0, 1, o]->[0, 1, b, f], window = {pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : (tensor<8x6x6x2xf32>, tensor<8x6x6x2xf32>) -> tensor<3x3x2x2xf32>
  return %1 : tensor<3x3x2x2xf32>
}
