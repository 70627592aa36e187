// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=2}' --split-input-file --verify-diagnostics
// RUN: not stablehlo-tools opt %s -p 'expand-pipeline{repeats=2}' --split-input-file 2>&1 | filecheck %s --check-prefix=REPEATS
// RUN: not stablehlo-tools opt %s -p 'expand-pipeline{repeats=0 schedule=circular}' --split-input-file 2>&1 | filecheck %s --check-prefix=NONE
// RUN: not stablehlo-tools opt %s -p 'expand-pipeline{microbatches=-1}' --split-input-file 2>&1 | filecheck %s --check-prefix=NEGATIVE
// RUN: not stablehlo-tools opt %s -p 'expand-pipeline{dimension=1}' --split-input-file 2>&1 | filecheck %s --check-prefix=UNNAMED
// RUN: not stablehlo-tools opt %S/expand_pipeline_1f1b.mlir -p 'expand-pipeline{arguments=2}' 2>&1 | filecheck %s --check-prefix=THIRD
// RUN: not stablehlo-tools opt %S/expand_pipeline_1f1b.mlir -p 'expand-pipeline{arguments=1 microbatches=3}' 2>&1 | filecheck %s --check-prefix=DIVIDES
// RUN: not stablehlo-tools opt %S/expand_pipeline_1f1b.mlir -p 'expand-pipeline{arguments=0 microbatches=2}' 2>&1 | filecheck %s --check-prefix=WEIGHTS

// P5: the options are in range, and gpipe has one chunk on each rank.
// REPEATS: error: expand-pipeline: repeats=2 with schedule=gpipe, which has one chunk on each rank: use schedule=circular (P5)
// NONE: error: expand-pipeline: repeats=0: each rank holds at least one chunk of layers (P5)
// NEGATIVE: error: expand-pipeline: microbatches=-1: there must be at least one (P5)
// UNNAMED: error: expand-pipeline: dimension=1 needs `arguments`, the numbers of the arguments that carry the batch (P5)
// P3: the arguments have the dimension, the microbatches divide it, and it is the batch.
// THIRD: error: expand-pipeline: there is no argument 2: the program takes 2 (P3)
// DIVIDES: error: expand-pipeline: 3 microbatches do not divide dimension 0 of argument 1, tensor<4x3xf32> (P3)
// WEIGHTS: error: expand-pipeline: {{.+}} (P{{[34]}})

// P1: some mesh has the axis, with ranks to lay layers on.
// expected-error@+1 {{no mesh of the program has an axis 'stage' of at least two ranks (P1): there are data of 2}}
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=2]>
  func.func @axis_p1(%w: tensor<4x3x3xf32>, %x: tensor<4x3xf32>) -> tensor<4x3xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
    %loop:3 = stablehlo.while(%i = %zero, %ws = %w, %h = %x) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %1 = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %3 = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %out = stablehlo.tanh %3 : tensor<4x3xf32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %ws, %out : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    }
    return %loop#2 : tensor<4x3xf32>
  }
}

// -----

// One rank is no pipeline.
// expected-error@+1 {{there are stage of 1, data of 2}}
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=1, "data"=2]>
  func.func @one_rank_p1(%w: tensor<4x3x3xf32>, %x: tensor<4x3xf32>) -> tensor<4x3xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
    %loop:3 = stablehlo.while(%i = %zero, %ws = %w, %h = %x) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %1 = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %3 = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %out = stablehlo.tanh %3 : tensor<4x3xf32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %ws, %out : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    }
    return %loop#2 : tensor<4x3xf32>
  }
}

// -----

// No mesh at all.
// expected-error@+1 {{the program has no mesh; export with one}}
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  func.func @no_mesh_p1(%w: tensor<4x3x3xf32>, %x: tensor<4x3xf32>) -> tensor<4x3xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
    %loop:3 = stablehlo.while(%i = %zero, %ws = %w, %h = %x) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %1 = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %3 = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %out = stablehlo.tanh %3 : tensor<4x3xf32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %ws, %out : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    }
    return %loop#2 : tensor<4x3xf32>
  }
}

// -----

// P2: there is a loop over layers.
// No loop: the layers are written one after the other.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  // expected-error@+1 {{the program has no loop over layers: no `while` with a known number of iterations reads stacked weights row by row (P2)}}
  func.func @unrolled_p2(%w: tensor<3x3xf32>, %x: tensor<4x3xf32>) -> tensor<4x3xf32> {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
    %1 = stablehlo.dot_general %0, %w, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
    return %1 : tensor<4x3xf32>
  }
}

// -----

// There is an iteration for each chunk.
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=4]>
  func.func @three_layers_p2(%w: tensor<3x3x3xf32>, %x: tensor<4x3xf32>) -> tensor<4x3xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<3> : tensor<i32>
    // expected-error@+1 {{3 iterations are too few for 1 chunks on each of 4 ranks (P2); reduce repeats, or use fewer ranks}}
    %loop:3 = stablehlo.while(%i = %zero, %ws = %w, %h = %x) : tensor<i32>, tensor<3x3x3xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %1 = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<3x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %3 = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %out = stablehlo.tanh %3 : tensor<4x3xf32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %ws, %out : tensor<i32>, tensor<3x3x3xf32>, tensor<4x3xf32>
    }
    return %loop#2 : tensor<4x3xf32>
  }
}

// -----

// An iteration has no side effects.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @effect_p2(%w: tensor<4x3x3xf32>, %x: tensor<4x3xf32>) -> tensor<4x3xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
    %loop:3 = stablehlo.while(%i = %zero, %ws = %w, %h = %x) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %1 = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %out = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      // expected-error@+1 {{stablehlo.custom_call has a side effect, which a pipeline would repeat (P2)}}
      %count = stablehlo.custom_call @log(%i) {has_side_effect = true} : (tensor<i32>) -> tensor<i32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %ws, %out : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    }
    return %loop#2 : tensor<4x3xf32>
  }
}

// -----

// A shard_map's loop that sends along the stages is a pipeline; whoever wrote it has decided who does
// what.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @manual_p2(%w: tensor<4x3x3xf32>, %x: tensor<4x3xf32>) -> tensor<4x3xf32> {
    %0 = sdy.manual_computation(%w, %x) in_shardings=[<@mesh, [{}, {}, {}]>, <@mesh, [{"stage"}, {}]>] out_shardings=[<@mesh, [{"stage"}, {}]>] manual_axes={"stage"} (%weights: tensor<4x3x3xf32>, %samples: tensor<2x3xf32>) {
      %zero = stablehlo.constant dense<0> : tensor<i32>
      %one = stablehlo.constant dense<1> : tensor<i32>
      %layers = stablehlo.constant dense<4> : tensor<i32>
      // expected-error@+1 {{this loop over layers is in a manual computation, the program of one device (P2)}}
      %loop:3 = stablehlo.while(%i = %zero, %ws = %weights, %h = %samples) : tensor<i32>, tensor<4x3x3xf32>, tensor<2x3xf32>
      cond {
        %1 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %1 : tensor<i1>
      } do {
        %1 = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
        %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
        %3 = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<2x3xf32>, tensor<3x3xf32>) -> tensor<2x3xf32>
        %sent = "stablehlo.collective_permute"(%3) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>}> : (tensor<2x3xf32>) -> tensor<2x3xf32>
        %4 = stablehlo.add %i, %one : tensor<i32>
        stablehlo.return %4, %ws, %sent : tensor<i32>, tensor<4x3x3xf32>, tensor<2x3xf32>
      }
      sdy.return %loop#2 : tensor<2x3xf32>
    } : (tensor<4x3x3xf32>, tensor<4x3xf32>) -> tensor<4x3xf32>
    return %0 : tensor<4x3xf32>
  }
}

// -----

// The program has no tokens.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @token_p2(%x: tensor<4x3xf32>) -> tensor<4x3xf32> {
    // expected-error@+1 {{(P2)}}
    %t = stablehlo.after_all : !stablehlo.token
    %0, %u = stablehlo.optimization_barrier %x, %t : tensor<4x3xf32>, !stablehlo.token
    return %0 : tensor<4x3xf32>
  }
}

// -----

// P3: some argument has a dimension that the microbatches divide.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @odd_batch_p3(%w: tensor<5x3x3xf32>, %x: tensor<3x3xf32>) -> tensor<3x3xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<5> : tensor<i32>
    // expected-error@+1 {{expand-pipeline: 2 microbatches do not divide the batch: argument 1 has 3 rows; take 3 microbatches, or a batch of a multiple of 2 (P3)}}
    %loop:3 = stablehlo.while(%i = %zero, %ws = %w, %h = %x) : tensor<i32>, tensor<5x3x3xf32>, tensor<3x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %1 = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<5x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %3 = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<3x3xf32>, tensor<3x3xf32>) -> tensor<3x3xf32>
      %out = stablehlo.tanh %3 : tensor<3x3xf32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %ws, %out : tensor<i32>, tensor<5x3x3xf32>, tensor<3x3xf32>
    }
    return %loop#2 : tensor<3x3xf32>
  }
}

// -----

// P4: a layer takes each sample by itself.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @statistics_p4(%w: tensor<4x3x3xf32>, %x: tensor<4x3xf32>) -> tensor<4x3xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
    %nothing = stablehlo.constant dense<0.0> : tensor<f32>
    %loop:3 = stablehlo.while(%i = %zero, %ws = %w, %h = %x) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %1 = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      // expected-error@+1 {{expand-pipeline: stablehlo.reduce mixes samples of the batch}}
      %mean = stablehlo.reduce(%h init: %nothing) applies stablehlo.add across dimensions = [0] : (tensor<4x3xf32>, tensor<f32>) -> tensor<3xf32>
      %same = stablehlo.broadcast_in_dim %mean, dims = [1] : (tensor<3xf32>) -> tensor<4x3xf32>
      // expected-note@+1 {{the result for the whole batch is needed here}}
      %3 = stablehlo.divide %h, %same : tensor<4x3xf32>
      %out = stablehlo.dot_general %3, %2, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %ws, %out : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    }
    return %loop#2 : tensor<4x3xf32>
  }
}

// -----

// P5: see above.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @options_p5(%w: tensor<4x3x3xf32>, %x: tensor<4x3xf32>) -> tensor<4x3xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
    %loop:3 = stablehlo.while(%i = %zero, %ws = %w, %h = %x) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %1 = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %3 = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %out = stablehlo.tanh %3 : tensor<4x3xf32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %ws, %out : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    }
    return %loop#2 : tensor<4x3xf32>
  }
}

// -----

// P6: what goes from rank to rank is of integers, booleans or real floats.
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @complex_p6(%w: tensor<4x3x3xf32>, %x: tensor<4x3xcomplex<f32>>) -> tensor<4x3xcomplex<f32>> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
    // expected-error@+1 {{the loop carries a tensor of complex<f32> from layer to layer, but only real numbers can be collected from the last rank (P6)}}
    %loop:3 = stablehlo.while(%i = %zero, %ws = %w, %h = %x) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xcomplex<f32>>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %1 = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %3 = stablehlo.complex %2, %2 : tensor<3x3xcomplex<f32>>
      %4 = stablehlo.dot_general %h, %3, contracting_dims = [1] x [0] : (tensor<4x3xcomplex<f32>>, tensor<3x3xcomplex<f32>>) -> tensor<4x3xcomplex<f32>>
      %5 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %5, %ws, %4 : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xcomplex<f32>>
    }
    return %loop#2 : tensor<4x3xcomplex<f32>>
  }
}
