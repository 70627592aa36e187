// RUN: stablehlo-tools opt %s -p fold-pipeline > %t.after.mlir
// RUN: filecheck %s < %t.after.mlir
// RUN: stablehlo-tools inspect %t.after.mlir | filecheck %s --check-prefix=COUNT
// Made by: stablehlo-tools make-test step.jax_export -p fold-pipeline
// After a wanted change: stablehlo-tools make-test --update fold_pipeline_training.mlir

// COUNT: : 0 communicating ops on 1 x 2
// CHECK: mhlo.num_partitions = 2 : i32
// CHECK-SAME: mhlo.num_replicas = 1 : i32
// CHECK-NEXT: sdy.mesh @[[MESH:[^ ,)]+]] = <["stage"=2]>
// CHECK-LABEL: func.func public @main(
// CHECK-SAME: %{{[^ ,)]+}}: tensor<2x8x8xf32> {sdy.sharding = #sdy.sharding<@[[MESH]], [{"stage"}, {}, {}]>}, %{{[^ ,)]+}}: tensor<6x8xf32> {sdy.sharding = #sdy.sharding<@[[MESH]], [{}, {}]>})
// CHECK-SAME: -> (tensor<f32>, tensor<2x8x8xf32>)
// CHECK: %[[WHILE:[^ ,)]+]]:5 = stablehlo.while(%[[ITER_ARG:[^ ,)]+]] = {{.+}}) : tensor<2x1x8x8xf32>, tensor<i32>,
// CHECK-SAME: tensor<1x6x8xf32>, tensor<2x1x6x8xf32>, tensor<2x1x6x8xf32>
// CHECK-NEXT: cond {
// CHECK: stablehlo.return %{{[^ ,)]+}} :
// CHECK-NEXT: } do {
// CHECK: stablehlo.return %[[ITER_ARG]], {{.+}} :
// CHECK: %{{[^ ,)]+}}:6 = stablehlo.while(%[[ITER_ARG_1:[^ ,)]+]] = %[[WHILE]]#3, %[[ITER_ARG_2:[^ ,)]+]] = %[[WHILE]]#4,
// CHECK-SAME: %[[ITER_ARG_3:[^ ,)]+]] = {{.+}}) : tensor<2x1x6x8xf32>, tensor<2x1x6x8xf32>, tensor<2x1x8x8xf32>, tensor<i32>,
// CHECK-SAME: tensor<1x6x8xf32>, tensor<2x1x8x8xf32>
// CHECK-NEXT: cond {
// CHECK: stablehlo.return %{{[^ ,)]+}} :
// CHECK-NEXT: } do {
// CHECK: stablehlo.return %[[ITER_ARG_1]], %[[ITER_ARG_2]], %[[ITER_ARG_3]], %{{[^ ,)]+}}, %{{[^ ,)]+}}, %{{[^ ,)]+}} :
// CHECK: return %{{[^ ,)]+}}, %{{[^ ,)]+}} :

module @jit_loss attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func public @main(%arg0: tensor<2x8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"stage"}, {}, {}]>}, %arg1: tensor<6x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) -> (tensor<f32>, tensor<2x8x8xf32>) {
    %cst = stablehlo.constant dense<4.800000e+01> : tensor<f32>
    %cst_0 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
    %c = stablehlo.constant dense<1> : tensor<i32>
    %cst_1 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %c_2 = stablehlo.constant dense<3> : tensor<i32>
    %c_3 = stablehlo.constant dense<4> : tensor<i32>
    %c_4 = stablehlo.constant dense<8> : tensor<i32>
    %c_5 = stablehlo.constant dense<2> : tensor<i32>
    %c_6 = stablehlo.constant dense<0> : tensor<i32>
    %cst_7 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.reshape %arg0 : (tensor<2x8x8xf32>) -> tensor<2x1x8x8xf32>
    %1 = stablehlo.reshape %arg1 : (tensor<6x8xf32>) -> tensor<3x2x8xf32>
    %2 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<2x2x8xf32>
    %3 = stablehlo.iota dim = 0 : tensor<4xi32>
    %4 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<3x2x8xf32>
    %5 = stablehlo.compare LT, %c_6, %c_6, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %6 = stablehlo.add %c_6, %c_5 : tensor<i32>
    %7 = stablehlo.select %5, %6, %c_6 : tensor<i1>, tensor<i32>
    %8 = stablehlo.compare LT, %c_6, %c_6, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %9 = stablehlo.add %c_6, %c_4 : tensor<i32>
    %10 = stablehlo.select %8, %9, %c_6 : tensor<i1>, tensor<i32>
    %11 = stablehlo.broadcast_in_dim %c_6, dims = [] : (tensor<i32>) -> tensor<1xi32>
    %12 = stablehlo.reshape %0 : (tensor<2x1x8x8xf32>) -> tensor<2x8x8xf32>
    %13 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<4x2x2x8xf32>
    %14 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<4x2x2x8xf32>
    %15 = stablehlo.broadcast_in_dim %c_6, dims = [] : (tensor<i32>) -> tensor<4xi32>
    %16:12 = stablehlo.while(%iterArg = %3, %iterArg_8 = %11, %iterArg_9 = %1, %iterArg_10 = %7, %iterArg_11 = %10, %iterArg_12 = %12, %iterArg_13 = %c_6, %iterArg_14 = %2, %iterArg_15 = %4, %iterArg_16 = %13, %iterArg_17 = %14, %iterArg_18 = %15) : tensor<4xi32>, tensor<1xi32>, tensor<3x2x8xf32>, tensor<i32>, tensor<i32>, tensor<2x8x8xf32>, tensor<i32>, tensor<2x2x8xf32>, tensor<3x2x8xf32>, tensor<4x2x2x8xf32>, tensor<4x2x2x8xf32>, tensor<4xi32>
    cond {
      %31 = stablehlo.compare LT, %iterArg_13, %c_3, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %31 : tensor<i1>
    } do {
      %31 = func.call @dynamic_index_in_dim(%iterArg, %iterArg_13) : (tensor<4xi32>, tensor<i32>) -> tensor<i32>
      %32 = stablehlo.minimum %31, %c_5 : tensor<i32>
      %33 = stablehlo.compare LT, %32, %c_6, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      %34 = stablehlo.add %32, %c_2 : tensor<i32>
      %35 = stablehlo.select %33, %34, %32 : tensor<i1>, tensor<i32>
      %36 = stablehlo.dynamic_slice %iterArg_9, %35, %iterArg_10, %iterArg_11, sizes = [1, 2, 8] : (tensor<3x2x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x8xf32>
      %37 = stablehlo.reshape %36 : (tensor<1x2x8xf32>) -> tensor<2x8xf32>
      %38 = func.call @_roll_static(%iterArg_14) : (tensor<2x2x8xf32>) -> tensor<2x2x8xf32>
      %39 = "stablehlo.scatter"(%38, %iterArg_8, %37) <{indices_are_sorted = true, scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [0, 1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0]>, unique_indices = true}> ({
      ^bb0(%arg2: tensor<f32>, %arg3: tensor<f32>):
        stablehlo.return %arg3 : tensor<f32>
      }) : (tensor<2x2x8xf32>, tensor<1xi32>, tensor<2x8xf32>) -> tensor<2x2x8xf32>
      %40 = stablehlo.dot_general %39, %iterArg_12, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<2x2x8xf32>, tensor<2x8x8xf32>) -> tensor<2x2x8xf32>
      %41 = stablehlo.tanh %40 : tensor<2x2x8xf32>
      %42 = stablehlo.broadcast_in_dim %cst_1, dims = [] : (tensor<f32>) -> tensor<2x2x8xf32>
      %43 = stablehlo.add %42, %41 : tensor<2x2x8xf32>
      %44 = stablehlo.broadcast_in_dim %cst_1, dims = [] : (tensor<f32>) -> tensor<2x2x8xf32>
      %45 = stablehlo.subtract %44, %41 : tensor<2x2x8xf32>
      %46 = stablehlo.multiply %43, %45 : tensor<2x2x8xf32>
      %47 = stablehlo.add %39, %41 : tensor<2x2x8xf32>
      %48 = stablehlo.subtract %31, %c : tensor<i32>
      %49 = stablehlo.maximum %48, %c_6 : tensor<i32>
      %50 = stablehlo.slice %47 [1:2, 0:2, 0:8] : (tensor<2x2x8xf32>) -> tensor<1x2x8xf32>
      %51 = stablehlo.reshape %50 : (tensor<1x2x8xf32>) -> tensor<2x8xf32>
      %52:2 = func.call @dynamic_update_index_in_dim(%iterArg_15, %51, %49) : (tensor<3x2x8xf32>, tensor<2x8xf32>, tensor<i32>) -> (tensor<3x2x8xf32>, tensor<i32>)
      %53 = func.call @dynamic_update_index_in_dim_0(%iterArg_16, %39, %iterArg_13) : (tensor<4x2x2x8xf32>, tensor<2x2x8xf32>, tensor<i32>) -> tensor<4x2x2x8xf32>
      %54 = func.call @dynamic_update_index_in_dim_0(%iterArg_17, %46, %iterArg_13) : (tensor<4x2x2x8xf32>, tensor<2x2x8xf32>, tensor<i32>) -> tensor<4x2x2x8xf32>
      %55 = func.call @dynamic_update_index_in_dim_1(%iterArg_18, %52#1, %iterArg_13) : (tensor<4xi32>, tensor<i32>, tensor<i32>) -> tensor<4xi32>
      %56 = stablehlo.add %iterArg_13, %c : tensor<i32>
      stablehlo.return %iterArg, %iterArg_8, %iterArg_9, %iterArg_10, %iterArg_11, %iterArg_12, %56, %47, %52#0, %53, %54, %55 : tensor<4xi32>, tensor<1xi32>, tensor<3x2x8xf32>, tensor<i32>, tensor<i32>, tensor<2x8x8xf32>, tensor<i32>, tensor<2x2x8xf32>, tensor<3x2x8xf32>, tensor<4x2x2x8xf32>, tensor<4x2x2x8xf32>, tensor<4xi32>
    }
    %17 = stablehlo.reshape %16#8 : (tensor<3x2x8xf32>) -> tensor<6x8xf32>
    %18 = stablehlo.multiply %17, %17 : tensor<6x8xf32>
    %19 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<6x8xf32>
    %20 = stablehlo.multiply %19, %17 : tensor<6x8xf32>
    %21 = stablehlo.reduce(%18 init: %cst_7) applies stablehlo.add across dimensions = [0, 1] : (tensor<6x8xf32>, tensor<f32>) -> tensor<f32>
    %22 = stablehlo.divide %21, %cst : tensor<f32>
    %23 = stablehlo.divide %cst_1, %cst : tensor<f32>
    %24 = stablehlo.broadcast_in_dim %23, dims = [] : (tensor<f32>) -> tensor<6x8xf32>
    %25 = stablehlo.multiply %24, %20 : tensor<6x8xf32>
    %26 = stablehlo.reshape %25 : (tensor<6x8xf32>) -> tensor<3x2x8xf32>
    %27 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<2x2x8xf32>
    %28 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<2x1x8x8xf32>
    %29:9 = stablehlo.while(%iterArg = %16#9, %iterArg_8 = %16#10, %iterArg_9 = %16#11, %iterArg_10 = %11, %iterArg_11 = %12, %iterArg_12 = %c_6, %iterArg_13 = %28, %iterArg_14 = %27, %iterArg_15 = %26) : tensor<4x2x2x8xf32>, tensor<4x2x2x8xf32>, tensor<4xi32>, tensor<1xi32>, tensor<2x8x8xf32>, tensor<i32>, tensor<2x1x8x8xf32>, tensor<2x2x8xf32>, tensor<3x2x8xf32>
    cond {
      %31 = stablehlo.compare LT, %iterArg_12, %c_3, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %31 : tensor<i1>
    } do {
      %31 = stablehlo.subtract %c_3, %iterArg_12 : tensor<i32>
      %32 = stablehlo.subtract %31, %c : tensor<i32>
      %33 = func.call @dynamic_index_in_dim_2(%iterArg, %32) : (tensor<4x2x2x8xf32>, tensor<i32>) -> tensor<2x2x8xf32>
      %34 = func.call @dynamic_index_in_dim_2(%iterArg_8, %32) : (tensor<4x2x2x8xf32>, tensor<i32>) -> tensor<2x2x8xf32>
      %35 = func.call @dynamic_index_in_dim(%iterArg_9, %32) : (tensor<4xi32>, tensor<i32>) -> tensor<i32>
      %36:2 = func.call @dynamic_update_index_in_dim_3(%35, %iterArg_15) : (tensor<i32>, tensor<3x2x8xf32>) -> (tensor<3x2x8xf32>, tensor<2x8xf32>)
      %37 = stablehlo.broadcast_in_dim %36#1, dims = [1, 2] : (tensor<2x8xf32>) -> tensor<1x2x8xf32>
      %38 = stablehlo.pad %37, %cst_7, low = [1, 0, 0], high = [0, 0, 0], interior = [0, 0, 0] : (tensor<1x2x8xf32>, tensor<f32>) -> tensor<2x2x8xf32>
      %39 = stablehlo.add %iterArg_14, %38 : tensor<2x2x8xf32>
      %40 = stablehlo.multiply %39, %34 : tensor<2x2x8xf32>
      %41 = stablehlo.dot_general %40, %33, batching_dims = [0] x [0], contracting_dims = [1] x [1] : (tensor<2x2x8xf32>, tensor<2x2x8xf32>) -> tensor<2x8x8xf32>
      %42 = stablehlo.transpose %41, dims = [0, 2, 1] : (tensor<2x8x8xf32>) -> tensor<2x8x8xf32>
      %43 = stablehlo.dot_general %40, %iterArg_11, batching_dims = [0] x [0], contracting_dims = [2] x [2] : (tensor<2x2x8xf32>, tensor<2x8x8xf32>) -> tensor<2x2x8xf32>
      %44 = stablehlo.add %39, %43 : tensor<2x2x8xf32>
      %45 = stablehlo.broadcast_in_dim %42, dims = [0, 2, 3] : (tensor<2x8x8xf32>) -> tensor<2x1x8x8xf32>
      %46 = stablehlo.add %iterArg_13, %45 : tensor<2x1x8x8xf32>
      %47 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<2x8xf32>
      %48 = "stablehlo.scatter"(%44, %iterArg_10, %47) <{indices_are_sorted = true, scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [0, 1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0]>, unique_indices = true}> ({
      ^bb0(%arg2: tensor<f32>, %arg3: tensor<f32>):
        stablehlo.return %arg3 : tensor<f32>
      }) : (tensor<2x2x8xf32>, tensor<1xi32>, tensor<2x8xf32>) -> tensor<2x2x8xf32>
      %49 = func.call @_roll_static_4(%48) : (tensor<2x2x8xf32>) -> tensor<2x2x8xf32>
      %50 = stablehlo.add %iterArg_12, %c : tensor<i32>
      stablehlo.return %iterArg, %iterArg_8, %iterArg_9, %iterArg_10, %iterArg_11, %50, %46, %49, %36#0 : tensor<4x2x2x8xf32>, tensor<4x2x2x8xf32>, tensor<4xi32>, tensor<1xi32>, tensor<2x8x8xf32>, tensor<i32>, tensor<2x1x8x8xf32>, tensor<2x2x8xf32>, tensor<3x2x8xf32>
    }
    %30 = stablehlo.reshape %29#6 : (tensor<2x1x8x8xf32>) -> tensor<2x8x8xf32>
    return %22, %30 : tensor<f32>, tensor<2x8x8xf32>
  }
  func.func private @dynamic_index_in_dim(%arg0: tensor<4xi32>, %arg1: tensor<i32>) -> tensor<i32> {
    %0 = stablehlo.dynamic_slice %arg0, %arg1, sizes = [1] : (tensor<4xi32>, tensor<i32>) -> tensor<1xi32>
    %1 = stablehlo.reshape %0 : (tensor<1xi32>) -> tensor<i32>
    return %1 : tensor<i32>
  }
  func.func private @_roll_static(%arg0: tensor<2x2x8xf32>) -> tensor<2x2x8xf32> {
    %0 = stablehlo.slice %arg0 [1:2, 0:2, 0:8] : (tensor<2x2x8xf32>) -> tensor<1x2x8xf32>
    %1 = stablehlo.slice %arg0 [0:1, 0:2, 0:8] : (tensor<2x2x8xf32>) -> tensor<1x2x8xf32>
    %2 = stablehlo.concatenate %0, %1, dim = 0 : (tensor<1x2x8xf32>, tensor<1x2x8xf32>) -> tensor<2x2x8xf32>
    return %2 : tensor<2x2x8xf32>
  }
  func.func private @dynamic_update_index_in_dim(%arg0: tensor<3x2x8xf32>, %arg1: tensor<2x8xf32>, %arg2: tensor<i32>) -> (tensor<3x2x8xf32>, tensor<i32>) {
    %c = stablehlo.constant dense<3> : tensor<i32>
    %c_0 = stablehlo.constant dense<0> : tensor<i32>
    %0 = stablehlo.broadcast_in_dim %arg1, dims = [1, 2] : (tensor<2x8xf32>) -> tensor<1x2x8xf32>
    %1 = stablehlo.compare LT, %arg2, %c_0, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %2 = stablehlo.add %arg2, %c : tensor<i32>
    %3 = stablehlo.select %1, %2, %arg2 : tensor<i1>, tensor<i32>
    %4 = stablehlo.dynamic_update_slice %arg0, %0, %3, %c_0, %c_0 : (tensor<3x2x8xf32>, tensor<1x2x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x2x8xf32>
    return %4, %3 : tensor<3x2x8xf32>, tensor<i32>
  }
  func.func private @dynamic_update_index_in_dim_0(%arg0: tensor<4x2x2x8xf32>, %arg1: tensor<2x2x8xf32>, %arg2: tensor<i32>) -> tensor<4x2x2x8xf32> {
    %c = stablehlo.constant dense<0> : tensor<i32>
    %0 = stablehlo.broadcast_in_dim %arg1, dims = [1, 2, 3] : (tensor<2x2x8xf32>) -> tensor<1x2x2x8xf32>
    %1 = stablehlo.dynamic_update_slice %arg0, %0, %arg2, %c, %c, %c : (tensor<4x2x2x8xf32>, tensor<1x2x2x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x2x2x8xf32>
    return %1 : tensor<4x2x2x8xf32>
  }
  func.func private @dynamic_update_index_in_dim_1(%arg0: tensor<4xi32>, %arg1: tensor<i32>, %arg2: tensor<i32>) -> tensor<4xi32> {
    %0 = stablehlo.broadcast_in_dim %arg1, dims = [] : (tensor<i32>) -> tensor<1xi32>
    %1 = stablehlo.dynamic_update_slice %arg0, %0, %arg2 : (tensor<4xi32>, tensor<1xi32>, tensor<i32>) -> tensor<4xi32>
    return %1 : tensor<4xi32>
  }
  func.func private @dynamic_index_in_dim_2(%arg0: tensor<4x2x2x8xf32>, %arg1: tensor<i32>) -> tensor<2x2x8xf32> {
    %c = stablehlo.constant dense<0> : tensor<i32>
    %0 = stablehlo.dynamic_slice %arg0, %arg1, %c, %c, %c, sizes = [1, 2, 2, 8] : (tensor<4x2x2x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x2x8xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x2x2x8xf32>) -> tensor<2x2x8xf32>
    return %1 : tensor<2x2x8xf32>
  }
  func.func private @dynamic_update_index_in_dim_3(%arg0: tensor<i32>, %arg1: tensor<3x2x8xf32>) -> (tensor<3x2x8xf32>, tensor<2x8xf32>) {
    %c = stablehlo.constant dense<0> : tensor<i32>
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<1x2x8xf32>
    %1 = stablehlo.dynamic_update_slice %arg1, %0, %arg0, %c, %c : (tensor<3x2x8xf32>, tensor<1x2x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x2x8xf32>
    %2 = stablehlo.dynamic_slice %arg1, %arg0, %c, %c, sizes = [1, 2, 8] : (tensor<3x2x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x8xf32>
    %3 = stablehlo.reduce(%2 init: %cst) applies stablehlo.add across dimensions = [0] : (tensor<1x2x8xf32>, tensor<f32>) -> tensor<2x8xf32>
    return %1, %3 : tensor<3x2x8xf32>, tensor<2x8xf32>
  }
  func.func private @_roll_static_4(%arg0: tensor<2x2x8xf32>) -> tensor<2x2x8xf32> {
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.slice %arg0 [0:1, 0:2, 0:8] : (tensor<2x2x8xf32>) -> tensor<1x2x8xf32>
    %1 = stablehlo.slice %arg0 [1:2, 0:2, 0:8] : (tensor<2x2x8xf32>) -> tensor<1x2x8xf32>
    %2 = stablehlo.pad %1, %cst, low = [0, 0, 0], high = [1, 0, 0], interior = [0, 0, 0] : (tensor<1x2x8xf32>, tensor<f32>) -> tensor<2x2x8xf32>
    %3 = stablehlo.pad %0, %cst, low = [1, 0, 0], high = [0, 0, 0], interior = [0, 0, 0] : (tensor<1x2x8xf32>, tensor<f32>) -> tensor<2x2x8xf32>
    %4 = stablehlo.add %2, %3 : tensor<2x2x8xf32>
    return %4 : tensor<2x2x8xf32>
  }
}
