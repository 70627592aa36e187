// RUN: stablehlo-tools opt %s -p decompose-collective-permute --split-input-file --verify-diagnostics
// RUN: not stablehlo-tools opt %s -p 'decompose-collective-permute{min-bytes=-1}' --split-input-file 2>&1 | filecheck %s --check-prefix=NEGATIVE

// NEGATIVE: error: decompose-collective-permute: min-bytes must be a number of bytes, 0 or more (P8)

// P1: every communicating op is of a dialect that is understood.
func.func @mhlo_collective_p1(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-error@+1 {{mhlo.collective_permute communicates in a dialect that cannot be rewritten here}}
  %0 = "mhlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

// P2: pairs name processes that the module has.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @unknown_process_p2(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-error@+1 {{id 2 is not one of the 2 cross_partition processes of the module}}
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
  return %y : tensor<2xf32>
}
}

// -----

// P3: no op has a token yet.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @threaded_p3(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-error@+1 {{stablehlo.after_all has a token, and tokens fix an order that decompose-collective-permute changes: run decompose-collective-permute before thread-tokens, or strip-tokens first (P3)}}
  %t = stablehlo.after_all : !stablehlo.token
  %x1, %t1 = stablehlo.optimization_barrier %x, %t : tensor<2xf32>, !stablehlo.token
  %y = "stablehlo.collective_permute"(%x1) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
  return %y : tensor<2xf32>
}
}

// -----

// P4: pairs have no cycle.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @ring_p4(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-error@+1 {{stablehlo.collective_permute: its pairs have the cycle 0>1>0, in which devices can wait for each other: run break-permute-cycles first (P4)}}
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
  return %y : tensor<2xf32>
}
}

// -----

// P4: a device that sends to itself would wait for itself.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @own_p4(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-error@+1 {{its pairs have the cycle 1>1}}
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[1, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
  return %y : tensor<2xf32>
}
}

// -----

// P5: pairs count partitions.
module attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
func.func @replicas_p5(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-error@+1 {{its pairs count replicas, but those of send and recv count partitions: give it a channel, and the module several partitions (P5)}}
  %y = "stablehlo.collective_permute"(%x) {source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
  return %y : tensor<2xf32>
}
}

// -----

// P6: the size to receive is known.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @symbolic_p6(%x: tensor<?xf32>) -> tensor<?xf32> {
  // expected-error@+1 {{tensor<?xf32> has a dimension of unknown size, and a recv needs a static shape (P6)}}
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<?xf32>) -> tensor<?xf32>
  return %y : tensor<?xf32>
}
}

// -----

// P7: no mesh axis is left free around it.
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["stage"=2, "data"=2]>
func.func @free_axis_p7(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %r = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"stage", ?}, {?}]>] out_shardings=[<@mesh, [{"stage", ?}, {?}]>] manual_axes={"stage"} (%a: tensor<4x4xf32>) {
    // expected-error@+1 {{mesh axes are left free around it, and XLA's partitioner supports no send or recv: make all axes manual, or run partition first (P7)}}
    %y = "stablehlo.collective_permute"(%a) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
    sdy.return %y : tensor<4x4xf32>
  } : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %r : tensor<8x4xf32>
}
}

// -----

// P8: the second RUN line gives a size that is none.
func.func @no_size_p8(%x: tensor<2xf32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
}

// -----

// P9: a token can be led to it.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
// expected-error@+1 {{@public_p9 communicates, is public and is also called inside the module}}
func.func @public_p9(%x: tensor<2xf32>) -> tensor<2xf32> {
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
  return %y : tensor<2xf32>
}
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-note@+1 {{called here}}
  %0 = call @public_p9(%x) : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}
}
