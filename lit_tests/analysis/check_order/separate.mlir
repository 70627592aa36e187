// Programs with devices of their own, two each: they meet by the channels of their transfers.

// RUN: stablehlo-tools check-order --target none --separate %s %S/Inputs/receiver.mlir | filecheck %s
// CHECK: ordered: 2 programs on devices 0 to 3, 4 collectives

// Without, each runs on one of the two devices, and the groups are of both.
// RUN: not stablehlo-tools check-order --target none %s %S/Inputs/receiver.mlir > %t.out
// RUN: filecheck %s --check-prefix=TOGETHER < %t.out
// TOGETHER: may-deadlock: the programs issue all_reduce at {{.*}}separate.mlir:{{.*}} and recv at {{.*}}receiver.mlir:{{.*}} in conflicting orders

// A channel that nobody receives on; one that two programs send on.
// RUN: not stablehlo-tools check-order --target none --separate %s > %t.out
// RUN: filecheck %s --check-prefix=NOBODY < %t.out
// NOBODY: mismatch: send on channel 3 at {{.*}}separate.mlir:{{.*}}: no program has the recv
// RUN: not stablehlo-tools check-order --target none --separate %s %s %S/Inputs/receiver.mlir > %t.out
// RUN: filecheck %s --check-prefix=TWO < %t.out
// TWO: mismatch: {{.*}}channel 3

// More devices on one end than on the other.
// RUN: sed 's/num_partitions = 2/num_partitions = 4/; s/\[\[0, 1\]\]> : tensor<1x2xi64>/[[0, 1, 2, 3]]> : tensor<1x4xi64>/' %S/Inputs/receiver.mlir > %t.wide.mlir
// RUN: not stablehlo-tools check-order --target none --separate %s %t.wide.mlir > %t.out
// RUN: filecheck %s --check-prefix=WIDE < %t.out
// WIDE: mismatch: {{.*}}2 devices{{.*}}4
module attributes {mhlo.num_replicas = 1 : i32, mhlo.num_partitions = 2 : i32} {
  func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
    %r = "stablehlo.all_reduce"(%x) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, use_global_device_ids,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    %tok = stablehlo.create_token : !stablehlo.token
    %sent = "stablehlo.send"(%r, %tok) {
      channel_handle = #stablehlo.channel_handle<handle = 3, type = 1>
    } : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token
    return %r : tensor<2xf32>
  }
}
