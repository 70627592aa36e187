// RUN: stablehlo-tools inspect %s | filecheck %s
// RUN: stablehlo-tools inspect %s --json | python -m json.tool --compact | sed 's/},{/},\n{/g' \
// RUN:   | filecheck %s --check-prefix=JSON

// What the ids in replica_groups count depends on the op, its channel and use_global_device_ids.
// The module runs as 2 replicas of 3 partitions; participant = replica * 3 + partition.

// CHECK: inspect_group_modes.mlir: 8 communicating ops on 2 x 3 (replicas x partitions)
// JSON: "replicas":2,"partitions":3

module attributes {mhlo.num_partitions = 3 : i32, mhlo.num_replicas = 2 : i32} {
  func.func @main(%x: tensor<6xf32>) -> tensor<6xf32> {
    // No channel: replicas, once for each partition.
    // CHECK: all_reduce 3 x 2 {0,3} f32 24 24 add
    // JSON: "kind":"all_reduce","async":false,"group_mode":"cross_replica","groups":{{\[\[0,3],\[1,4],\[2,5]]}},"channel":0,
    %0 = "stablehlo.all_reduce"(%x) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %sum = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %sum : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<6xf32>) -> tensor<6xf32>

    // A channel without global ids: each replica of the group with all its partitions.
    // CHECK: all_reduce {3,0,4,1,5,2} f32 24 24 maximum
    // JSON: "group_mode":"cross_replica_and_partition","groups":{{\[\[3,0,4,1,5,2]]}},"channel":7,
    %1 = "stablehlo.all_reduce"(%0) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %max = stablehlo.maximum %a, %b : tensor<f32>
      stablehlo.return %max : tensor<f32>
    }) {
      channel_handle = #stablehlo.channel_handle<handle = 7, type = 1>,
      replica_groups = dense<[[1, 0]]> : tensor<1x2xi64>
    } : (tensor<6xf32>) -> tensor<6xf32>

    // A channel with global ids: the ids are participants already.
    // CHECK: all_gather 3 x 2 {4,0} f32 24 48 -
    // JSON: "group_mode":"flattened_ids","groups":{{\[\[4,0],\[1,5],\[2,3]]}},"channel":1,
    %2 = "stablehlo.all_gather"(%1) {
      all_gather_dim = 0 : i64,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = dense<[[4, 0], [1, 5], [2, 3]]> : tensor<3x2xi64>,
      use_global_device_ids
    } : (tensor<6xf32>) -> tensor<12xf32>

    // An exchange with a channel: partitions, once for each replica.
    // CHECK: all_to_all 2 x 3 {2,0,1} f32 48 48 -
    // JSON: "group_mode":"cross_partition","groups":{{\[\[2,0,1],\[5,3,4]]}},
    %3 = "stablehlo.all_to_all"(%2) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      concat_dimension = 0 : i64,
      replica_groups = dense<[[2, 0, 1]]> : tensor<1x3xi64>,
      split_count = 3 : i64,
      split_dimension = 0 : i64
    } : (tensor<12xf32>) -> tensor<12xf32>

    // An exchange without a channel: replicas.
    // CHECK: collective_broadcast 3 x 2 {3,0} f32 48 48 -
    // JSON: "group_mode":"cross_replica","groups":{{\[\[3,0],\[4,1],\[5,2]]}},
    %4 = "stablehlo.collective_broadcast"(%3) {
      replica_groups = dense<[[1, 0]]> : tensor<1x2xi64>
    } : (tensor<12xf32>) -> tensor<12xf32>

    // A scatter has the modes of a reduction; a larger region is a custom one.
    // CHECK: reduce_scatter 3 x 2 {0,3} f32 48 24 custom
    // JSON: "kind":"reduce_scatter"{{.*}}"bytes_in":48,"bytes_out":24,"reduction":"custom"
    %5 = "stablehlo.reduce_scatter"(%4) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %sum = stablehlo.add %a, %b : tensor<f32>
      %twice = stablehlo.add %sum, %sum : tensor<f32>
      stablehlo.return %twice : tensor<f32>
    }) {
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
      scatter_dimension = 0 : i64
    } : (tensor<12xf32>) -> tensor<6xf32>

    // Pairs count partitions with a channel, replicas without; one pair is one group.
    // CHECK: collective_permute 4 x 2 {0,1} f32 24 24 -
    // JSON: "group_mode":"cross_partition","groups":{{\[\[0,1],\[3,4],\[1,2],\[4,5]]}},
    %6 = "stablehlo.collective_permute"(%5) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      source_target_pairs = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>
    } : (tensor<6xf32>) -> tensor<6xf32>
    // CHECK: collective_permute 3 x 2 {0,3} f32 24 24 -
    // JSON: "group_mode":"cross_replica","groups":{{\[\[0,3],\[1,4],\[2,5]]}},"channel":0,
    %7 = "stablehlo.collective_permute"(%6) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<6xf32>) -> tensor<6xf32>
    return %7 : tensor<6xf32>
  }
}
