// RUN: stablehlo-tools opt %s -p 'split-batch{against=text}' --split-input-file --verify-diagnostics
// RUN: not stablehlo-tools opt %s -p 'split-batch{parts=1}' --split-input-file 2>&1 | filecheck %s --check-prefix=ONE
// RUN: not stablehlo-tools opt %s -p 'split-batch{arguments=4}' --split-input-file 2>&1 | filecheck %s --check-prefix=FIFTH
// RUN: not stablehlo-tools opt %s -p 'split-batch{arguments=0 dimension=2}' --split-input-file 2>&1 | filecheck %s --check-prefix=THIRD
// RUN: not stablehlo-tools opt %s -p 'split-batch{dimension=1}' --split-input-file 2>&1 | filecheck %s --check-prefix=UNNAMED
// RUN: not stablehlo-tools opt %s -p 'split-batch{arguments=0 parts=3}' --split-input-file 2>&1 | filecheck %s --check-prefix=THREE

// P1: there are at least two parts.
// ONE: error: split-batch: parts=1 does not split the batch: use at least 2 (P1)
// P4: the arguments have the dimension, and the parts divide it.
// FIFTH: error: there is no argument 4: the program takes 2 (P4)
// THIRD: error: on a device argument 0, tensor<4x6xf32>, has no dimension 2 of a static size: it has 2, from 0 on (P4)
// UNNAMED: error: split-batch: dimension=1 needs `arguments`, the numbers of the arguments that carry the batch (P4)
// THREE: error: dimension 0 of argument 0 has 4 elements on a device, which 3 parts do not divide (P4)
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @one_part_p1(%x: tensor<4x6xf32>, %w: tensor<6x3xf32>) -> tensor<4x3xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x6xf32>, tensor<6x3xf32>) -> tensor<4x3xf32>
  %1 = "stablehlo.collective_permute"(%0) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<4x3xf32>) -> tensor<4x3xf32>
  return %1 : tensor<4x3xf32>
}
}

// -----

// P4: three rows of tokens on each device are the batch, of 24 in all.
module attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=8]>
  func.func @odd_p4(%w: tensor<5x5xf32>, %tokens: tensor<24x5xi32>) -> tensor<24x5xf32> {
    // expected-error@+1 {{split-batch: 2 parts do not divide the batch: argument 1 has 24 rows, 3 on each of 8 devices; take 3 parts, or a batch of a multiple of 16 (P4)}}
    %0 = sdy.manual_computation(%w, %tokens) in_shardings=[<@mesh, [{}, {}]>, <@mesh, [{"x"}, {}]>] out_shardings=[<@mesh, [{"x"}, {}]>] manual_axes={"x"} (%wi: tensor<5x5xf32>, %ti: tensor<3x5xi32>) {
      %f = stablehlo.convert %ti : (tensor<3x5xi32>) -> tensor<3x5xf32>
      %h = stablehlo.dot_general %f, %wi, contracting_dims = [1] x [0] : (tensor<3x5xf32>, tensor<5x5xf32>) -> tensor<3x5xf32>
      %r = "stablehlo.all_reduce"(%h) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>, use_global_device_ids}> ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %s = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %s : tensor<f32>
      }) : (tensor<3x5xf32>) -> tensor<3x5xf32>
      %m = stablehlo.dot_general %r, %wi, contracting_dims = [1] x [0] : (tensor<3x5xf32>, tensor<5x5xf32>) -> tensor<3x5xf32>
      sdy.return %m : tensor<3x5xf32>
    } : (tensor<5x5xf32>, tensor<24x5xi32>) -> tensor<24x5xf32>
    return %0 : tensor<24x5xf32>
  }
}

// -----

// P2: what one device does is explicit.
// expected-error@+1 {{the work of one device is not explicit: main itself has no manual computation and no collective; run partition first (P2)}}
func.func @main_p2(%x: tensor<4x6xf32>, %w: tensor<6x3xf32>) -> tensor<4x3xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x6xf32>, tensor<6x3xf32>) -> tensor<4x3xf32>
  return %0 : tensor<4x3xf32>
}

// -----

// P3: the program has no tokens.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @token_p3(%x: tensor<4x6xf32>) -> tensor<4x6xf32> {
  // expected-error@+1 {{stablehlo.after_all has a token, and tokens fix an order that split-batch changes: run split-batch before thread-tokens, or strip-tokens first (P3)}}
  %t = stablehlo.after_all : !stablehlo.token
  %0, %u = stablehlo.optimization_barrier %x, %t : tensor<4x6xf32>, !stablehlo.token
  %1 = "stablehlo.collective_permute"(%0) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<4x6xf32>) -> tensor<4x6xf32>
  return %1 : tensor<4x6xf32>
}
}

// -----

// P4: some dimension can be divided.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
// expected-error@+2 {{no argument has a dimension that 2 parts divide on a device (P4)}}
// expected-note@+1 {{argument 0 has 1 row, which 2 do not divide}}
func.func @one_sample_p4(%x: tensor<1x5xi32>) -> tensor<1x5xi32> {
  %0 = "stablehlo.collective_permute"(%x) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<1x5xi32>) -> tensor<1x5xi32>
  return %0 : tensor<1x5xi32>
}
}

// -----

// P5: the batch is independent; here all samples are centred by their mean.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @centred_p5(%x: tensor<4x3xf32>) -> tensor<4x3xf32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  // expected-error@+1 {{stablehlo.reduce mixes samples of the batch (dimension 0 of argument 0), and its result is used together with samples again: the parts would wait for each other (P5); join-mixed accepts that, `arguments` and `dimension` name another batch}}
  %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4x3xf32>, tensor<f32>) -> tensor<3xf32>
  %1 = stablehlo.broadcast_in_dim %0, dims = [1] : (tensor<3xf32>) -> tensor<4x3xf32>
  // expected-note@+1 {{it meets samples again here}}
  %2 = stablehlo.subtract %x, %1 : tensor<4x3xf32>
  %3 = "stablehlo.collective_permute"(%2) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<4x3xf32>) -> tensor<4x3xf32>
  return %3 : tensor<4x3xf32>
}
}
