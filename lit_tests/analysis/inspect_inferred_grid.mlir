// RUN: stablehlo-tools inspect %s | filecheck %s

// A module that says nothing of its replicas and partitions runs on those that it names.

// CHECK: 3 communicating ops on 4 x 3 (replicas x partitions)
func.func @main(%x: tensor<6xf32>) -> tensor<6xf32> {
  // Replicas 0 to 3, in each of the three partitions.
  // CHECK: collective_broadcast 6 x 2 {0,9}
  %0 = "stablehlo.collective_broadcast"(%x) {
    replica_groups = dense<[[0, 3], [1, 2]]> : tensor<2x2xi64>
  } : (tensor<6xf32>) -> tensor<6xf32>

  // Partitions 0 to 2, in each of the four replicas.
  // CHECK: collective_permute 4 x 2 {0,2}
  %1 = "stablehlo.collective_permute"(%0) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
    source_target_pairs = dense<[[0, 2]]> : tensor<1x2xi64>
  } : (tensor<6xf32>) -> tensor<6xf32>

  // Nothing is said of its processes: all of them.
  // CHECK: all_reduce 3 x 4 {0,3,6,9}
  %2 = "stablehlo.all_reduce"(%1) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %sum = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %sum : tensor<f32>
  }) {replica_groups = dense<> : tensor<0x0xi64>} : (tensor<6xf32>) -> tensor<6xf32>
  return %2 : tensor<6xf32>
}
