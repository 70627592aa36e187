// RUN: stablehlo-tools opt %s -p 'fold-pipeline{explain}' -o %t.plain.mlir 2> %t.said
// RUN: filecheck %s < %t.plain.mlir
// RUN: filecheck %s --check-prefix=SAID < %t.said
// RUN: stablehlo-tools verify %s %t.plain.mlir | filecheck %s --check-prefix=SAME
// RUN: stablehlo-tools opt %t.plain.mlir -p 'expand-pipeline{microbatches=4}' -o %t.gpipe.mlir
// RUN: stablehlo-tools verify %s %t.gpipe.mlir | filecheck %s --check-prefix=SAME

// Two microbatches lie with each stage, and the tick says which of them moves, as in MaxText's loop.

// SAID: note: fold-pipeline: a pipeline of 2 stages
// SAME: identical in exact arithmetic: 1 output, 8 elements

// CHECK-LABEL: func.func public @main
// CHECK-NOT: collective_permute
// CHECK: %[[Y:.+]]:3 = stablehlo.while
// CHECK-NOT: stablehlo.concatenate
// CHECK-NOT: stablehlo.gather
// CHECK: %[[Z:.+]] = stablehlo.reshape %[[Y]]#{{[0-9]}} : (tensor<1x4x2xf32>) -> tensor<4x2xf32>
// CHECK-NEXT: return %[[Z]]

module @streamed attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func public @main(%arg0: tensor<2x2x2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"stage"}, {}, {}]>}, %arg1: tensor<4x2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) -> (tensor<4x2xf32> {jax.result_info = "result"}) {
    %c = stablehlo.constant dense<1> : tensor<i32>
    %c_0 = stablehlo.constant dense<2> : tensor<i32>
    %c_1 = stablehlo.constant dense<5> : tensor<i32>
    %c_2 = stablehlo.constant dense<0> : tensor<i32>
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %c_3 = stablehlo.constant dense<[1, 0]> : tensor<2xi32>
    %c_4 = stablehlo.constant dense<false> : tensor<2xi1>
    %0 = stablehlo.reshape %arg0 : (tensor<2x2x2xf32>) -> tensor<2x1x2x2xf32>
    %1 = stablehlo.reshape %arg1 : (tensor<4x2xf32>) -> tensor<2x2x1x2xf32>
    %2 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<2x1x2xf32>
    %3 = stablehlo.iota dim = 0 : tensor<5xi32>
    %4:5 = stablehlo.while(%iterArg = %3, %iterArg_5 = %0, %iterArg_6 = %c_2, %iterArg_7 = %1, %iterArg_8 = %2) : tensor<5xi32>, tensor<2x1x2x2xf32>, tensor<i32>, tensor<2x2x1x2xf32>, tensor<2x1x2xf32>
    cond {
      %11 = stablehlo.compare LT, %iterArg_6, %c_1, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %11 : tensor<i1>
    } do {
      %11 = func.call @dynamic_index_in_dim(%iterArg, %iterArg_6) : (tensor<5xi32>, tensor<i32>) -> tensor<i32>
      %12 = func.call @remainder(%11, %c_0) : (tensor<i32>, tensor<i32>) -> tensor<i32>
      %13 = func.call @dynamic_index_in_dim_0(%iterArg_7, %12) : (tensor<2x2x1x2xf32>, tensor<i32>) -> tensor<2x1x2xf32>
      %14 = stablehlo.iota dim = 0 : tensor<2x1x2xi32>
      %15 = stablehlo.broadcast_in_dim %c_2, dims = [] : (tensor<i32>) -> tensor<2x1x2xi32>
      %16 = stablehlo.compare EQ, %14, %15, SIGNED : (tensor<2x1x2xi32>, tensor<2x1x2xi32>) -> tensor<2x1x2xi1>
      %17 = func.call @_where_1(%16, %13, %iterArg_8) : (tensor<2x1x2xi1>, tensor<2x1x2xf32>, tensor<2x1x2xf32>) -> tensor<2x1x2xf32>
      %18 = stablehlo.transpose %iterArg_5, dims = [1, 0, 2, 3] : (tensor<2x1x2x2xf32>) -> tensor<1x2x2x2xf32>
      %19:3 = stablehlo.while(%iterArg_9 = %18, %iterArg_10 = %c_2, %iterArg_11 = %17) : tensor<1x2x2x2xf32>, tensor<i32>, tensor<2x1x2xf32>
      cond {
        %24 = stablehlo.compare LT, %iterArg_10, %c, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %24 : tensor<i1>
      } do {
        %24 = func.call @dynamic_index_in_dim_2(%iterArg_9, %iterArg_10) : (tensor<1x2x2x2xf32>, tensor<i32>) -> tensor<2x2x2xf32>
        %25 = stablehlo.dot_general %iterArg_11, %24, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<2x1x2xf32>, tensor<2x2x2xf32>) -> tensor<2x1x2xf32>
        %26 = stablehlo.tanh %25 : tensor<2x1x2xf32>
        %27 = stablehlo.add %iterArg_11, %26 : tensor<2x1x2xf32>
        %28 = stablehlo.add %iterArg_10, %c : tensor<i32>
        stablehlo.return %iterArg_9, %28, %27 : tensor<1x2x2x2xf32>, tensor<i32>, tensor<2x1x2xf32>
      }
      %20 = func.call @remainder(%11, %c_0) : (tensor<i32>, tensor<i32>) -> tensor<i32>
      %21 = sdy.manual_computation(%iterArg_7, %20, %19#2) in_shardings=[<@mesh, [{"stage"}, {}, {}, {}]>, <@mesh, []>, <@mesh, [{"stage"}, {}, {}]>] out_shardings=[<@mesh, [{"stage"}, {}, {}, {}]>] manual_axes={"stage"} (%arg2: tensor<1x2x1x2xf32>, %arg3: tensor<i32>, %arg4: tensor<1x1x2xf32>) {
        %c_9 = stablehlo.constant dense<1> : tensor<i32>
        %c_10 = stablehlo.constant dense<2> : tensor<ui32>
        %c_11 = stablehlo.constant dense<1> : tensor<ui32>
        %24 = func.call @dynamic_index_in_dim_3(%arg2, %arg3) : (tensor<1x2x1x2xf32>, tensor<i32>) -> tensor<1x1x2xf32>
        %25 = "stablehlo.collective_permute"(%24) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, source_target_pairs = dense<[[1, 0], [0, 1]]> : tensor<2x2xi64>}> : (tensor<1x1x2xf32>) -> tensor<1x1x2xf32>
        %26 = stablehlo.partition_id : tensor<ui32>
        %27 = stablehlo.divide %26, %c_11 : tensor<ui32>
        %28 = stablehlo.remainder %27, %c_10 : tensor<ui32>
        %29 = stablehlo.convert %28 : (tensor<ui32>) -> tensor<i32>
        %30 = stablehlo.convert %c_9 : tensor<i32>
        %31 = stablehlo.compare EQ, %29, %30, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
        %32 = func.call @_where_4(%31, %arg4, %25) : (tensor<i1>, tensor<1x1x2xf32>, tensor<1x1x2xf32>) -> tensor<1x1x2xf32>
        %33 = func.call @dynamic_update_index_in_dim(%arg2, %32, %arg3) : (tensor<1x2x1x2xf32>, tensor<1x1x2xf32>, tensor<i32>) -> tensor<1x2x1x2xf32>
        sdy.return %33 : tensor<1x2x1x2xf32>
      } : (tensor<2x2x1x2xf32>, tensor<i32>, tensor<2x1x2xf32>) -> tensor<2x2x1x2xf32>
      %22 = sdy.manual_computation(%19#2) in_shardings=[<@mesh, [{"stage"}, {}, {}]>] out_shardings=[<@mesh, [{"stage"}, {}, {}]>] manual_axes={"stage"} (%arg2: tensor<1x1x2xf32>) {
        %24 = "stablehlo.collective_permute"(%arg2) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>}> : (tensor<1x1x2xf32>) -> tensor<1x1x2xf32>
        sdy.return %24 : tensor<1x1x2xf32>
      } : (tensor<2x1x2xf32>) -> tensor<2x1x2xf32>
      %23 = stablehlo.add %iterArg_6, %c : tensor<i32>
      stablehlo.return %iterArg, %iterArg_5, %23, %21, %22 : tensor<5xi32>, tensor<2x1x2x2xf32>, tensor<i32>, tensor<2x2x1x2xf32>, tensor<2x1x2xf32>
    }
    %5 = stablehlo.broadcast_in_dim %c_0, dims = [] : (tensor<i32>) -> tensor<2xi32>
    %6 = stablehlo.add %c_3, %5 : tensor<2xi32>
    %7 = stablehlo.select %c_4, %6, %c_3 : tensor<2xi1>, tensor<2xi32>
    %8 = stablehlo.broadcast_in_dim %7, dims = [0] : (tensor<2xi32>) -> tensor<2x1xi32>
    %9 = "stablehlo.gather"(%4#3, %8) <{dimension_numbers = #stablehlo.gather<offset_dims = [0, 2, 3], collapsed_slice_dims = [1], start_index_map = [1], index_vector_dim = 1>, slice_sizes = array<i64: 2, 1, 1, 2>}> : (tensor<2x2x1x2xf32>, tensor<2x1xi32>) -> tensor<2x2x1x2xf32>
    %10 = stablehlo.reshape %9 : (tensor<2x2x1x2xf32>) -> tensor<4x2xf32>
    return %10 : tensor<4x2xf32>
  }
  func.func private @dynamic_index_in_dim(%arg0: tensor<5xi32>, %arg1: tensor<i32>) -> tensor<i32> {
    %0 = stablehlo.dynamic_slice %arg0, %arg1, sizes = [1] : (tensor<5xi32>, tensor<i32>) -> tensor<1xi32>
    %1 = stablehlo.reshape %0 : (tensor<1xi32>) -> tensor<i32>
    return %1 : tensor<i32>
  }
  func.func private @remainder(%arg0: tensor<i32>, %arg1: tensor<i32>) -> tensor<i32> {
    %c = stablehlo.constant dense<1> : tensor<i32>
    %c_0 = stablehlo.constant dense<0> : tensor<i32>
    %0 = stablehlo.convert %arg1 : tensor<i32>
    %1 = stablehlo.compare EQ, %0, %c_0, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %2 = call @_where(%1, %c, %0) : (tensor<i1>, tensor<i32>, tensor<i32>) -> tensor<i32>
    %3 = stablehlo.remainder %arg0, %2 : tensor<i32>
    %4 = stablehlo.compare NE, %3, %c_0, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %5 = stablehlo.compare LT, %3, %c_0, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %6 = stablehlo.compare LT, %2, %c_0, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %7 = stablehlo.compare NE, %5, %6, UNSIGNED : (tensor<i1>, tensor<i1>) -> tensor<i1>
    %8 = stablehlo.and %7, %4 : tensor<i1>
    %9 = stablehlo.add %3, %2 : tensor<i32>
    %10 = stablehlo.select %8, %9, %3 : tensor<i1>, tensor<i32>
    return %10 : tensor<i32>
  }
  func.func private @_where(%arg0: tensor<i1>, %arg1: tensor<i32>, %arg2: tensor<i32>) -> tensor<i32> {
    %0 = stablehlo.select %arg0, %arg1, %arg2 : tensor<i1>, tensor<i32>
    return %0 : tensor<i32>
  }
  func.func private @dynamic_index_in_dim_0(%arg0: tensor<2x2x1x2xf32>, %arg1: tensor<i32>) -> tensor<2x1x2xf32> {
    %c = stablehlo.constant dense<2> : tensor<i32>
    %c_0 = stablehlo.constant dense<0> : tensor<i32>
    %0 = stablehlo.compare LT, %arg1, %c_0, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %1 = stablehlo.add %arg1, %c : tensor<i32>
    %2 = stablehlo.select %0, %1, %arg1 : tensor<i1>, tensor<i32>
    %3 = stablehlo.dynamic_slice %arg0, %c_0, %2, %c_0, %c_0, sizes = [2, 1, 1, 2] : (tensor<2x2x1x2xf32>, tensor<i32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<2x1x1x2xf32>
    %4 = stablehlo.reshape %3 : (tensor<2x1x1x2xf32>) -> tensor<2x1x2xf32>
    return %4 : tensor<2x1x2xf32>
  }
  func.func private @_where_1(%arg0: tensor<2x1x2xi1>, %arg1: tensor<2x1x2xf32>, %arg2: tensor<2x1x2xf32>) -> tensor<2x1x2xf32> {
    %0 = stablehlo.select %arg0, %arg1, %arg2 : tensor<2x1x2xi1>, tensor<2x1x2xf32>
    return %0 : tensor<2x1x2xf32>
  }
  func.func private @dynamic_index_in_dim_2(%arg0: tensor<1x2x2x2xf32>, %arg1: tensor<i32>) -> tensor<2x2x2xf32> {
    %c = stablehlo.constant dense<0> : tensor<i32>
    %0 = stablehlo.dynamic_slice %arg0, %arg1, %c, %c, %c, sizes = [1, 2, 2, 2] : (tensor<1x2x2x2xf32>, tensor<i32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x2x2xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x2x2x2xf32>) -> tensor<2x2x2xf32>
    return %1 : tensor<2x2x2xf32>
  }
  func.func private @dynamic_index_in_dim_3(%arg0: tensor<1x2x1x2xf32>, %arg1: tensor<i32>) -> tensor<1x1x2xf32> {
    %c = stablehlo.constant dense<2> : tensor<i32>
    %c_0 = stablehlo.constant dense<0> : tensor<i32>
    %0 = stablehlo.compare LT, %arg1, %c_0, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %1 = stablehlo.add %arg1, %c : tensor<i32>
    %2 = stablehlo.select %0, %1, %arg1 : tensor<i1>, tensor<i32>
    %3 = stablehlo.dynamic_slice %arg0, %c_0, %2, %c_0, %c_0, sizes = [1, 1, 1, 2] : (tensor<1x2x1x2xf32>, tensor<i32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x1x1x2xf32>
    %4 = stablehlo.reshape %3 : (tensor<1x1x1x2xf32>) -> tensor<1x1x2xf32>
    return %4 : tensor<1x1x2xf32>
  }
  func.func private @_where_4(%arg0: tensor<i1>, %arg1: tensor<1x1x2xf32>, %arg2: tensor<1x1x2xf32>) -> tensor<1x1x2xf32> {
    %0 = stablehlo.select %arg0, %arg1, %arg2 : tensor<i1>, tensor<1x1x2xf32>
    return %0 : tensor<1x1x2xf32>
  }
  func.func private @dynamic_update_index_in_dim(%arg0: tensor<1x2x1x2xf32>, %arg1: tensor<1x1x2xf32>, %arg2: tensor<i32>) -> tensor<1x2x1x2xf32> {
    %c = stablehlo.constant dense<2> : tensor<i32>
    %c_0 = stablehlo.constant dense<0> : tensor<i32>
    %0 = stablehlo.broadcast_in_dim %arg1, dims = [0, 2, 3] : (tensor<1x1x2xf32>) -> tensor<1x1x1x2xf32>
    %1 = stablehlo.compare LT, %arg2, %c_0, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %2 = stablehlo.add %arg2, %c : tensor<i32>
    %3 = stablehlo.select %1, %2, %arg2 : tensor<i1>, tensor<i32>
    %4 = stablehlo.dynamic_update_slice %arg0, %0, %c_0, %3, %c_0, %c_0 : (tensor<1x2x1x2xf32>, tensor<1x1x1x2xf32>, tensor<i32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x1x2xf32>
    return %4 : tensor<1x2x1x2xf32>
  }
}
