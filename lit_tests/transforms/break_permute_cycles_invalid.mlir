// RUN: stablehlo-tools opt %s -p break-permute-cycles --split-input-file --verify-diagnostics
// RUN: not stablehlo-tools opt %s -p 'break-permute-cycles{min-bytes=-1}' --split-input-file 2>&1 | filecheck %s --check-prefix=NEGATIVE

// NEGATIVE: error: break-permute-cycles: min-bytes must be a number of bytes, 0 or more (P5)

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
  // expected-error@+1 {{stablehlo.after_all has a token, and tokens fix an order that break-permute-cycles changes: run break-permute-cycles before thread-tokens, or strip-tokens first (P3)}}
  %t = stablehlo.after_all : !stablehlo.token
  %x1, %t1 = stablehlo.optimization_barrier %x, %t : tensor<2xf32>, !stablehlo.token
  %y = "stablehlo.collective_permute"(%x1) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
  return %y : tensor<2xf32>
}
}

// -----

// P4: a predicate is one for all devices that differ along an axis left free.
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["stage"=2, "data"=2]>
func.func @uneven_cut_p4(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %r = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"stage", ?}, {?}]>] out_shardings=[<@mesh, [{"stage", ?}, {?}]>] manual_axes={"stage"} (%a: tensor<4x4xf32>) {
    // expected-error@+1 {{its cycle would be cut for only some of the devices 0, 1, which differ only along free mesh axes around it, data: make all axes manual (P4)}}
    %y = "stablehlo.collective_permute"(%a) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 2], [2, 0], [1, 3]]> : tensor<3x2xi64>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
    sdy.return %y : tensor<4x4xf32>
  } : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %r : tensor<8x4xf32>
}
}

// -----

// P4: nor is it known of a function which axes are free around its calls.
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["stage"=2, "data"=2]>
func.func private @called_p4(%a: tensor<4x4xf32>) -> tensor<4x4xf32> {
  // expected-error@+1 {{has a cycle and is in a called function, and the module's manual computations leave mesh axes free: inline the calls first (P4)}}
  %y = "stablehlo.collective_permute"(%a) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 2], [2, 0], [1, 3], [3, 1]]> : tensor<4x2xi64>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  return %y : tensor<4x4xf32>
}
func.func @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %r = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"stage", ?}, {?}]>] out_shardings=[<@mesh, [{"stage", ?}, {?}]>] manual_axes={"stage"} (%a: tensor<4x4xf32>) {
    %y = func.call @called_p4(%a) : (tensor<4x4xf32>) -> tensor<4x4xf32>
    sdy.return %y : tensor<4x4xf32>
  } : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %r : tensor<8x4xf32>
}
}

// -----

// P5: the second RUN line gives a size that is none.
func.func @no_size_p5(%x: tensor<2xf32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
}

// -----

// P6: zeros for the others can be written.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @symbolic_zeros_p6(%x: tensor<?xf32>) -> tensor<?xf32> {
  // expected-error@+1 {{some devices send to themselves and the others get zeros, which need a static shape, not tensor<?xf32> (P6)}}
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 0]]> : tensor<1x2xi64>} : (tensor<?xf32>) -> tensor<?xf32>
  return %y : tensor<?xf32>
}
}
