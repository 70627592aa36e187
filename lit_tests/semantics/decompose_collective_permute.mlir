// RUN: stablehlo-tools opt %s -p break-permute-cycles,decompose-collective-permute -o %t.after.mlir
// RUN: not grep collective_permute %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --backend interpreter | filecheck %s

// Sends and recvs give what the permutes gave, bit for bit, in and around a loop: zeros to those that
// no pair names, as on XLA:GPU.
// CHECK: same: 4 outputs, 54 elements, bitwise

// Another's data is seen.
// RUN: sed 's/stablehlo.subtract %\([^,]*\), %\([^ ]*\)/stablehlo.subtract %\2, %\1/' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --backend interpreter --trials 1 \
// RUN:   | filecheck %s --check-prefix=DIFFERS
// DIFFERS: differs: output 1,
module @semantics attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func private @inner(%a: tensor<4x2xf32>) -> tensor<4x2xf32> {
  %q = "stablehlo.collective_permute"(%a) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[1, 0]]> : tensor<1x2xi64>}> : (tensor<4x2xf32>) -> tensor<4x2xf32>
  return %q : tensor<4x2xf32>
}
func.func @main(%x: tensor<4x2xf32>, %h: tensor<3xi8>) -> (tensor<4x2xf32>, tensor<4x2xf32>, tensor<3xi8>, tensor<4x2xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %a = "stablehlo.collective_permute"(%x) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}> : (tensor<4x2xf32>) -> tensor<4x2xf32>
  %w:3 = stablehlo.while(%i = %zero, %p = %x, %q = %a) : tensor<i32>, tensor<4x2xf32>, tensor<4x2xf32>
  cond {
    %c = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %j = stablehlo.add %i, %one : tensor<i32>
    %f = "stablehlo.collective_permute"(%p) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}> : (tensor<4x2xf32>) -> tensor<4x2xf32>
    %b = func.call @inner(%q) : (tensor<4x2xf32>) -> tensor<4x2xf32>
    %g = stablehlo.add %f, %x : tensor<4x2xf32>
    %m = stablehlo.subtract %b, %x : tensor<4x2xf32>
    stablehlo.return %j, %g, %m : tensor<i32>, tensor<4x2xf32>, tensor<4x2xf32>
  }
  %r = "stablehlo.collective_permute"(%h) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>}> : (tensor<3xi8>) -> tensor<3xi8>
  %u = "stablehlo.all_reduce"(%w#1) ({
  ^bb0(%l: tensor<f32>, %n: tensor<f32>):
    %t = stablehlo.add %l, %n : tensor<f32>
    stablehlo.return %t : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<4x2xf32>
  return %w#1, %w#2, %r, %u : tensor<4x2xf32>, tensor<4x2xf32>, tensor<3xi8>, tensor<4x2xf32>
}
}
