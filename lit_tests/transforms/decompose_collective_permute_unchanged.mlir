// RUN: stablehlo-tools opt %s --split-input-file > %t.before.mlir
// RUN: stablehlo-tools opt %s -p 'decompose-collective-permute{min-bytes=17}' --split-input-file | diff %t.before.mlir -
// RUN: stablehlo-tools opt %s -p 'decompose-collective-permute{min-bytes=17 explain}' --split-input-file 2>&1 >%t.explained.mlir | filecheck %s --check-prefix=EXPLAINED
// EXPLAINED: note: collective_permute stays: its 16 bytes are less than min-bytes=17
// EXPLAINED: note: collective_permute stays: its result is not used
// EXPLAINED: note: collective_permute stays: it has no elements
// EXPLAINED: note: collective_permute stays: it has no pairs
// EXPLAINED: note: collective_permute stays: it is in an async_start

// The least that is not too small is decomposed, unless permutes are to stay.
// RUN: stablehlo-tools opt %s -p 'decompose-collective-permute{min-bytes=16}' --split-input-file | filecheck %s
// RUN: stablehlo-tools opt %s -p 'decompose-collective-permute{form=collective-permute}' --split-input-file > %t.form.mlir
// RUN: diff %t.before.mlir %t.form.mlir
// RUN: stablehlo-tools opt %s -p 'decompose-collective-permute{form=collective-permute explain}' --split-input-file 2>&1 >%t.form.mlir | filecheck %s --check-prefix=FORM
// FORM: note: collective_permute stays: form=collective-permute
// CHECK-LABEL: module @small
// CHECK: "stablehlo.send"
// CHECK-LABEL: module @nothing_to_send

module @small attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>) {
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}
}

// -----

// No result, no elements, no pairs; a token beside them does not matter.
module @nothing_to_send attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4xf32>, %e: tensor<0xf32>) -> (tensor<0xf32>, tensor<4xf32>) {
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  %z = "stablehlo.collective_permute"(%e) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<0xf32>) -> tensor<0xf32>
  %n = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<> : tensor<0x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  %t = stablehlo.after_all : !stablehlo.token
  %b, %t1 = stablehlo.optimization_barrier %n, %t : tensor<4xf32>, !stablehlo.token
  return %z, %b : tensor<0xf32>, tensor<4xf32>
}
}

// -----

// An async_start holds one collective.
module @asynchronous attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %f = "stablehlo.async_start"(%x) ({
  ^bb0(%a: tensor<4xf32>):
    %y = "stablehlo.collective_permute"(%a) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
    stablehlo.return %y : tensor<4xf32>
  }) : (tensor<4xf32>) -> !stablehlo.future<tensor<4xf32>>
  %r = "stablehlo.async_done"(%f) : (!stablehlo.future<tensor<4xf32>>) -> tensor<4xf32>
  return %r : tensor<4xf32>
}
}
