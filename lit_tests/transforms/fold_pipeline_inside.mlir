// RUN: stablehlo-tools opt %s -p fold-pipeline > %t.after.mlir
// RUN: filecheck %s < %t.after.mlir
// RUN: stablehlo-tools inspect %t.after.mlir | filecheck %s --check-prefix=COUNT
// Made by: stablehlo-tools make-test step.jax_export -p fold-pipeline
// After a wanted change: stablehlo-tools make-test --update lit_tests/transforms/fold_pipeline_inside.mlir

// COUNT: : 0 communicating ops on 1 x 4
// CHECK: mhlo.num_partitions = 4 : i32
// CHECK-SAME: mhlo.num_replicas = 1 : i32
// CHECK-NEXT: sdy.mesh @{{[^ ,)]+}} = <["data"=2, "stage"=2]>
// CHECK-LABEL: func.func public @main(
// CHECK-SAME: %{{[^ ,)]+}}: tensor<2x8x8xf32> {sdy.sharding = #sdy.sharding<@{{[^ ,)]+}}, [{"stage"}, {}, {}]>}, %{{[^ ,)]+}}: tensor<2x2x8xf32> {sdy.sharding = #sdy.sharding<@{{[^ ,)]+}}, [{}, {"data"}, {}]>})
// CHECK-SAME: -> (tensor<f32>, tensor<2x8x8xf32>)
// CHECK: %[[WHILE:[^ ,)]+]]:5 = stablehlo.while(%[[ITER_ARG:[^ ,)]+]] = {{.+}}) : tensor<2x8x8xf32>, tensor<i32>,
// CHECK-SAME: tensor<4x8xf32>, tensor<2x4x8xf32>, tensor<2x4x8xf32>
// CHECK-NEXT: cond {
// CHECK: stablehlo.return %{{[^ ,)]+}} :
// CHECK-NEXT: } do {
// CHECK: stablehlo.return %[[ITER_ARG]], {{.+}} :
// CHECK: %{{[^ ,)]+}}:6 = stablehlo.while(%[[ITER_ARG_1:[^ ,)]+]] = %[[WHILE]]#3, %[[ITER_ARG_2:[^ ,)]+]] = %[[WHILE]]#4,
// CHECK-SAME: %[[ITER_ARG_3:[^ ,)]+]] = {{.+}}) : tensor<2x4x8xf32>, tensor<2x4x8xf32>, tensor<2x8x8xf32>, tensor<i32>,
// CHECK-SAME: tensor<4x8xf32>, tensor<2x8x8xf32>
// CHECK-NEXT: cond {
// CHECK: stablehlo.return %{{[^ ,)]+}} :
// CHECK-NEXT: } do {
// CHECK: stablehlo.return %[[ITER_ARG_1]], %[[ITER_ARG_2]], %[[ITER_ARG_3]], %{{[^ ,)]+}}, %{{[^ ,)]+}}, %{{[^ ,)]+}} :
// CHECK: return %{{[^ ,)]+}}, %{{[^ ,)]+}} :

module @jit_local_step attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=2, "stage"=2]>
  sdy.mesh @mesh_0 = <["data"=2, "stage"=2]>
  func.func public @main(%arg0: tensor<2x8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"stage"}, {}, {}]>}, %arg1: tensor<2x2x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}) -> (tensor<f32>, tensor<2x8x8xf32>) {
    %0:2 = sdy.manual_computation(%arg0, %arg1) in_shardings=[<@mesh, [{"stage"}, {}, {}]>, <@mesh, [{}, {"data"}, {}]>] out_shardings=[<@mesh, []>, <@mesh, [{"stage"}, {}, {}]>] manual_axes={"data", "stage"} (%arg2: tensor<1x8x8xf32>, %arg3: tensor<2x1x8xf32>) {
      %cst = stablehlo.constant dense<1.000000e-01> : tensor<f32>
      %cst_0 = stablehlo.constant dense<1.600000e+01> : tensor<f32>
      %cst_1 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
      %cst_2 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
      %c = stablehlo.constant dense<2> : tensor<i32>
      %c_3 = stablehlo.constant dense<3> : tensor<i32>
      %c_4 = stablehlo.constant dense<8> : tensor<i32>
      %c_5 = stablehlo.constant dense<1> : tensor<i32>
      %c_6 = stablehlo.constant dense<0> : tensor<i32>
      %cst_7 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %c_8 = stablehlo.constant dense<1> : tensor<ui32>
      %c_9 = stablehlo.constant dense<2> : tensor<ui32>
      %1 = stablehlo.partition_id : tensor<ui32>
      %2 = stablehlo.divide %1, %c_8 : tensor<ui32>
      %3 = stablehlo.remainder %2, %c_9 : tensor<ui32>
      %4 = stablehlo.convert %3 : (tensor<ui32>) -> tensor<i32>
      %5 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<1x8xf32>
      %6 = stablehlo.iota dim = 0 : tensor<3xi32>
      %7 = stablehlo.compare EQ, %4, %c_6, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      %8 = stablehlo.compare LT, %c_6, %c_6, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      %9 = stablehlo.add %c_6, %c_5 : tensor<i32>
      %10 = stablehlo.select %8, %9, %c_6 : tensor<i1>, tensor<i32>
      %11 = stablehlo.compare LT, %c_6, %c_6, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      %12 = stablehlo.add %c_6, %c_4 : tensor<i32>
      %13 = stablehlo.select %11, %12, %c_6 : tensor<i1>, tensor<i32>
      %14 = stablehlo.slice %arg2 [0:1, 0:8, 0:8] : (tensor<1x8x8xf32>) -> tensor<1x8x8xf32>
      %15 = stablehlo.reshape %14 : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
      %16 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<3x1x8xf32>
      %17 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<3x1x8xf32>
      %18 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<3x1x8xf32>
      %19:11 = stablehlo.while(%iterArg = %6, %iterArg_10 = %arg3, %iterArg_11 = %10, %iterArg_12 = %13, %iterArg_13 = %7, %iterArg_14 = %15, %iterArg_15 = %c_6, %iterArg_16 = %5, %iterArg_17 = %16, %iterArg_18 = %17, %iterArg_19 = %18) : tensor<3xi32>, tensor<2x1x8xf32>, tensor<i32>, tensor<i32>, tensor<i1>, tensor<8x8xf32>, tensor<i32>, tensor<1x8xf32>, tensor<3x1x8xf32>, tensor<3x1x8xf32>, tensor<3x1x8xf32>
      cond {
        %49 = stablehlo.compare LT, %iterArg_15, %c_3, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %49 : tensor<i1>
      } do {
        %49 = func.call @dynamic_index_in_dim(%iterArg, %iterArg_15) : (tensor<3xi32>, tensor<i32>) -> tensor<i32>
        %50 = stablehlo.minimum %49, %c_5 : tensor<i32>
        %51 = stablehlo.compare LT, %50, %c_6, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
        %52 = stablehlo.add %50, %c : tensor<i32>
        %53 = stablehlo.select %51, %52, %50 : tensor<i1>, tensor<i32>
        %54 = stablehlo.dynamic_slice %iterArg_10, %53, %iterArg_11, %iterArg_12, sizes = [1, 1, 8] : (tensor<2x1x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x1x8xf32>
        %55 = stablehlo.reshape %54 : (tensor<1x1x8xf32>) -> tensor<1x8xf32>
        %56 = func.call @_where(%55, %iterArg_16, %iterArg_13) : (tensor<1x8xf32>, tensor<1x8xf32>, tensor<i1>) -> tensor<1x8xf32>
        %57 = stablehlo.dot_general %56, %iterArg_14, contracting_dims = [1] x [0] : (tensor<1x8xf32>, tensor<8x8xf32>) -> tensor<1x8xf32>
        %58 = stablehlo.tanh %57 : tensor<1x8xf32>
        %59 = stablehlo.broadcast_in_dim %cst_2, dims = [] : (tensor<f32>) -> tensor<1x8xf32>
        %60 = stablehlo.add %59, %58 : tensor<1x8xf32>
        %61 = stablehlo.broadcast_in_dim %cst_2, dims = [] : (tensor<f32>) -> tensor<1x8xf32>
        %62 = stablehlo.subtract %61, %58 : tensor<1x8xf32>
        %63 = stablehlo.multiply %60, %62 : tensor<1x8xf32>
        %64 = stablehlo.add %56, %58 : tensor<1x8xf32>
        %65 = "stablehlo.collective_permute"(%64) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, source_target_pairs = dense<[[0, 1], [1, 0], [2, 3], [3, 2]]> : tensor<4x2xi64>}> : (tensor<1x8xf32>) -> tensor<1x8xf32>
        %66 = func.call @dynamic_update_index_in_dim(%iterArg_17, %64, %iterArg_15) : (tensor<3x1x8xf32>, tensor<1x8xf32>, tensor<i32>) -> tensor<3x1x8xf32>
        %67 = func.call @dynamic_update_index_in_dim(%iterArg_18, %56, %iterArg_15) : (tensor<3x1x8xf32>, tensor<1x8xf32>, tensor<i32>) -> tensor<3x1x8xf32>
        %68 = func.call @dynamic_update_index_in_dim(%iterArg_19, %63, %iterArg_15) : (tensor<3x1x8xf32>, tensor<1x8xf32>, tensor<i32>) -> tensor<3x1x8xf32>
        %69 = stablehlo.add %iterArg_15, %c_5 : tensor<i32>
        stablehlo.return %iterArg, %iterArg_10, %iterArg_11, %iterArg_12, %iterArg_13, %iterArg_14, %69, %65, %66, %67, %68 : tensor<3xi32>, tensor<2x1x8xf32>, tensor<i32>, tensor<i32>, tensor<i1>, tensor<8x8xf32>, tensor<i32>, tensor<1x8xf32>, tensor<3x1x8xf32>, tensor<3x1x8xf32>, tensor<3x1x8xf32>
      }
      %20 = stablehlo.slice %19#8 [1:3, 0:1, 0:8] : (tensor<3x1x8xf32>) -> tensor<2x1x8xf32>
      %21 = stablehlo.multiply %20, %20 : tensor<2x1x8xf32>
      %22 = stablehlo.broadcast_in_dim %cst_1, dims = [] : (tensor<f32>) -> tensor<2x1x8xf32>
      %23 = stablehlo.multiply %22, %20 : tensor<2x1x8xf32>
      %24 = stablehlo.reduce(%21 init: %cst_7) applies stablehlo.add across dimensions = [0, 1, 2] : (tensor<2x1x8xf32>, tensor<f32>) -> tensor<f32>
      %25 = stablehlo.divide %24, %cst_0 : tensor<f32>
      %26 = stablehlo.partition_id : tensor<ui32>
      %27 = stablehlo.divide %26, %c_8 : tensor<ui32>
      %28 = stablehlo.remainder %27, %c_9 : tensor<ui32>
      %29 = stablehlo.convert %28 : (tensor<ui32>) -> tensor<i32>
      %30 = stablehlo.compare EQ, %29, %c_5, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      %31 = func.call @_where_0(%30, %25, %cst_7) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
      %32 = func.call @_where_1(%30, %cst_2) : (tensor<i1>, tensor<f32>) -> tensor<f32>
      %33 = stablehlo.divide %32, %cst_0 : tensor<f32>
      %34 = stablehlo.broadcast_in_dim %33, dims = [] : (tensor<f32>) -> tensor<2x1x8xf32>
      %35 = stablehlo.multiply %34, %23 : tensor<2x1x8xf32>
      %36 = stablehlo.pad %35, %cst_7, low = [1, 0, 0], high = [0, 0, 0], interior = [0, 0, 0] : (tensor<2x1x8xf32>, tensor<f32>) -> tensor<3x1x8xf32>
      %37 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<1x8xf32>
      %38 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<1x8x8xf32>
      %39:8 = stablehlo.while(%iterArg = %36, %iterArg_10 = %19#9, %iterArg_11 = %19#10, %iterArg_12 = %7, %iterArg_13 = %15, %iterArg_14 = %c_6, %iterArg_15 = %38, %iterArg_16 = %37) : tensor<3x1x8xf32>, tensor<3x1x8xf32>, tensor<3x1x8xf32>, tensor<i1>, tensor<8x8xf32>, tensor<i32>, tensor<1x8x8xf32>, tensor<1x8xf32>
      cond {
        %49 = stablehlo.compare LT, %iterArg_14, %c_3, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %49 : tensor<i1>
      } do {
        %49 = stablehlo.subtract %c_3, %iterArg_14 : tensor<i32>
        %50 = stablehlo.subtract %49, %c_5 : tensor<i32>
        %51 = func.call @dynamic_index_in_dim_2(%iterArg, %50) : (tensor<3x1x8xf32>, tensor<i32>) -> tensor<1x8xf32>
        %52 = func.call @dynamic_index_in_dim_2(%iterArg_10, %50) : (tensor<3x1x8xf32>, tensor<i32>) -> tensor<1x8xf32>
        %53 = func.call @dynamic_index_in_dim_2(%iterArg_11, %50) : (tensor<3x1x8xf32>, tensor<i32>) -> tensor<1x8xf32>
        %54 = "stablehlo.collective_permute"(%iterArg_16) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, source_target_pairs = dense<[[1, 0], [0, 1], [3, 2], [2, 3]]> : tensor<4x2xi64>}> : (tensor<1x8xf32>) -> tensor<1x8xf32>
        %55 = stablehlo.add %51, %54 : tensor<1x8xf32>
        %56 = stablehlo.multiply %55, %53 : tensor<1x8xf32>
        %57 = stablehlo.dot_general %56, %52, contracting_dims = [0] x [0] : (tensor<1x8xf32>, tensor<1x8xf32>) -> tensor<8x8xf32>
        %58 = stablehlo.transpose %57, dims = [1, 0] : (tensor<8x8xf32>) -> tensor<8x8xf32>
        %59 = stablehlo.dot_general %56, %iterArg_13, contracting_dims = [1] x [1] : (tensor<1x8xf32>, tensor<8x8xf32>) -> tensor<1x8xf32>
        %60 = stablehlo.add %55, %59 : tensor<1x8xf32>
        %61 = stablehlo.broadcast_in_dim %58, dims = [1, 2] : (tensor<8x8xf32>) -> tensor<1x8x8xf32>
        %62 = stablehlo.add %iterArg_15, %61 : tensor<1x8x8xf32>
        %63 = func.call @_where_3(%iterArg_12, %60) : (tensor<i1>, tensor<1x8xf32>) -> tensor<1x8xf32>
        %64 = stablehlo.add %iterArg_14, %c_5 : tensor<i32>
        stablehlo.return %iterArg, %iterArg_10, %iterArg_11, %iterArg_12, %iterArg_13, %64, %62, %63 : tensor<3x1x8xf32>, tensor<3x1x8xf32>, tensor<3x1x8xf32>, tensor<i1>, tensor<8x8xf32>, tensor<i32>, tensor<1x8x8xf32>, tensor<1x8xf32>
      }
      %40 = "stablehlo.all_reduce"(%31) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh_0, axes = [#stablehlo.axis_ref<name = "stage">]>, use_global_device_ids}> ({
      ^bb0(%arg4: tensor<f32>, %arg5: tensor<f32>):
        %49 = stablehlo.add %arg4, %arg5 : tensor<f32>
        stablehlo.return %49 : tensor<f32>
      }) : (tensor<f32>) -> tensor<f32>
      %41 = "stablehlo.all_reduce"(%40) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh_0, axes = [#stablehlo.axis_ref<name = "data">]>, use_global_device_ids}> ({
      ^bb0(%arg4: tensor<f32>, %arg5: tensor<f32>):
        %49 = stablehlo.add %arg4, %arg5 : tensor<f32>
        stablehlo.return %49 : tensor<f32>
      }) : (tensor<f32>) -> tensor<f32>
      %42 = "stablehlo.all_reduce"(%39#6) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh_0, axes = [#stablehlo.axis_ref<name = "data">]>, use_global_device_ids}> ({
      ^bb0(%arg4: tensor<f32>, %arg5: tensor<f32>):
        %49 = stablehlo.add %arg4, %arg5 : tensor<f32>
        stablehlo.return %49 : tensor<f32>
      }) : (tensor<1x8x8xf32>) -> tensor<1x8x8xf32>
      %43 = stablehlo.divide %41, %cst_1 : tensor<f32>
      %44 = stablehlo.broadcast_in_dim %cst_1, dims = [] : (tensor<f32>) -> tensor<1x8x8xf32>
      %45 = stablehlo.divide %42, %44 : tensor<1x8x8xf32>
      %46 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<1x8x8xf32>
      %47 = stablehlo.multiply %46, %45 : tensor<1x8x8xf32>
      %48 = stablehlo.subtract %arg2, %47 : tensor<1x8x8xf32>
      sdy.return %43, %48 : tensor<f32>, tensor<1x8x8xf32>
    } : (tensor<2x8x8xf32>, tensor<2x2x8xf32>) -> (tensor<f32>, tensor<2x8x8xf32>)
    return %0#0, %0#1 : tensor<f32>, tensor<2x8x8xf32>
  }
  func.func private @dynamic_index_in_dim(%arg0: tensor<3xi32>, %arg1: tensor<i32>) -> tensor<i32> {
    %0 = stablehlo.dynamic_slice %arg0, %arg1, sizes = [1] : (tensor<3xi32>, tensor<i32>) -> tensor<1xi32>
    %1 = stablehlo.reshape %0 : (tensor<1xi32>) -> tensor<i32>
    return %1 : tensor<i32>
  }
  func.func private @_where(%arg0: tensor<1x8xf32>, %arg1: tensor<1x8xf32>, %arg2: tensor<i1>) -> tensor<1x8xf32> {
    %0 = stablehlo.select %arg2, %arg0, %arg1 : tensor<i1>, tensor<1x8xf32>
    return %0 : tensor<1x8xf32>
  }
  func.func private @dynamic_update_index_in_dim(%arg0: tensor<3x1x8xf32>, %arg1: tensor<1x8xf32>, %arg2: tensor<i32>) -> tensor<3x1x8xf32> {
    %c = stablehlo.constant dense<0> : tensor<i32>
    %0 = stablehlo.broadcast_in_dim %arg1, dims = [1, 2] : (tensor<1x8xf32>) -> tensor<1x1x8xf32>
    %1 = stablehlo.dynamic_update_slice %arg0, %0, %arg2, %c, %c : (tensor<3x1x8xf32>, tensor<1x1x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x1x8xf32>
    return %1 : tensor<3x1x8xf32>
  }
  func.func private @_where_0(%arg0: tensor<i1>, %arg1: tensor<f32>, %arg2: tensor<f32>) -> tensor<f32> {
    %0 = stablehlo.convert %arg2 : tensor<f32>
    %1 = stablehlo.select %arg0, %arg1, %0 : tensor<i1>, tensor<f32>
    return %1 : tensor<f32>
  }
  func.func private @_where_1(%arg0: tensor<i1>, %arg1: tensor<f32>) -> tensor<f32> {
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.select %arg0, %arg1, %cst : tensor<i1>, tensor<f32>
    return %0 : tensor<f32>
  }
  func.func private @dynamic_index_in_dim_2(%arg0: tensor<3x1x8xf32>, %arg1: tensor<i32>) -> tensor<1x8xf32> {
    %c = stablehlo.constant dense<0> : tensor<i32>
    %0 = stablehlo.dynamic_slice %arg0, %arg1, %c, %c, sizes = [1, 1, 8] : (tensor<3x1x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x1x8xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x1x8xf32>) -> tensor<1x8xf32>
    return %1 : tensor<1x8xf32>
  }
  func.func private @_where_3(%arg0: tensor<i1>, %arg1: tensor<1x8xf32>) -> tensor<1x8xf32> {
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<1x8xf32>
    %1 = stablehlo.select %arg0, %0, %arg1 : tensor<i1>, tensor<1x8xf32>
    return %1 : tensor<1x8xf32>
  }
}
