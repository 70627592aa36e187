// What is faster in parts on a TPU: a gather over 64 chips of at most 16 MiB, which XLA:TPU makes a
// sum. Between nodes of GPUs, where the way round is long; not where NVLink joins all of them.
// RUN: stablehlo-tools opt %s -p 'hierarchical-collectives{hardware=tpu-v5e explain}' --split-input-file 2>&1 >%t.tpu.mlir | filecheck %s --check-prefix=SAID
// RUN: filecheck %s --check-prefix=PARTS --input-file %t.tpu.mlir
// RUN: stablehlo-tools opt %s --split-input-file > %t.before.mlir
// RUN: stablehlo-tools opt %s -p 'hierarchical-collectives{hardware=gb200}' --split-input-file | diff -u %t.before.mlir -

// SAID: all_gather over 64: over 2 and 32 in 139 us, not 213 us
// PARTS-LABEL: @small
// PARTS: "stablehlo.all_gather"{{.*}} -> tensor<128x1024xbf16>
// PARTS: "stablehlo.all_gather"{{.*}} -> tensor<4096x1024xbf16>
module attributes {mhlo.num_partitions = 64 : i32, mhlo.num_replicas = 1 : i32} {
func.func @small(%x: tensor<64x1024xbf16>) -> tensor<4096x1024xbf16> {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63]]> : tensor<1x64xi64>, use_global_device_ids} : (tensor<64x1024xbf16>) -> tensor<4096x1024xbf16>
  return %g : tensor<4096x1024xbf16>
}
}

// -----

// SAID: all_gather over 64: unchanged: no rows are faster than
// PARTS-LABEL: @large
// PARTS: "stablehlo.all_gather"{{.*}} -> tensor<65536x1024xbf16>
// PARTS-NOT: stablehlo.all_gather
module attributes {mhlo.num_partitions = 64 : i32, mhlo.num_replicas = 1 : i32} {
func.func @large(%x: tensor<1024x1024xbf16>) -> tensor<65536x1024xbf16> {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63]]> : tensor<1x64xi64>, use_global_device_ids} : (tensor<1024x1024xbf16>) -> tensor<65536x1024xbf16>
  return %g : tensor<65536x1024xbf16>
}
}

// -----

// SAID: all_reduce over 64: unchanged: no rows are faster than
// PARTS-LABEL: @sum
// PARTS: "stablehlo.all_reduce"
// PARTS-NOT: stablehlo.all_gather
module attributes {mhlo.num_partitions = 64 : i32, mhlo.num_replicas = 1 : i32} {
func.func @sum(%x: tensor<1024x1024xbf16>) -> tensor<1024x1024xbf16> {
  %s = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<bf16>, %r: tensor<bf16>):
    %a = stablehlo.add %l, %r : tensor<bf16>
    stablehlo.return %a : tensor<bf16>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63]]> : tensor<1x64xi64>, use_global_device_ids} : (tensor<1024x1024xbf16>) -> tensor<1024x1024xbf16>
  return %s : tensor<1024x1024xbf16>
}
}

// -----

// A small gather beside a large one that lasts longer: nothing would be gained.
// SAID: all stay whole: XLA is expected to be as fast by itself
// PARTS-LABEL: @beside
// PARTS: "stablehlo.all_gather"{{.*}} -> tensor<4096x1024xbf16>
module attributes {mhlo.num_partitions = 64 : i32, mhlo.num_replicas = 1 : i32} {
func.func @beside(%x: tensor<64x1024xbf16>, %y: tensor<1024x1024xbf16>) -> (tensor<4096x1024xbf16>, tensor<65536x1024xbf16>) {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63]]> : tensor<1x64xi64>, use_global_device_ids} : (tensor<64x1024xbf16>) -> tensor<4096x1024xbf16>
  %h = "stablehlo.all_gather"(%y) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63]]> : tensor<1x64xi64>, use_global_device_ids} : (tensor<1024x1024xbf16>) -> tensor<65536x1024xbf16>
  return %g, %h : tensor<4096x1024xbf16>, tensor<65536x1024xbf16>
}
}
