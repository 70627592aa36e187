// RUN: stablehlo-tools inspect %s | filecheck %s
// RUN: stablehlo-tools inspect %s --json | python -m json.tool --compact | sed 's/},{/},\n{/g' \
// RUN:   | filecheck %s --check-prefix=JSON

// What is no collective but communicates all the same, and async pairs.

// CHECK: 8 communicating ops on 1 x 2 (replicas x partitions)
// CHECK-NEXT: # kind groups type bytes in bytes out reduction place
module attributes {mhlo.num_partitions = 2 : i32} {
  func.func @main(%x: tensor<2xf32>, %token: !stablehlo.token) -> tensor<2xf32> {
    // A transfer between devices has pairs; tokens have no bytes.
    // CHECK-NEXT: 0 send {0,1} f32 8 0 -
    // JSON: {"kind":"send","async":false,"group_mode":null,"groups":{{\[\[0,1]]}},"channel":5,
    %0 = "stablehlo.send"(%x, %token) {
      channel_handle = #stablehlo.channel_handle<handle = 5, type = 1>,
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token

    // A receiving op has the type of what it gives.
    // CHECK-NEXT: 1 recv {0,1} f32 0 8 -
    %1:2 = "stablehlo.recv"(%0) {
      channel_handle = #stablehlo.channel_handle<handle = 5, type = 1>,
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)

    // A transfer to the host has no pairs.
    // CHECK-NEXT: 2 send - f32 8 0 -
    // JSON: {"kind":"send","async":false,"group_mode":null,"groups":null,"channel":6,
    %2 = "stablehlo.send"(%x, %1#1) {
      channel_handle = #stablehlo.channel_handle<handle = 6, type = 2>,
      is_host_transfer = true
    } : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token

    // CHECK-NEXT: 3 infeed - i32 0 12 -
    %3:2 = "stablehlo.infeed"(%2) {
      infeed_config = "", layout = [[0]]
    } : (!stablehlo.token) -> (tensor<3xi32>, !stablehlo.token)

    // CHECK-NEXT: 4 outfeed - i32 12 0 -
    %4 = "stablehlo.outfeed"(%3#0, %3#1) {
      outfeed_config = ""
    } : (tensor<3xi32>, !stablehlo.token) -> !stablehlo.token

    // Whom a custom call talks to is not known.
    // CHECK-NEXT: 5 custom_call - f32 8 8 -
    %5 = stablehlo.custom_call @exchange(%1#0) {has_side_effect = true} : (tensor<2xf32>) -> tensor<2xf32>

    // A custom call that only annotates is left out.
    %6 = stablehlo.custom_call @Sharding(%5) {has_side_effect = true} : (tensor<2xf32>) -> tensor<2xf32>

    // An async pair is listed once, at its start, with what is inside of it.
    // CHECK-NEXT: 6 async all_reduce {0,1} f32 8 8 maximum
    // JSON: {"kind":"all_reduce","async":true,"group_mode":"flattened_ids","groups":{{\[\[0,1]]}},"channel":9,
    %7 = "stablehlo.async_start"(%6) ({
    ^bb0(%a: tensor<2xf32>):
      %9 = "stablehlo.all_reduce"(%a) ({
      ^bb0(%b: tensor<f32>, %c: tensor<f32>):
        %max = stablehlo.maximum %b, %c : tensor<f32>
        stablehlo.return %max : tensor<f32>
      }) {
        channel_handle = #stablehlo.channel_handle<handle = 9, type = 1>,
        replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
        use_global_device_ids
      } : (tensor<2xf32>) -> tensor<2xf32>
      stablehlo.return %9 : tensor<2xf32>
    }) : (tensor<2xf32>) -> !stablehlo.future<tensor<2xf32>>
    %8 = "stablehlo.async_done"(%7) : (!stablehlo.future<tensor<2xf32>>) -> tensor<2xf32>

    // The old name of an all_reduce that adds.
    // CHECK-NEXT: 7 cross-replica-sum 2 x 1 {0} f32 8 8 add
    %10 = "stablehlo.cross-replica-sum"(%8) {
      replica_groups = dense<[[0]]> : tensor<1x1xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    return %10 : tensor<2xf32>
  }
}
