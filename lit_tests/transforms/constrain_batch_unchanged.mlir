// What is to stay as it is, and that a second run changes nothing.
// RUN: stablehlo-tools opt %s -p constrain-batch --split-input-file > %t.once.mlir
// RUN: stablehlo-tools opt %s --split-input-file | diff - %t.once.mlir
// RUN: stablehlo-tools opt %S/constrain_batch.mlir -p constrain-batch > %t.first.mlir
// RUN: stablehlo-tools opt %t.first.mlir -p constrain-batch | diff %t.first.mlir -

// The user has said how the carry is divided.
module attributes {mhlo.num_partitions = 2 : i32} {
  sdy.mesh @mesh = <["data"=2]>
  func.func @main(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}, %w: tensor<4x4xf32>) -> tensor<4x4xf32> {
    %c0 = stablehlo.constant dense<0> : tensor<i32>
    %c1 = stablehlo.constant dense<1> : tensor<i32>
    %c3 = stablehlo.constant dense<3> : tensor<i32>
    %r:2 = stablehlo.while(%i = %c0, %h = %x) : tensor<i32>, tensor<8x4xf32>
    cond {
      %more = stablehlo.compare LT, %i, %c3 : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    } do {
      %k = sdy.sharding_constraint %h <@mesh, [{}, {"data"}]> : tensor<8x4xf32>
      %next = stablehlo.dot_general %k, %w, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
      %j = stablehlo.add %i, %c1 : tensor<i32>
      stablehlo.return %j, %next : tensor<i32>, tensor<8x4xf32>
    }
    %gram = stablehlo.dot_general %r#1, %r#1, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    return %gram : tensor<4x4xf32>
  }
}

// -----

// No argument is divided that is not given back: nothing says what the batch is.
module attributes {mhlo.num_partitions = 2 : i32} {
  sdy.mesh @mesh = <["data"=2]>
  func.func @main(%x: tensor<8x4xf32>, %w: tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) -> tensor<4x4xf32> {
    %c0 = stablehlo.constant dense<0> : tensor<i32>
    %c1 = stablehlo.constant dense<1> : tensor<i32>
    %c3 = stablehlo.constant dense<3> : tensor<i32>
    %r:2 = stablehlo.while(%i = %c0, %h = %x) : tensor<i32>, tensor<8x4xf32>
    cond {
      %more = stablehlo.compare LT, %i, %c3 : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    } do {
      %next = stablehlo.dot_general %h, %w, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
      %j = stablehlo.add %i, %c1 : tensor<i32>
      stablehlo.return %j, %next : tensor<i32>, tensor<8x4xf32>
    }
    %gram = stablehlo.dot_general %r#1, %r#1, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    return %gram : tensor<4x4xf32>
  }
}
