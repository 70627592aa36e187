// RUN: stablehlo-tools opt %s -p collective-matmul --split-input-file --verify-diagnostics
// RUN: not stablehlo-tools opt %s -p 'collective-matmul{hardware=abacus}' --split-input-file -o %t.none.mlir 2>&1 | filecheck %s --check-prefix=HARDWARE
// RUN: not ls %t.none.mlir
// RUN: not stablehlo-tools opt %s -p 'collective-matmul{directions=up}' --split-input-file -o %t.none.mlir 2>&1 | filecheck %s --check-prefix=DIRECTION
// RUN: not ls %t.none.mlir
// HARDWARE: error: {{.*}}abacus
// DIRECTION: error: {{.*}}directions{{.*}}up

// P1: groups name processes that there are.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @groups_p1(%x: tensor<2x3xf32>, %w: tensor<3x5xf32>) -> tensor<4x5xf32> {
  // expected-error@+1 {{stablehlo.all_gather}}
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<4x3xf32>
  %y = stablehlo.dot_general %g, %w, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x5xf32>) -> tensor<4x5xf32>
  return %y : tensor<4x5xf32>
}
}

// -----

// P2: tokens come after this pass.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @tokens_p2(%x: tensor<2x3xf32>) -> tensor<2x3xf32> {
  // expected-error@+1 {{(P2)}}
  %t = stablehlo.create_token : !stablehlo.token
  %y:2 = stablehlo.optimization_barrier %x, %t : tensor<2x3xf32>, !stablehlo.token
  return %y#0 : tensor<2x3xf32>
}
}
