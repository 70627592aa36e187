// RUN: stablehlo-tools opt %s -p hold-collectives --split-input-file --verify-diagnostics

// P1: the collectives are explicit.
// expected-error@+1 {{hold-collectives: the program leaves its collectives to the compiler: run partition,create-reduce-scatter first (P1)}}
module @left_p1 attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["data"=2]>
func.func public @main(%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}]>}) -> (tensor<4xf32>) {
  %y = stablehlo.cosine %x : tensor<4xf32>
  return %y : tensor<4xf32>
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
module @threaded_p3 attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
func.func @main(%x: tensor<4xf32>, %n: tensor<i32>) -> (tensor<4xf32>) {
  // expected-error@+1 {{create_token}}
  %t = stablehlo.create_token : !stablehlo.token
  %i, %out = stablehlo.while(%k = %n, %y = %x) : tensor<i32>, tensor<4xf32>
  cond {
    %more = stablehlo.compare LT, %k, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %b = "stablehlo.all_reduce"(%y) ({
    ^bb0(%l: tensor<f32>, %r: tensor<f32>):
      %s = stablehlo.add %l, %r : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
    stablehlo.return %k, %b : tensor<i32>, tensor<4xf32>
  }
  return %out : tensor<4xf32>
}
// The function that the error above stands for.
func.func private @threaded_p3()
}
