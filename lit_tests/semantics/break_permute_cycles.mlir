// RUN: stablehlo-tools opt %s -p break-permute-cycles -o %t.after.mlir
// RUN: filecheck %s --check-prefix=BROKEN --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --backend interpreter | filecheck %s

// Two permutes and a select give what the ring gave, bit for bit: in a loop, where a device keeps its
// own, and of replicas.
// BROKEN-COUNT-2: "stablehlo.collective_permute"
// BROKEN: stablehlo.select
// CHECK: same: 3 outputs, 36 elements, bitwise

// The other device's choice is seen.
// RUN: sed 's/compare EQ/compare NE/' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --backend interpreter --trials 1 \
// RUN:   | filecheck %s --check-prefix=DIFFERS
// DIFFERS: differs: output 0,
module @semantics attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4x2xf32>, %h: tensor<2xi8>) -> (tensor<4x2xf32>, tensor<4x2xf32>, tensor<2xi8>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %w:2 = stablehlo.while(%i = %zero, %p = %x) : tensor<i32>, tensor<4x2xf32>
  cond {
    %c = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %j = stablehlo.add %i, %one : tensor<i32>
    %y = "stablehlo.collective_permute"(%p) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>} : (tensor<4x2xf32>) -> tensor<4x2xf32>
    %s = stablehlo.add %y, %x : tensor<4x2xf32>
    stablehlo.return %j, %s : tensor<i32>, tensor<4x2xf32>
  }
  %o = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[1, 1]]> : tensor<1x2xi64>} : (tensor<4x2xf32>) -> tensor<4x2xf32>
  %r = "stablehlo.collective_permute"(%h) {source_target_pairs = dense<[[0, 0]]> : tensor<1x2xi64>} : (tensor<2xi8>) -> tensor<2xi8>
  return %w#1, %o, %r : tensor<4x2xf32>, tensor<4x2xf32>, tensor<2xi8>
}
}
