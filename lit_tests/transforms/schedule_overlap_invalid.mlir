// RUN: stablehlo-tools opt %s -p schedule-overlap --split-input-file --verify-diagnostics
// RUN: not stablehlo-tools opt %s -p 'schedule-overlap{memory-limit=0}' --split-input-file 2>&1 | filecheck %s --check-prefix=ZERO
// RUN: not stablehlo-tools opt %s -p 'schedule-overlap{memory-limit=nan}' --split-input-file 2>&1 | filecheck %s --check-prefix=ZERO
// RUN: not stablehlo-tools opt %s -p 'schedule-overlap{streams=-1}' --split-input-file -o %t.none.mlir 2>&1 | filecheck %s --check-prefix=STREAMS
// RUN: not ls %t.none.mlir
// RUN: not stablehlo-tools opt %s -p 'schedule-overlap{compute-overlap-multiplier=0}' --split-input-file 2>&1 | filecheck %s --check-prefix=SCALE
// RUN: not stablehlo-tools opt %s -p 'schedule-overlap{compute-overlap-multiplier=inf}' --split-input-file 2>&1 | filecheck %s --check-prefix=SCALE
// RUN: not stablehlo-tools opt %s -p 'schedule-overlap{hardware=abacus}' --split-input-file 2>&1 | filecheck %s --check-prefix=HARDWARE

// ZERO: error: schedule-overlap: memory-limit is a positive number of GiB (P4)
// STREAMS: error: schedule-overlap: streams is 0 (no limit) or more (P4)
// SCALE: error: schedule-overlap: compute-overlap-multiplier is a positive number (P4)
// HARDWARE: error: {{.*}}abacus

// P1: the collectives are explicit.
// expected-error@+1 {{schedule-overlap: the program leaves its collectives to the compiler: run partition,create-reduce-scatter first (P1)}}
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
  // expected-error@+1 {{stablehlo.create_token has a token, and tokens fix an order that schedule-overlap changes: run schedule-overlap before thread-tokens, or strip-tokens first (P3)}}
  %t = stablehlo.create_token : !stablehlo.token
  %z:2 = stablehlo.optimization_barrier %x, %t : tensor<2xf32>, !stablehlo.token
  %0 = "stablehlo.all_gather"(%z#0) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
}

// -----

// P4: the RUN lines above give limits that are none; schedule_overlap_memory_invalid.mlir, one that
// is too low.
func.func @no_limit_p4(%x: tensor<2xf32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
}
