// RUN: stablehlo-tools opt %s -p constrain-batch | filecheck %s
// RUN: stablehlo-tools opt %s -p 'constrain-batch{explain}' 2>&1 >/dev/null | filecheck %s --check-prefix=EXPLAIN

// A decode step: the tokens come in and go out with one type, and are still the samples. The model's
// width, dimension 1, is none.
// CHECK-LABEL: func.func @main
// CHECK: stablehlo.while(%{{.+}} = %{{.+}}, %{{.+}} = %arg1, %[[H:.+]] = %{{.+}})
// CHECK: do {
// CHECK-NEXT: sdy.sharding_constraint %[[H]] <@mesh, [{"data"}, {?}]> : tensor<8x4xf32>
// EXPLAIN: note: constrain-batch: dimension 0 of the 8x4 that this loop carries is the batch, and stays divided over {"data"}
module attributes {mhlo.num_partitions = 2 : i32} {
  sdy.mesh @mesh = <["data"=2]>
  func.func @main(%tokens: tensor<8xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}]>}, %w: tensor<3x4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}) -> tensor<8xi32> {
    %c0 = stablehlo.constant dense<0> : tensor<i32>
    %c1 = stablehlo.constant dense<1> : tensor<i32>
    %c3 = stablehlo.constant dense<3> : tensor<i32>
    %f0 = stablehlo.constant dense<0.0> : tensor<f32>
    %as = stablehlo.convert %tokens : (tensor<8xi32>) -> tensor<8xf32>
    %x = stablehlo.broadcast_in_dim %as, dims = [0] : (tensor<8xf32>) -> tensor<8x4xf32>
    %r:3 = stablehlo.while(%i = %c0, %ws = %w, %h = %x) : tensor<i32>, tensor<3x4x4xf32>, tensor<8x4xf32>
    cond {
      %more = stablehlo.compare LT, %i, %c3 : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    } do {
      %row = stablehlo.dynamic_slice %ws, %i, %c0, %c0, sizes = [1, 4, 4] : (tensor<3x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
      %one = stablehlo.reshape %row : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
      %next = stablehlo.dot_general %h, %one, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
      %j = stablehlo.add %i, %c1 : tensor<i32>
      stablehlo.return %j, %ws, %next : tensor<i32>, tensor<3x4x4xf32>, tensor<8x4xf32>
    }
    %sum = stablehlo.reduce(%r#2 init: %f0) applies stablehlo.add across dimensions = [1] : (tensor<8x4xf32>, tensor<f32>) -> tensor<8xf32>
    %next = stablehlo.convert %sum : (tensor<8xf32>) -> tensor<8xi32>
    return %next : tensor<8xi32>
  }
}
