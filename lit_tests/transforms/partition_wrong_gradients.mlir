// XLA's partitioner adds up the gradient of a grouped convolution once for each device that computes the same: jax runs the
// export wrongly, and `partition` does not.

// RUN: stablehlo-tools opt %s -p partition --split-input-file 2>&1 >/dev/null | filecheck %s --check-prefix=WARN
// RUN: stablehlo-tools opt %s -p 'partition{partitioner=xla}' 2>&1 --split-input-file >/dev/null | filecheck %s --check-prefix=XLA --allow-empty

// WARN: warning: jax computes this gradient of a grouped convolution wrongly, 2 times as large, because XLA's partitioner does
// WARN-NOT: wrongly
// XLA-NOT: wrongly
module attributes {mhlo.num_partitions = 8 : i32} {
  sdy.mesh @mesh = <["data"=4, "model"=2]>
  func.func public @main(%x: tensor<8x6x6x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}, {}, {}]>}, %g: tensor<8x6x6x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}, {}, {}]>}) -> tensor<3x3x2x4xf32> {
    %w = stablehlo.convolution(%x, %g) dim_numbers = [f, 0, 1, b]x[i, 0, 1, o]->[0, 1, b, f], window = {pad = [[1, 1], [1, 1]]} {batch_group_count = 2 : i64, feature_group_count = 1 : i64} : (tensor<8x6x6x4xf32>, tensor<8x6x6x4xf32>) -> tensor<3x3x2x4xf32>
    return %w : tensor<3x3x2x4xf32>
  }
}

// -----

// All axes divide the batch: XLA's partitioner is right.
module attributes {mhlo.num_partitions = 8 : i32} {
  sdy.mesh @mesh = <["data"=4, "model"=2]>
  func.func public @main(%x: tensor<8x6x6x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data", "model"}, {}, {}, {}]>}, %g: tensor<8x6x6x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data", "model"}, {}, {}, {}]>}) -> tensor<3x3x2x4xf32> {
    %w = stablehlo.convolution(%x, %g) dim_numbers = [f, 0, 1, b]x[i, 0, 1, o]->[0, 1, b, f], window = {pad = [[1, 1], [1, 1]]} {batch_group_count = 2 : i64, feature_group_count = 1 : i64} : (tensor<8x6x6x4xf32>, tensor<8x6x6x4xf32>) -> tensor<3x3x2x4xf32>
    return %w : tensor<3x3x2x4xf32>
  }
}
