// RUN: stablehlo-tools opt %s -p split-batch --split-input-file 2>%t.warnings | filecheck %s
// RUN: filecheck %s --check-prefix=WARNED --input-file %t.warnings
// WARNED-COUNT-2: warning: split-batch: no collective carries a batch that could be split, so the program stays whole; naming `arguments`

// Data parallelism: only sums over the batch are sent.
// CHECK-LABEL: func.func @gradient
// CHECK-NEXT: stablehlo.dot_general %{{.+}}, contracting_dims = [0] x [0]
// CHECK-NEXT: stablehlo.all_reduce
// CHECK-NOT: stablehlo.slice
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @gradient(%x: tensor<4x5xf32>, %y: tensor<4x3xf32>) -> tensor<5x3xf32> {
  %0 = stablehlo.dot_general %x, %y, contracting_dims = [0] x [0] : (tensor<4x5xf32>, tensor<4x3xf32>) -> tensor<5x3xf32>
  %1 = "stablehlo.all_reduce"(%0) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids} : (tensor<5x3xf32>) -> tensor<5x3xf32>
  return %1 : tensor<5x3xf32>
}
}

// -----

// The call of a function stays where nothing is split.
// CHECK-LABEL: func.func @main
// CHECK: call @partial
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4x5xf32>) -> tensor<5xf32> {
  %0 = call @partial(%x) : (tensor<4x5xf32>) -> tensor<5xf32>
  %1 = "stablehlo.collective_permute"(%0) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<5xf32>) -> tensor<5xf32>
  return %1 : tensor<5xf32>
}
func.func private @partial(%x: tensor<4x5xf32>) -> tensor<5xf32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4x5xf32>, tensor<f32>) -> tensor<5xf32>
  return %0 : tensor<5xf32>
}
}
