// RUN: stablehlo-tools opt %s -p reassociate-collectives --split-input-file --verify-diagnostics

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
func.func @unknown_process_p2(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<8xf32>) {
  // expected-error@+1 {{id 2 is not one of the 2 flattened_ids processes of the module}}
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  %c = stablehlo.add %a, %b : tensor<8xf32>
  return %c : tensor<8xf32>
}
}

// -----

// P3: no op has a token yet.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @threaded_p3(%x: tensor<8xf32>) -> (tensor<8xf32>) {
  // expected-error@+1 {{stablehlo.after_all has a token, and tokens fix an order that reassociate-collectives changes}}
  %t = stablehlo.after_all : !stablehlo.token
  %x1, %t1 = stablehlo.optimization_barrier %x, %t : tensor<8xf32>, !stablehlo.token
  %c = "stablehlo.all_reduce"(%x1) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8xf32>) -> tensor<8xf32>
  return %c : tensor<8xf32>
}
}
