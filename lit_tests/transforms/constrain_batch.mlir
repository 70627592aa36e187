// RUN: stablehlo-tools opt %s -p constrain-batch --split-input-file | filecheck %s
// RUN: stablehlo-tools opt %s -p 'constrain-batch{explain}' --split-input-file 2>&1 >/dev/null | filecheck %s --check-prefix=EXPLAIN

// Weights and the batch are divided along one axis: what the loop carries stays divided by the batch.
// The counter, the stack of weights, and what is only read, do not.
// CHECK-LABEL: func.func @main
// CHECK: stablehlo.while(%[[I:.+]] = %{{.+}}, %[[W:.+]] = %arg1, %[[H:.+]] = %arg0)
// CHECK: do {
// CHECK-NEXT: %[[KEPT:.+]] = sdy.sharding_constraint %[[H]] <@mesh, [{"data"}, {?}]> : tensor<8x4xf32>
// CHECK-NOT: sharding_constraint
// CHECK: stablehlo.dot_general %[[KEPT]],
// EXPLAIN: note: constrain-batch: dimension 0 of the 8x4 that this loop carries is the batch, and stays divided over {"data"}
module attributes {mhlo.num_partitions = 2 : i32} {
  sdy.mesh @mesh = <["data"=2]>
  func.func @main(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}, %w: tensor<3x4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}) -> tensor<3x4x4xf32> {
    %c0 = stablehlo.constant dense<0> : tensor<i32>
    %c1 = stablehlo.constant dense<1> : tensor<i32>
    %c3 = stablehlo.constant dense<3> : tensor<i32>
    %r:3 = stablehlo.while(%i = %c0, %ws = %w, %h = %x) : tensor<i32>, tensor<3x4x4xf32>, tensor<8x4xf32>
    cond {
      %more = stablehlo.compare LT, %i, %c3 : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    } do {
      %row = stablehlo.dynamic_slice %ws, %i, %c0, %c0, sizes = [1, 4, 4] : (tensor<3x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
      %one = stablehlo.reshape %row : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
      %next = func.call @layer(%h, %one) : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
      %j = stablehlo.add %i, %c1 : tensor<i32>
      stablehlo.return %j, %ws, %next : tensor<i32>, tensor<3x4x4xf32>, tensor<8x4xf32>
    }
    %gram = stablehlo.dot_general %r#2, %r#2, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %all = stablehlo.broadcast_in_dim %gram, dims = [1, 2] : (tensor<4x4xf32>) -> tensor<3x4x4xf32>
    return %all : tensor<3x4x4xf32>
  }
  func.func private @layer(%h: tensor<8x4xf32>, %w: tensor<4x4xf32>) -> tensor<8x4xf32> {
    %0 = stablehlo.dot_general %h, %w, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    return %0 : tensor<8x4xf32>
  }
}
