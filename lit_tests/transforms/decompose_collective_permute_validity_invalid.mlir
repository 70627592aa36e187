// RUN: stablehlo-tools opt %s -p 'decompose-collective-permute{form=collective-permute validity}' --verify-diagnostics

// P3: no op has a token yet, nor where the permutes stay permutes: they would move into branches.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @threaded_p3(%x: tensor<2xf32>) -> tensor<2xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  // expected-error@+1 {{stablehlo.after_all has a token, and tokens fix an order that decompose-collective-permute changes: run decompose-collective-permute before thread-tokens, or strip-tokens first (P3)}}
  %t = stablehlo.after_all : !stablehlo.token
  %w:3 = stablehlo.while(%i = %zero, %p = %x, %u = %t) : tensor<i32>, tensor<2xf32>, !stablehlo.token
  cond {
    %c = stablehlo.compare LT, %i, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %j = stablehlo.add %i, %one : tensor<i32>
    %q = "stablehlo.collective_permute"(%p) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
    stablehlo.return %j, %q, %u : tensor<i32>, tensor<2xf32>, !stablehlo.token
  }
  return %x : tensor<2xf32>
}
}
