// Through calls and composites, which `verify` inlines for the reference interpreter.
// RUN: stablehlo-tools opt %s -p 'thread-tokens{form=composite}' -o %t.mlir
// RUN: filecheck %s --check-prefix=THREADED < %t.mlir
// RUN: stablehlo-tools verify %s %t.mlir --backend both --trials 1 | filecheck %s

// Values through calls and a composite of the user's, each of a function that communicates.
// CHECK: same: 2 outputs, 8 elements, bitwise
// THREADED: call @exchange(
// THREADED: stablehlo.composite "user.sum"
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  func.func @main(%x: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) {
    %0 = call @exchange(%x) : (tensor<2xf32>) -> tensor<2xf32>
    %1 = stablehlo.composite "user.sum" %0 {decomposition = @sum} : (tensor<2xf32>) -> tensor<2xf32>
    %2 = call @exchange(%1) : (tensor<2xf32>) -> tensor<2xf32>
    return %0, %2 : tensor<2xf32>, tensor<2xf32>
  }

  func.func private @exchange(%x: tensor<2xf32>) -> tensor<2xf32> {
    %0 = "stablehlo.collective_permute"(%x) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    return %0 : tensor<2xf32>
  }

  func.func private @sum(%x: tensor<2xf32>) -> tensor<2xf32> {
    %0 = call @exchange(%x) : (tensor<2xf32>) -> tensor<2xf32>
    %1 = stablehlo.add %0, %x : tensor<2xf32>
    return %1 : tensor<2xf32>
  }
}
