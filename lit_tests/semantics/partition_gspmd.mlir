// XLA's own GSPMD divides the program before; what partition made of it runs after.
// RUN: stablehlo-tools opt %s -p 'partition{choices=shardy}' -o %t.after.mlir
// RUN: filecheck %s --check-prefix=PARTITIONED --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --trials 2 | filecheck %s

// PARTITIONED-NOT: mhlo.sharding
// PARTITIONED: all_reduce
// PARTITIONED: collective_permute
// CHECK: identical in exact arithmetic: 3 outputs, 80 elements

// Axes that are taken for one another are seen.
// RUN: sed 's/devices=\[2,2\]<=\[2,2\]T(1,0)/devices=[2,2]<=[4]/' %s > %t.swapped.mlir
// RUN: stablehlo-tools opt %t.swapped.mlir -p 'partition{choices=shardy}' -o %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --trials 1
module @program attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(
      %x: tensor<8x4xi32> {mhlo.sharding = "{devices=[2,2]<=[4]}"},
      %w: tensor<4x4xi32> {mhlo.sharding = "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}"}
  ) -> (tensor<8x4xi32> {mhlo.sharding = "{devices=[4,1]<=[4]}"}, tensor<8x4xi32>, tensor<4x4xi32> {mhlo.sharding = "{replicated}"}) {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<8x4xi32>, tensor<4x4xi32>) -> tensor<8x4xi32>
    %1 = stablehlo.custom_call @Sharding(%0) {mhlo.sharding = "{devices=[2,2]<=[2,2]T(1,0)}"} : (tensor<8x4xi32>) -> tensor<8x4xi32>
    %2 = stablehlo.custom_call @SPMDFullToShardShape(%1) {mhlo.sharding = "{manual}"} : (tensor<8x4xi32>) -> tensor<4x2xi32>
    %3 = "stablehlo.collective_permute"(%2) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2], [2, 3], [3, 0]]> : tensor<4x2xi64>}> : (tensor<4x2xi32>) -> tensor<4x2xi32>
    %c = stablehlo.constant dense<[[1, 2], [3, 4], [5, 6], [7, 8]]> : tensor<4x2xi32>
    %4 = stablehlo.multiply %3, %c : tensor<4x2xi32>
    %5 = stablehlo.custom_call @SPMDShardToFullShape(%4) {mhlo.sharding = "{devices=[2,2]<=[2,2]T(1,0)}"} : (tensor<4x2xi32>) -> tensor<8x4xi32>
    %6 = stablehlo.add %w, %w : tensor<4x4xi32>
    return %0, %5, %6 : tensor<8x4xi32>, tensor<8x4xi32>, tensor<4x4xi32>
  }
}
