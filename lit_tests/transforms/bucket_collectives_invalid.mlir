// RUN: stablehlo-tools opt %s -p bucket-collectives --split-input-file --verify-diagnostics
// RUN: not stablehlo-tools opt %s -p 'bucket-collectives{memory-limit=-1}' --split-input-file 2>&1 | filecheck %s --check-prefix=NEGATIVE

// NEGATIVE: error: bucket-collectives: memory-limit is a number of GiB, not negative (P3)

// P1: every communicating op is of a dialect that is understood.
func.func @mhlo_collective_p1(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-error@+1 {{mhlo.collective_permute communicates in a dialect that cannot be rewritten here}}
  %0 = "mhlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

// P2: replica groups name processes that the module has.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @unknown_process_p2(%x: tensor<2xf32>) -> tensor<6xf32> {
  // expected-error@+1 {{id 2 is not one of the 2 flattened_ids processes of the module}}
  %0 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1, 2]]> : tensor<1x3xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2xf32>) -> tensor<6xf32>
  return %0 : tensor<6xf32>
}
}

// -----

// P4: every tensor has a known size.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
// expected-error@+1 {{the size of tensor<?xf32> is unknown, so the op cannot be timed}}
func.func @symbolic_p4(%x: tensor<?xf32>) -> tensor<?xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<?xf32>) -> tensor<?xf32>
  return %0 : tensor<?xf32>
}
}

// -----

// P3: the second RUN line gives a limit that is none; bucket_collectives_memory_invalid.mlir, one
// that is too low.
func.func @no_limit_p3(%x: tensor<2xf32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
}
