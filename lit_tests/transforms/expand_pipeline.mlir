// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=2}' --split-input-file | filecheck %s

// Each rank runs its two layers in each of three ticks, on what it received or, the first one, on
// its microbatch of the input: what it does is in a table, a row for each tick. What leaves the last
// rank is put together, and the other ranks add nothing to it.
// CHECK-LABEL: func.func @forward
// CHECK-DAG: %[[TABLE:.+]] = stablehlo.constant {{.+}} : tensor<2x3x{{[0-9]+}}xi32>
// CHECK-DAG: %[[CHUNKS:.+]] = stablehlo.reshape {{.+}} -> tensor<1x2x2x1x3x3xf32>
// CHECK: sdy.manual_computation(%[[TABLE]], %[[CHUNKS]], %arg1) in_shardings=[<@mesh, [{"stage", ?}, {?}, {?}]>, <@mesh, [{?}, {"stage", ?}, {?}, {?}, {?}, {?}]>, <@mesh, [{?}, {?}]>]
// CHECK-SAME: manual_axes={"stage"} (%[[ROWS:.+]]: tensor<1x3x{{[0-9]+}}xi32>, %[[LAYERS:.+]]: tensor<1x1x2x1x3x3xf32>, %[[X:.+]]: tensor<4x3xf32>)
// CHECK: %[[OWN:.+]] = stablehlo.reshape %[[LAYERS]] {{.+}} -> tensor<1x2x1x3x3xf32>
// CHECK-DAG: %[[NOTHING:.+]] = stablehlo.constant dense<-0.000000e+00> : tensor<2x2x1x3xf32>
// CHECK-DAG: %[[ENDS:.+]] = stablehlo.constant dense<3> : tensor<i32>
// CHECK: %[[TICKS:[^ :]+]]:3 = stablehlo.while(%[[TICK:[^ :]+]] = {{.+}}, %[[RECEIVED:[^ :]+]] = {{.+}}, %[[WHOLE:[^ :]+]] = %[[NOTHING]])
// CHECK: stablehlo.compare LT, %[[TICK]], %[[ENDS]]
// CHECK: stablehlo.dynamic_slice %[[ROWS]], %{{.+}}, %[[TICK]], %{{.+}}, sizes = [1, 1, {{[0-9]+}}]
// CHECK: %[[CUT:.+]] = stablehlo.reshape %[[X]] : (tensor<4x3xf32>) -> tensor<2x2x1x3xf32>
// CHECK: %[[PICKED:.+]] = stablehlo.dynamic_slice %[[CUT]], %{{.+}}, %[[MICROBATCH:.+]], %{{.+}}, sizes = [2, 1, 1, 3]
// CHECK: %[[START:.+]] = stablehlo.reshape %[[PICKED]]
// CHECK: %[[IN:.+]] = stablehlo.select %{{.+}}, %[[RECEIVED]], %[[START]]
// CHECK: %[[OUT:[^ :]+]]:2 = stablehlo.while(%[[LAYER:[^ :]+]] = {{.+}}, %[[HIDDEN:[^ :]+]] = %[[IN]])
// CHECK: stablehlo.dynamic_slice %[[OWN]], %{{.+}}, %[[LAYER]]
// CHECK: stablehlo.dot_general %[[HIDDEN]]
// CHECK: stablehlo.tanh
// CHECK: stablehlo.dynamic_update_slice %[[WHOLE]], %{{.+}}, %{{.+}}, %[[MICROBATCH]]
// CHECK: "stablehlo.collective_permute"(%[[OUT]]#1) {{.+}}source_target_pairs = dense<{{\[\[}}0, 1], [1, 0]]>
// CHECK: "stablehlo.all_reduce"(%[[TICKS]]#2)
// CHECK: sdy.return %{{.+}} : tensor<2x2x1x3xf32>
// CHECK: stablehlo.reshape {{.+}} -> tensor<4x3xf32>
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @forward(%w: tensor<4x3x3xf32>, %x: tensor<4x3xf32>) -> tensor<4x3xf32> {
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

// A loop that goes through the layers in reverse begins on the last rank, and sends to the one
// before; within a chunk it counts down.
// CHECK-LABEL: func.func @reverse
// CHECK: stablehlo.while(%[[LAYER:[^ :]+]] = %{{[^ ]+}}, %{{[^ ]+}} = %{{[^ ]+}}) : tensor<i32>, tensor<2x3xf32>
// CHECK: %[[LEFT:.+]] = stablehlo.subtract %[[LAST:.+]], %[[LAYER]]
// CHECK: stablehlo.dynamic_slice %{{.+}}, %{{.+}}, %[[LEFT]]
// CHECK: source_target_pairs = dense<{{\[\[}}0, 3], [1, 0], [2, 1], [3, 2]]>
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=4]>
  func.func @reverse(%w: tensor<8x3x3xf32>, %x: tensor<4x3xf32>) -> tensor<4x3xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<8> : tensor<i32>
    %last = stablehlo.constant dense<7> : tensor<i32>
    %loop:3 = stablehlo.while(%i = %zero, %ws = %w, %h = %x) : tensor<i32>, tensor<8x3x3xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %row = stablehlo.subtract %last, %i : tensor<i32>
      %1 = stablehlo.dynamic_slice %ws, %row, %zero, %zero, sizes = [1, 3, 3] : (tensor<8x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %3 = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %out = stablehlo.tanh %3 : tensor<4x3xf32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %ws, %out : tensor<i32>, tensor<8x3x3xf32>, tensor<4x3xf32>
    }
    return %loop#2 : tensor<4x3xf32>
  }
}

// -----

// Five layers on two ranks: the second rank has two of them, and a row of zeros to fill its part;
// how many layers run comes from the table.
// CHECK-LABEL: func.func @uneven
// CHECK: stablehlo.concatenate {{.+}} -> tensor<6x1x3x3xf32>
// CHECK: tensor<1x1x3x1x3x3xf32>
// CHECK: stablehlo.while(%[[LAYER:[^ :]+]] = %{{[^ ]+}}, %{{[^ ]+}} = %{{[^ ]+}}) : tensor<i32>, tensor<2x3xf32>
// CHECK: stablehlo.compare LT, %[[LAYER]], %{{[0-9]+}} :
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @uneven(%w: tensor<5x3x3xf32>, %x: tensor<4x3xf32>) -> tensor<4x3xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<5> : tensor<i32>
    %loop:3 = stablehlo.while(%i = %zero, %ws = %w, %h = %x) : tensor<i32>, tensor<5x3x3xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %1 = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<5x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %3 = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %out = stablehlo.tanh %3 : tensor<4x3xf32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %ws, %out : tensor<i32>, tensor<5x3x3xf32>, tensor<4x3xf32>
    }
    return %loop#2 : tensor<4x3xf32>
  }
}

// -----

// The other axes of the mesh are not the pipeline's: they stay for a partitioner, and a batch that
// is divided is cut where it lies, one sample of each device in each microbatch.
// CHECK-LABEL: func.func @data_parallel
// CHECK-SAME: %arg1: tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}
// CHECK: sdy.manual_computation
// CHECK-SAME: manual_axes={"stage"}
// CHECK: stablehlo.reshape {{.+}} : (tensor<8x3xf32>) -> tensor<4x2x1x3xf32>
// CHECK: sizes = [4, 1, 1, 3]
// CHECK: source_target_pairs = dense<{{\[\[}}0, 2], [1, 3], [2, 0], [3, 1]]>
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2, "data"=2]>
  func.func @data_parallel(%w: tensor<4x3x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"stage"}, {}, {}]>}, %x: tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) -> tensor<8x3xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
    %loop:3 = stablehlo.while(%i = %zero, %ws = %w, %h = %x) : tensor<i32>, tensor<4x3x3xf32>, tensor<8x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %1 = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %3 = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<8x3xf32>, tensor<3x3xf32>) -> tensor<8x3xf32>
      %out = stablehlo.tanh %3 : tensor<8x3xf32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %ws, %out : tensor<i32>, tensor<4x3x3xf32>, tensor<8x3xf32>
    }
    return %loop#2 : tensor<8x3xf32>
  }
}

// -----

// A layer that asks for its number gets it: the first of the chunk, and where it is in it.
// CHECK-LABEL: func.func @counter
// CHECK: stablehlo.while(%[[LAYER:[^ :]+]] = %{{[^ ]+}}, %{{[^ ]+}} = %{{[^ ]+}}) : tensor<i32>, tensor<2x3xf32>
// CHECK: %[[NUMBER:.+]] = stablehlo.add %[[FIRST:.+]], %[[LAYER]]
// CHECK: stablehlo.convert %{{.+}} : (tensor<i32>) -> tensor<f32>
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @counter(%w: tensor<4x3x3xf32>, %x: tensor<4x3xf32>) -> tensor<4x3xf32> {
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
      %kind = stablehlo.convert %i : (tensor<i32>) -> tensor<f32>
      %scale = stablehlo.broadcast_in_dim %kind, dims = [] : (tensor<f32>) -> tensor<4x3xf32>
      %3 = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %out = stablehlo.multiply %3, %scale : tensor<4x3xf32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %ws, %out : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    }
    return %loop#2 : tensor<4x3xf32>
  }
}

// -----

// A training step is two pipelines. The forward leaves what the backward reads on the rank that made
// it; gradients of weights are added up over the microbatches, in 32 bits, and stay on their rank.
// CHECK-LABEL: func.func @step
// CHECK: %[[FORWARD:[^ :]+]]:2 = sdy.manual_computation
// CHECK-SAME: out_shardings=[<@mesh, [{?}, {?}, {?}, {?}]>, <@mesh, [{?}, {"stage", ?}, {?}, {?}, {?}, {?}, {?}, {?}]>]
// CHECK: source_target_pairs = dense<{{\[\[}}0, 1], [1, 0]]>
// CHECK: stablehlo.all_reduce
// CHECK: sdy.return
// CHECK: stablehlo.reduce
// CHECK: sdy.manual_computation({{.+}}, %[[FORWARD]]#1, {{.+}}) in_shardings
// CHECK-SAME: out_shardings=[<@mesh, [{?}, {"stage", ?}, {?}, {?}, {?}, {?}]>]
// CHECK: stablehlo.while({{.+}}) : tensor<i32>, tensor<2x3xbf16>, tensor<1x2x1x3x3xf32>
// CHECK: %[[TERM:.+]] = stablehlo.dot_general {{.+}} -> tensor<3x3xbf16>
// CHECK: stablehlo.convert {{.+}} -> tensor<1x3x3xf32>
// CHECK: stablehlo.add %{{.+}}, %{{.+}} : tensor<1x1x1x3x3xf32>
// CHECK-NOT: stablehlo.all_reduce
// CHECK: stablehlo.convert {{.+}} -> tensor<1x2x2x1x3x3xbf16>
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @step(%w: tensor<4x3x3xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"stage"}, {}, {}]>}, %x: tensor<4x3xbf16>) -> (tensor<bf16>, tensor<4x3x3xbf16>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %last = stablehlo.constant dense<3> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
    %nothing = stablehlo.constant dense<0.0> : tensor<bf16>
    %two = stablehlo.constant dense<2.0> : tensor<4x3xbf16>
    %no_kept = stablehlo.constant dense<0.0> : tensor<4x4x3xbf16>
    %no_gradient = stablehlo.constant dense<0.0> : tensor<4x3x3xbf16>
    %forward:4 = stablehlo.while(%i = %zero, %ws = %w, %kept = %no_kept, %h = %x) : tensor<i32>, tensor<4x3x3xbf16>, tensor<4x4x3xbf16>, tensor<4x3xbf16>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %slice = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xbf16>
      %weight = stablehlo.reshape %slice : (tensor<1x3x3xbf16>) -> tensor<3x3xbf16>
      %2 = stablehlo.reshape %h : (tensor<4x3xbf16>) -> tensor<1x4x3xbf16>
      %3 = stablehlo.dynamic_update_slice %kept, %2, %i, %zero, %zero : (tensor<4x4x3xbf16>, tensor<1x4x3xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x4x3xbf16>
      %4 = stablehlo.dot_general %h, %weight, contracting_dims = [1] x [0] : (tensor<4x3xbf16>, tensor<3x3xbf16>) -> tensor<4x3xbf16>
      %5 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %5, %ws, %3, %4 : tensor<i32>, tensor<4x3x3xbf16>, tensor<4x4x3xbf16>, tensor<4x3xbf16>
    }
    %square = stablehlo.multiply %forward#3, %forward#3 : tensor<4x3xbf16>
    %loss = stablehlo.reduce(%square init: %nothing) applies stablehlo.add across dimensions = [0, 1] : (tensor<4x3xbf16>, tensor<bf16>) -> tensor<bf16>
    %slope = stablehlo.multiply %forward#3, %two : tensor<4x3xbf16>
    %backward:5 = stablehlo.while(%i = %zero, %ws = %w, %kept = %forward#2, %g = %slope, %gradient = %no_gradient) : tensor<i32>, tensor<4x3x3xbf16>, tensor<4x4x3xbf16>, tensor<4x3xbf16>, tensor<4x3x3xbf16>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %place = stablehlo.subtract %last, %i : tensor<i32>
      %slice = stablehlo.dynamic_slice %ws, %place, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xbf16>
      %weight = stablehlo.reshape %slice : (tensor<1x3x3xbf16>) -> tensor<3x3xbf16>
      %2 = stablehlo.dynamic_slice %kept, %place, %zero, %zero, sizes = [1, 4, 3] : (tensor<4x4x3xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x3xbf16>
      %3 = stablehlo.reshape %2 : (tensor<1x4x3xbf16>) -> tensor<4x3xbf16>
      %4 = stablehlo.dot_general %3, %g, contracting_dims = [0] x [0] : (tensor<4x3xbf16>, tensor<4x3xbf16>) -> tensor<3x3xbf16>
      %5 = stablehlo.reshape %4 : (tensor<3x3xbf16>) -> tensor<1x3x3xbf16>
      %6 = stablehlo.dynamic_update_slice %gradient, %5, %place, %zero, %zero : (tensor<4x3x3xbf16>, tensor<1x3x3xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x3x3xbf16>
      %7 = stablehlo.dot_general %g, %weight, contracting_dims = [1] x [1] : (tensor<4x3xbf16>, tensor<3x3xbf16>) -> tensor<4x3xbf16>
      %8 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %8, %ws, %kept, %7, %6 : tensor<i32>, tensor<4x3x3xbf16>, tensor<4x4x3xbf16>, tensor<4x3xbf16>, tensor<4x3x3xbf16>
    }
    return %loss, %backward#4 : tensor<bf16>, tensor<4x3x3xbf16>
  }
}

// -----

// What only adds terms up over the layers is no activation: each rank adds its own, and one sum
// follows the ticks.
// CHECK-LABEL: func.func @penalty
// CHECK: sdy.manual_computation
// CHECK: %[[TICKS:[^ :]+]]:4 = stablehlo.while(
// CHECK: stablehlo.collective_permute
// CHECK-NOT: stablehlo.collective_permute
// CHECK: "stablehlo.all_reduce"(%[[TICKS]]#2)
// CHECK: (tensor<2x2x1x3xf32>) -> tensor<2x2x1x3xf32>
// CHECK: "stablehlo.all_reduce"(%[[TICKS]]#3)
// CHECK: (tensor<f32>) -> tensor<f32>
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @penalty(%w: tensor<4x3x3xf32>, %x: tensor<4x3xf32>) -> (tensor<4x3xf32>, tensor<f32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
    %nothing = stablehlo.constant dense<0.0> : tensor<f32>
    %loop:4 = stablehlo.while(%i = %zero, %ws = %w, %h = %x, %sum = %nothing) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>, tensor<f32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %1 = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %3 = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %4 = stablehlo.reduce(%3 init: %nothing) applies stablehlo.add across dimensions = [0, 1] : (tensor<4x3xf32>, tensor<f32>) -> tensor<f32>
      %5 = stablehlo.add %sum, %4 : tensor<f32>
      %6 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %6, %ws, %3, %5 : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>, tensor<f32>
    }
    return %loop#2, %loop#3 : tensor<4x3xf32>, tensor<f32>
  }
}

// -----

// A loop around the layers whose weights stay the same goes over batches: it stays, and the
// pipeline is in it.
// CHECK-LABEL: func.func @accumulation
// CHECK: stablehlo.while(
// CHECK: sdy.manual_computation
// CHECK: stablehlo.while(
// CHECK: stablehlo.while(
// CHECK: stablehlo.collective_permute
// CHECK: sdy.return
// CHECK: stablehlo.return
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @accumulation(%w: tensor<4x3x3xf32>, %x: tensor<2x4x3xf32>) -> tensor<4x3xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %parts = stablehlo.constant dense<2> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
    %nothing = stablehlo.constant dense<0.0> : tensor<4x3xf32>
    %total:2 = stablehlo.while(%part = %zero, %sum = %nothing) : tensor<i32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %part, %parts : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %start = stablehlo.dynamic_slice %x, %part, %zero, %zero, sizes = [1, 4, 3] : (tensor<2x4x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x3xf32>
      %samples = stablehlo.reshape %start : (tensor<1x4x3xf32>) -> tensor<4x3xf32>
      %loop:3 = stablehlo.while(%i = %zero, %ws = %w, %h = %samples) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
      cond {
        %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %0 : tensor<i1>
      } do {
        %1 = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
        %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
        %3 = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
        %4 = stablehlo.add %i, %one : tensor<i32>
        stablehlo.return %4, %ws, %3 : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
      }
      %added = stablehlo.add %sum, %loop#2 : tensor<4x3xf32>
      %next = stablehlo.add %part, %one : tensor<i32>
      stablehlo.return %next, %added : tensor<i32>, tensor<4x3xf32>
    }
    return %total#1 : tensor<4x3xf32>
  }
}
