// RUN: stablehlo-tools opt %s -p import-pseudo-tokens --split-input-file --verify-diagnostics

// P1: a number that goes from collective to collective is no token by that. In another program than
// torch-xla's it may be the user's bias.
// expected-note@+1 {{the module's name does not begin with IrToHlo or SyncTensorsGraph}}
module @jit_step {
  // expected-note@+1 {{argument 0 of @not_torch_xla_p1 is here}}
  func.func @not_torch_xla_p1(%token: tensor<f32>, %x: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) {
    %0 = stablehlo.broadcast_in_dim %token, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %1 = stablehlo.add %x, %0 : tensor<2xf32>
    // expected-error@+1 {{argument 0 of @not_torch_xla_p1 goes from collective to collective like a token of torch-xla, but it is not shown to be zero: the module's name does not begin with IrToHlo or SyncTensorsGraph (P1); if it always is zero, say so: assume-zero-argument=0}}
    %p = "stablehlo.collective_permute"(%1) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    %2 = stablehlo.slice %p [0:1] : (tensor<2xf32>) -> tensor<1xf32>
    %3 = stablehlo.reshape %2 : (tensor<1xf32>) -> tensor<f32>
    %4 = stablehlo.multiply %token, %3 : tensor<f32>
    %5 = stablehlo.broadcast_in_dim %4, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %6 = stablehlo.add %x, %5 : tensor<2xf32>
    %q = "stablehlo.collective_permute"(%6) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    return %p, %q : tensor<2xf32>, tensor<2xf32>
  }
}

// -----

// In torch-xla's own module: the user's code reads the number.
module @IrToHlo.1 {
  // expected-note@+1 {{argument 0 of @number_is_used_p1 is here}}
  func.func @number_is_used_p1(%token: tensor<f32>, %x: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>, tensor<f32>) {
    %0 = stablehlo.broadcast_in_dim %token, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %1 = stablehlo.add %x, %0 : tensor<2xf32>
    // expected-error@+1 {{stablehlo.cosine uses the value as well (P1)}}
    %p = "stablehlo.collective_permute"(%1) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    %2 = stablehlo.slice %p [0:1] : (tensor<2xf32>) -> tensor<1xf32>
    %3 = stablehlo.reshape %2 : (tensor<1xf32>) -> tensor<f32>
    %4 = stablehlo.multiply %token, %3 : tensor<f32>
    %5 = stablehlo.broadcast_in_dim %4, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %6 = stablehlo.add %x, %5 : tensor<2xf32>
    %q = "stablehlo.collective_permute"(%6) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    // expected-note@+1 {{stablehlo.cosine uses the value as well}}
    %u = stablehlo.cosine %token : tensor<f32>
    return %p, %q, %u : tensor<2xf32>, tensor<2xf32>, tensor<f32>
  }
}

// -----

// A token that is returned is used as well.
module @IrToHlo.2 {
  // expected-note@+1 {{argument 0 of @token_is_returned_p1 is here}}
  func.func @token_is_returned_p1(%token: tensor<f32>, %x: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>, tensor<f32>) {
    %0 = stablehlo.broadcast_in_dim %token, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %1 = stablehlo.add %x, %0 : tensor<2xf32>
    // expected-error@+1 {{func.return uses the value as well (P1)}}
    %p = "stablehlo.collective_permute"(%1) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    %2 = stablehlo.slice %p [0:1] : (tensor<2xf32>) -> tensor<1xf32>
    %3 = stablehlo.reshape %2 : (tensor<1xf32>) -> tensor<f32>
    %4 = stablehlo.multiply %token, %3 : tensor<f32>
    %5 = stablehlo.broadcast_in_dim %4, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %6 = stablehlo.add %x, %5 : tensor<2xf32>
    %q = "stablehlo.collective_permute"(%6) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    // expected-note@+1 {{func.return uses the value as well}}
    return %p, %q, %4 : tensor<2xf32>, tensor<2xf32>, tensor<f32>
  }
}

// -----

// The input of a further collective has no such sum.
module @SyncTensorsGraph.3 {
  // expected-note@+1 {{argument 0 of @collective_without_token_p1 is here}}
  func.func @collective_without_token_p1(%token: tensor<f32>, %x: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>, tensor<4xf32>) {
    %0 = stablehlo.broadcast_in_dim %token, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %1 = stablehlo.add %x, %0 : tensor<2xf32>
    // expected-error@+1 {{this stablehlo.all_gather does not take it (P1)}}
    %p = "stablehlo.collective_permute"(%1) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    %2 = stablehlo.slice %p [0:1] : (tensor<2xf32>) -> tensor<1xf32>
    %3 = stablehlo.reshape %2 : (tensor<1xf32>) -> tensor<f32>
    %4 = stablehlo.multiply %token, %3 : tensor<f32>
    %5 = stablehlo.broadcast_in_dim %4, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %6 = stablehlo.add %x, %5 : tensor<2xf32>
    %q = "stablehlo.collective_permute"(%6) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    // expected-note@+1 {{this stablehlo.all_gather does not take it}}
    %g = "stablehlo.all_gather"(%x) {
      all_gather_dim = 0 : i64,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<4xf32>
    return %p, %q, %g : tensor<2xf32>, tensor<2xf32>, tensor<4xf32>
  }
}

// -----

// A sum over all devices that feeds a further collective looks like a token, too.
// expected-note@+1 {{the module's name does not begin with}}
module @jit_step {
  // expected-note@+1 {{argument 1 of @carried_p1 is here}}
  func.func @carried_p1(%x: tensor<2xf32>, %bias: tensor<f32>) -> (tensor<2xf32>, tensor<2xf32>) {
    // expected-error@+1 {{argument 1 of @carried_p1 goes from collective to collective like a token}}
    %0:2 = "stablehlo.all_reduce"(%x, %bias) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %sum = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %sum : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>, tensor<f32>) -> (tensor<2xf32>, tensor<f32>)
    %1 = stablehlo.broadcast_in_dim %0#1, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %2 = stablehlo.add %x, %1 : tensor<2xf32>
    %3 = "stablehlo.collective_permute"(%2) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    return %0#0, %3 : tensor<2xf32>, tensor<2xf32>
  }
}

// -----

// P3: collectives on a chain can be threaded. This one stands in a function that a caller from
// outside and one inside of the module share.
module @jit_step {
  // expected-error@+1 {{@called_from_both_sides_p3 communicates, is public and is also called inside the module}}
  func.func @called_from_both_sides_p3(%x: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %1 = stablehlo.add %x, %0 : tensor<2xf32>
    %p = "stablehlo.collective_permute"(%1) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    %2 = stablehlo.slice %p [0:1] : (tensor<2xf32>) -> tensor<1xf32>
    %3 = stablehlo.reshape %2 : (tensor<1xf32>) -> tensor<f32>
    %4 = stablehlo.multiply %zero, %3 : tensor<f32>
    %5 = stablehlo.broadcast_in_dim %4, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %6 = stablehlo.add %x, %5 : tensor<2xf32>
    %q = "stablehlo.collective_permute"(%6) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    return %p, %q : tensor<2xf32>, tensor<2xf32>
  }
  func.func @caller(%x: tensor<2xf32>) -> tensor<2xf32> {
    // expected-note@+1 {{called here}}
    %0:2 = call @called_from_both_sides_p3(%x) : (tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>)
    return %0#0 : tensor<2xf32>
  }
}

// -----

// A chain of thread-tokens goes through some of the collectives already.
func.func @threaded_in_part_p3(%x: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>, tensor<2xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  // expected-error@+1 {{the module has a token chain beside its pseudo-tokens: run strip-tokens first}}
  %t = stablehlo.after_all {stablehlo_tools.token_link} : !stablehlo.token
  %in:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %x, %t : tensor<2xf32>, !stablehlo.token
  %r = "stablehlo.collective_permute"(%in#0) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %0 = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %1 = stablehlo.add %x, %0 : tensor<2xf32>
  %p = "stablehlo.collective_permute"(%1) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %2 = stablehlo.slice %p [0:1] : (tensor<2xf32>) -> tensor<1xf32>
  %3 = stablehlo.reshape %2 : (tensor<1xf32>) -> tensor<f32>
  %4 = stablehlo.multiply %zero, %3 : tensor<f32>
  %5 = stablehlo.broadcast_in_dim %4, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %6 = stablehlo.add %x, %5 : tensor<2xf32>
  %q = "stablehlo.collective_permute"(%6) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %p, %q, %r : tensor<2xf32>, tensor<2xf32>, tensor<2xf32>
}

// -----

// An all_reduce that states the shapes of all its results cannot lose one.
func.func @shapes_are_listed_p3(%x: tensor<2xf32>, %token: tensor<f32>) -> tensor<2xf32> {
  // expected-error@+1 {{stablehlo.all_reduce carries xla_shape, the shapes of all its results}}
  %0:2 = "stablehlo.all_reduce"(%x, %token) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %sum = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %sum : tensor<f32>
  }) {
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
    xla_shape = "(f32[2]{0}, f32[])"
  } : (tensor<2xf32>, tensor<f32>) -> (tensor<2xf32>, tensor<f32>)
  return %0#0 : tensor<2xf32>
}

// -----

// P5: nobody uses the permute but the token, and that leaves through a call: in the first call it
// would be deleted.
module @IrToHlo.4 {
  // expected-warning@+1 {{argument 0 of @main is taken as torch-xla's token}}
  func.func @main(%token: tensor<f32>, %x: tensor<2xf32>) -> tensor<2xf32> {
    // expected-error@+1 {{func.call: what uses its results is its token alone}}
    %0:2 = call @exchange_p5(%x, %token) : (tensor<2xf32>, tensor<f32>) -> (tensor<2xf32>, tensor<f32>)
    %1:2 = call @exchange_p5(%x, %0#1) : (tensor<2xf32>, tensor<f32>) -> (tensor<2xf32>, tensor<f32>)
    return %1#0 : tensor<2xf32>
  }
  func.func private @exchange_p5(%x: tensor<2xf32>, %t: tensor<f32>) -> (tensor<2xf32>, tensor<f32>) {
    %0 = stablehlo.broadcast_in_dim %t, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %1 = stablehlo.add %x, %0 : tensor<2xf32>
    %2 = "stablehlo.collective_permute"(%1) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    %3 = stablehlo.slice %2 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
    %4 = stablehlo.reshape %3 : (tensor<1xf32>) -> tensor<f32>
    %5 = stablehlo.multiply %t, %4 : tensor<f32>
    return %2, %5 : tensor<2xf32>, tensor<f32>
  }
}

// -----

// Here it leaves through a loop.
module @IrToHlo.5 {
  // expected-warning@+1 {{argument 0 of @out_of_a_loop_p5 is taken as torch-xla's token}}
  func.func @out_of_a_loop_p5(%token: tensor<f32>, %x: tensor<2xf32>, %p: tensor<i1>) -> tensor<2xf32> {
    %0 = stablehlo.while(%t = %token) : tensor<f32>
      cond {
        stablehlo.return %p : tensor<i1>
      } do {
        %1 = stablehlo.broadcast_in_dim %t, dims = [] : (tensor<f32>) -> tensor<2xf32>
        %2 = stablehlo.add %x, %1 : tensor<2xf32>
        // expected-error@+1 {{stablehlo.collective_permute: what uses its results is its token alone}}
        %3 = "stablehlo.collective_permute"(%2) {
          source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
        } : (tensor<2xf32>) -> tensor<2xf32>
        %4 = stablehlo.slice %3 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
        %5 = stablehlo.reshape %4 : (tensor<1xf32>) -> tensor<f32>
        %6 = stablehlo.multiply %t, %5 : tensor<f32>
        stablehlo.return %6 : tensor<f32>
      }
    %7 = stablehlo.broadcast_in_dim %0, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %8 = stablehlo.add %x, %7 : tensor<2xf32>
    %9 = "stablehlo.collective_permute"(%8) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    return %9 : tensor<2xf32>
  }
}
