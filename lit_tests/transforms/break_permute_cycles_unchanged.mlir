// RUN: stablehlo-tools opt %s --split-input-file > %t.before.mlir
// RUN: stablehlo-tools opt %s -p 'break-permute-cycles{min-bytes=17}' --split-input-file | diff %t.before.mlir -
// RUN: stablehlo-tools opt %s -p 'break-permute-cycles{min-bytes=17 explain}' --split-input-file 2>&1 >%t.explained.mlir | filecheck %s --check-prefix=EXPLAINED
// EXPLAINED: note: collective_permute with the cycle 0>1>0 stays: its 16 bytes are less than min-bytes=17
// EXPLAINED: note: collective_permute with the cycle 0>1>0 stays: its result is not used
// EXPLAINED: note: collective_permute with the cycle 0>1>0 stays: it has no elements
// EXPLAINED: note: collective_permute with the cycle 0>1>0 stays: it is in an async_start

// The least that is not too small is broken.
// RUN: stablehlo-tools opt %s -p 'break-permute-cycles{min-bytes=16}' --split-input-file | filecheck %s
// CHECK-LABEL: module @small
// CHECK-COUNT-2: "stablehlo.collective_permute"
// CHECK-LABEL: module @acyclic

module @small attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>) {
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}
}

// -----

// Chains, a tree with its root cut off, no pairs; a token beside them does not matter.
module @acyclic attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) {
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2], [3, 0]]> : tensor<3x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  %z = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2], [3, 0], [4, 5], [5, 6], [7, 4]]> : tensor<6x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  %n = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<> : tensor<0x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  %t = stablehlo.after_all : !stablehlo.token
  %b, %t1 = stablehlo.optimization_barrier %n, %t : tensor<4xf32>, !stablehlo.token
  return %y, %z, %b : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
}
}

// -----

// Nobody would see the difference.
module @unused attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4xf32>, %e: tensor<0xf32>) -> (tensor<0xf32>) {
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  %z = "stablehlo.collective_permute"(%e) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>} : (tensor<0xf32>) -> tensor<0xf32>
  return %z : tensor<0xf32>
}
}

// -----

// An async_start holds one collective.
module @asynchronous attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %f = "stablehlo.async_start"(%x) ({
  ^bb0(%a: tensor<4xf32>):
    %y = "stablehlo.collective_permute"(%a) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
    stablehlo.return %y : tensor<4xf32>
  }) : (tensor<4xf32>) -> !stablehlo.future<tensor<4xf32>>
  %r = "stablehlo.async_done"(%f) : (!stablehlo.future<tensor<4xf32>>) -> tensor<4xf32>
  return %r : tensor<4xf32>
}
}
