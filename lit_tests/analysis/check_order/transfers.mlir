// A send and its recv are two ops that wait for each other.

// Device 0 sends to 1 and 1 to 2, each after it has received: a pipeline.
// RUN: stablehlo-tools check-order --target none %s | filecheck %s
// RUN: stablehlo-tools check-order --target none %s --strict | filecheck %s --check-prefix=STRICT
// CHECK: ordered: 1 program on devices 0 to 2, 2 collectives
// STRICT: ordered: 3 programs on devices 0 to 2, 6 collectives

// Both send before they receive.
// RUN: not stablehlo-tools check-order --target none %S/Inputs/head_to_head.mlir > %t.out
// RUN: filecheck %s --check-prefix=HEADS < %t.out
// HEADS: may-deadlock: the programs issue send at {{.*}}head_to_head.mlir:[[SEND:[0-9:]+]] and send at {{.*}}head_to_head.mlir:[[SEND]] in conflicting orders
// HEADS-NEXT: device 0  waits in send  for device 1  at {{.*}}
// HEADS-NEXT: device 1  waits in send  for device 0  at {{.*}}

// A send without its recv.
// RUN: sed 's/\[\[0, 1\], \[1, 2\]\]> : tensor<2x2xi64>} : (!stable/[[0, 1]]> : tensor<1x2xi64>} : (!stable/' %s > %t.alone.mlir
// RUN: not stablehlo-tools check-order --target none %t.alone.mlir > %t.out
// RUN: filecheck %s --check-prefix=ALONE < %t.out
// ALONE: mismatch: device 1 issues send tensor<2xf32> channel 7 ({{.*}}alone.mlir:{{.*}}); device 2 has no recv for it ({{.*}}alone.mlir)
module attributes {mhlo.num_replicas = 1 : i32, mhlo.num_partitions = 3 : i32} {
  func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
    %tok = stablehlo.create_token : !stablehlo.token
    %r:2 = "stablehlo.recv"(%tok) {channel_handle = #stablehlo.channel_handle<handle = 7, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>} : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
    %y = stablehlo.add %r#0, %x : tensor<2xf32>
    %sent = "stablehlo.send"(%y, %r#1) {channel_handle = #stablehlo.channel_handle<handle = 7, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>} : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token
    return %y : tensor<2xf32>
  }
}
