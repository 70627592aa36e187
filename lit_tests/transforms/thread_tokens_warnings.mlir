// RUN: stablehlo-tools opt %s -p thread-tokens --split-input-file --verify-diagnostics

// Nobody uses the result: compilers drop the collective, whatever its token.
func.func @unused_result(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-warning@+1 {{stablehlo.collective_permute: its results are unused, so compilers delete it}}
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %x : tensor<2xf32>
}

// -----

// Used by what nobody uses.
func.func @used_by_the_unused(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-warning@+1 {{stablehlo.collective_permute: its results are unused}}
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  // expected-warning@+1 {{stablehlo.collective_permute: its results are unused}}
  %1 = "stablehlo.collective_permute"(%0) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %x : tensor<2xf32>
}

// -----

// One used result of several keeps a variadic collective.
func.func @one_result_is_used(%x: tensor<2xf32>, %y: tensor<2xf32>) -> tensor<4xf32> {
  %0:2 = "stablehlo.all_gather"(%x, %y) {
    all_gather_dim = 0 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>, tensor<2xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  return %0#1 : tensor<4xf32>
}

// -----

// A carry that goes round and round and comes out to nobody. The other one is used.
func.func @through_a_carry(%p: tensor<i1>, %x: tensor<f32>) -> tensor<f32> {
  %0:2 = stablehlo.while(%v = %x, %w = %x) : tensor<f32>, tensor<f32>
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      // expected-warning@+1 {{stablehlo.collective_permute: its results are unused}}
      %1 = "stablehlo.collective_permute"(%v) {
        source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
      } : (tensor<f32>) -> tensor<f32>
      %2 = "stablehlo.collective_permute"(%w) {
        source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
      } : (tensor<f32>) -> tensor<f32>
      stablehlo.return %1, %2 : tensor<f32>, tensor<f32>
    }
  return %0#1 : tensor<f32>
}

// -----

// A carry that another carry is computed from is used, though no one uses its result.
func.func @carry_that_feeds_another(%p: tensor<i1>, %x: tensor<f32>) -> tensor<f32> {
  %0:2 = stablehlo.while(%v = %x, %w = %x) : tensor<f32>, tensor<f32>
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %1 = "stablehlo.collective_permute"(%v) {
        source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
      } : (tensor<f32>) -> tensor<f32>
      %2 = stablehlo.add %v, %w : tensor<f32>
      stablehlo.return %1, %2 : tensor<f32>, tensor<f32>
    }
  return %0#1 : tensor<f32>
}

// -----

// A condition uses what the loop's results do not.
func.func @used_by_a_condition(%x: tensor<i1>, %y: tensor<f32>) -> tensor<f32> {
  %0:2 = stablehlo.while(%v = %x, %w = %y) : tensor<i1>, tensor<f32>
    cond {
      stablehlo.return %v : tensor<i1>
    } do {
      %1 = "stablehlo.collective_permute"(%v) {
        source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
      } : (tensor<i1>) -> tensor<i1>
      %2 = stablehlo.negate %w : tensor<f32>
      stablehlo.return %1, %2 : tensor<i1>, tensor<f32>
    }
  return %0#1 : tensor<f32>
}

// -----

// The unused result of a branch.
func.func @through_a_branch(%p: tensor<i1>, %x: tensor<f32>) -> tensor<f32> {
  %0:2 = "stablehlo.if"(%p) ({
    // expected-warning@+1 {{stablehlo.collective_permute: its results are unused}}
    %1 = "stablehlo.collective_permute"(%x) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<f32>) -> tensor<f32>
    stablehlo.return %1, %x : tensor<f32>, tensor<f32>
  }, {
    stablehlo.return %x, %x : tensor<f32>, tensor<f32>
  }) : (tensor<i1>) -> (tensor<f32>, tensor<f32>)
  return %0#1 : tensor<f32>
}

// -----

// The unused result of a call; another call of the same function would make it live.
func.func @through_a_call(%x: tensor<f32>) -> tensor<f32> {
  %0:2 = call @callee(%x) : (tensor<f32>) -> (tensor<f32>, tensor<f32>)
  return %0#1 : tensor<f32>
}

func.func private @callee(%x: tensor<f32>) -> (tensor<f32>, tensor<f32>) {
  // expected-warning@+1 {{stablehlo.collective_permute: its results are unused}}
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0, %x : tensor<f32>, tensor<f32>
}

// -----

func.func @one_call_of_two_uses_it(%x: tensor<f32>) -> (tensor<f32>, tensor<f32>) {
  %0:2 = call @called_twice(%x) : (tensor<f32>) -> (tensor<f32>, tensor<f32>)
  %1:2 = call @called_twice(%x) : (tensor<f32>) -> (tensor<f32>, tensor<f32>)
  return %0#1, %1#0 : tensor<f32>, tensor<f32>
}

func.func private @called_twice(%x: tensor<f32>) -> (tensor<f32>, tensor<f32>) {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0, %x : tensor<f32>, tensor<f32>
}

// -----

// A private function that nobody calls.
func.func private @never_called(%x: tensor<f32>) -> tensor<f32> {
  // expected-warning@+1 {{stablehlo.collective_permute: its results are unused}}
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}

// -----

// The unused result of a manual computation.
sdy.mesh @mesh = <["x"=2]>
func.func @through_a_manual_computation(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0:2 = sdy.manual_computation(%x)
      in_shardings=[<@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}]>, <@mesh, [{"x"}]>]
      manual_axes={"x"} (%a: tensor<2xf32>) {
    // expected-warning@+1 {{stablehlo.collective_permute: its results are unused}}
    %1 = "stablehlo.collective_permute"(%a) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    sdy.return %1, %a : tensor<2xf32>, tensor<2xf32>
  } : (tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  return %0#1 : tensor<4xf32>
}

// -----

// The unused element of a barrier; the other element is used.
func.func @through_a_barrier(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-warning@+1 {{stablehlo.collective_permute: its results are unused}}
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %1:2 = stablehlo.optimization_barrier %0, %x : tensor<2xf32>, tensor<2xf32>
  return %1#1 : tensor<2xf32>
}

// -----

// An op with a side effect runs, used or not, and keeps what it is given.
func.func @effects_are_kept(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %1 = stablehlo.custom_call @report(%0) {has_side_effect = true} : (tensor<2xf32>) -> tensor<2xf32>
  return %x : tensor<2xf32>
}

// -----

// A sharded program before partitioning: there is no collective to order yet.
// expected-warning@+1 {{the module is sharded but has no collective to order}}
sdy.mesh @mesh = <["x"=2]>
func.func @not_partitioned(%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}

// -----

// Neither sharded nor communicating: nothing to say.
func.func @one_device(%x: tensor<4xf32>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}

// -----

// Two pairs are in flight together, as in a schedule of XLA's: the first one ends earlier.
func.func @between_start_and_done(%x: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) {
  %0 = "stablehlo.async_start"(%x) ({
  ^bb0(%a: tensor<2xf32>):
    %1 = "stablehlo.collective_permute"(%a) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    stablehlo.return %1 : tensor<2xf32>
  }) : (tensor<2xf32>) -> !stablehlo.future<tensor<2xf32>>
  %2 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  // expected-warning@+1 {{stablehlo.async_done now comes before the stablehlo.collective_permute that followed its start}}
  %3 = "stablehlo.async_done"(%0) : (!stablehlo.future<tensor<2xf32>>) -> tensor<2xf32>
  return %2, %3 : tensor<2xf32>, tensor<2xf32>
}

// -----

// A loop that communicates is communication, too.
func.func @loop_between_start_and_done(%p: tensor<i1>, %x: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) {
  %0 = "stablehlo.async_start"(%x) ({
  ^bb0(%a: tensor<2xf32>):
    %1 = "stablehlo.collective_permute"(%a) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    stablehlo.return %1 : tensor<2xf32>
  }) : (tensor<2xf32>) -> !stablehlo.future<tensor<2xf32>>
  %2 = stablehlo.while(%v = %x) : tensor<2xf32>
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %4 = "stablehlo.collective_permute"(%v) {
        source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
      } : (tensor<2xf32>) -> tensor<2xf32>
      stablehlo.return %4 : tensor<2xf32>
    }
  // expected-warning@+1 {{stablehlo.async_done now comes before the stablehlo.while that followed its start}}
  %3 = "stablehlo.async_done"(%0) : (!stablehlo.future<tensor<2xf32>>) -> tensor<2xf32>
  return %2, %3 : tensor<2xf32>, tensor<2xf32>
}
