// RUN: stablehlo-tools opt %s -p 'hierarchical-collectives' --split-input-file --verify-diagnostics
// RUN: not stablehlo-tools opt %s -p 'hierarchical-collectives{rows=1}' --split-input-file -o %t.none.mlir 2>&1 | filecheck %s --check-prefix=ROW
// RUN: test ! -e %t.none.mlir

// P4: one member is no row.
// ROW: hierarchical-collectives: rows=1 is too few: use at least 2, or 0 to choose (P4)

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
func.func @unknown_process_p2(%x: tensor<8xf32>) -> tensor<32xf32> {
  // expected-error@+1 {{id 2 is not one of the 2 flattened_ids processes of the module}}
  %a = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<32xf32>
  return %a : tensor<32xf32>
}
}

// -----

// P3: no op has a token.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @token_p3(%x: tensor<8xf32>) -> tensor<8xf32> {
  // expected-error@+1 {{stablehlo.create_token has a token}}
  %t = stablehlo.create_token : !stablehlo.token
  %0:2 = stablehlo.optimization_barrier %x, %t : tensor<8xf32>, !stablehlo.token
  return %0#0 : tensor<8xf32>
}
}

// -----

// P4: what the second RUN asks for is refused before anything is read.
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @rows_of_one_p4(%x: tensor<8xf32>) -> tensor<32xf32> {
  %a = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<32xf32>
  return %a : tensor<32xf32>
}
}
