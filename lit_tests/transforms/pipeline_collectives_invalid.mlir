// RUN: stablehlo-tools opt %s -p pipeline-collectives --split-input-file --verify-diagnostics
// RUN: not stablehlo-tools opt %s -p 'pipeline-collectives{distance=0}' --split-input-file -o %t.none.mlir 2>&1 | filecheck %s --check-prefix=DISTANCE
// RUN: not ls %t.none.mlir
// RUN: not stablehlo-tools opt %s -p 'pipeline-collectives{distance=-1}' --split-input-file -o %t.none.mlir 2>&1 | filecheck %s --check-prefix=DISTANCE
// RUN: not ls %t.none.mlir
// RUN: not stablehlo-tools opt %s -p 'pipeline-collectives{memory-limit=0}' --split-input-file -o %t.none.mlir 2>&1 | filecheck %s --check-prefix=LIMIT
// RUN: not ls %t.none.mlir
// RUN: not stablehlo-tools opt %s -p 'pipeline-collectives{memory-limit=nan}' --split-input-file -o %t.none.mlir 2>&1 | filecheck %s --check-prefix=LIMIT
// RUN: not ls %t.none.mlir
// RUN: not stablehlo-tools opt %s -p 'pipeline-collectives{direction=up}' --split-input-file -o %t.none.mlir 2>&1 | filecheck %s --check-prefix=DIRECTION
// RUN: not ls %t.none.mlir
// RUN: not stablehlo-tools opt %s -p 'pipeline-collectives{hardware=abacus}' --split-input-file -o %t.none.mlir 2>&1 | filecheck %s --check-prefix=HARDWARE
// RUN: not ls %t.none.mlir

// DISTANCE: error: pipeline-collectives: distance is at least 1 (P4)
// LIMIT: error: pipeline-collectives: memory-limit is a positive number of GiB (P4)
// DIRECTION: error: {{.*}}direction{{.*}}up
// HARDWARE: error: {{.*}}abacus

// P1: the collectives are explicit.
// expected-error@+1 {{pipeline-collectives: the program leaves its collectives to the compiler: run partition,create-reduce-scatter first (P1)}}
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["x"=2]>
func.func @main(%x: tensor<4x2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> tensor<2xf32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4x2xf32>, tensor<f32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}
// The function that the error above stands for.
func.func private @unpartitioned_p1()
}

// -----

// P2: every communicating op is of a dialect that is understood.
func.func @mhlo_collective_p2(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-error@+1 {{mhlo.collective_permute communicates in a dialect that cannot be rewritten here}}
  %0 = "mhlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

// P3: no op has a token yet.
module attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
func.func @threaded_p3(%x: tensor<2xf32>) -> tensor<4xf32> {
  // expected-error@+1 {{stablehlo.create_token has a token, and tokens fix an order that pipeline-collectives changes: run pipeline-collectives before thread-tokens, or strip-tokens first (P3)}}
  %t = stablehlo.create_token : !stablehlo.token
  %z:2 = stablehlo.optimization_barrier %x, %t : tensor<2xf32>, !stablehlo.token
  %0 = "stablehlo.all_gather"(%z#0) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
}

// -----

// P4: the RUN lines above give a distance and limits that are none.
func.func @no_distance_p4(%x: tensor<2xf32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
}
