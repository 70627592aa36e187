// A loop that runs as often as an argument says.

// RUN: not stablehlo-tools check-order --target none %s > %t.out
// RUN: filecheck %s < %t.out
// CHECK: may-deadlock: all_gather at {{.*}} is inside a while loop at {{.*}}, and the trip count may differ between its participants 0 and 1

// RUN: sed 's/%n: tensor<i32>/%n: tensor<i32> {mhlo.sharding = "{replicated}"}/' %s > %t.alike.mlir
// RUN: stablehlo-tools check-order --target none %t.alike.mlir | filecheck %s --check-prefix=ALIKE
// ALIKE: ordered: 1 program on devices 0 and 1, 1 collective
// RUN: not stablehlo-tools check-order --target none %t.alike.mlir %t.alike.mlir > %t.out
// RUN: filecheck %s --check-prefix=APART < %t.out
// APART: may-deadlock: the while loop at {{.*}} communicates with {{.*}}, and the trip count is decided at run time

// As often as the device's number says.
// RUN: sed 's/%i = %zero, %end = %n/%i = %zero, %end = %id/' %s > %t.id.mlir
// RUN: not stablehlo-tools check-order --target none %t.id.mlir > %t.out
// RUN: filecheck %s --check-prefix=ID < %t.out
// ID: may-deadlock: all_gather at {{.*}} and the trip count differs between its participants 0 and 1
// ID-NEXT: device 0 {{.*}}0
// ID-NEXT: device 1 {{.*}}1
module attributes {mhlo.num_replicas = 1 : i32, mhlo.num_partitions = 2 : i32} {
  func.func @main(%x: tensor<2xf32>, %n: tensor<i32>) -> tensor<2xf32> {
    %number = stablehlo.partition_id : tensor<ui32>
    %id = stablehlo.convert %number : (tensor<ui32>) -> tensor<i32>
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %w:3 = stablehlo.while(%i = %zero, %end = %n, %v = %x)
        : tensor<i32>, tensor<i32>, tensor<2xf32> cond {
      %c = stablehlo.compare LT, %i, %end : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %one = stablehlo.constant dense<1> : tensor<i32>
      %next = stablehlo.add %i, %one : tensor<i32>
      %g = "stablehlo.all_gather"(%v) {
        all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, use_global_device_ids
      } : (tensor<2xf32>) -> tensor<4xf32>
      %half = stablehlo.slice %g [1:3] : (tensor<4xf32>) -> tensor<2xf32>
      stablehlo.return %next, %end, %half : tensor<i32>, tensor<i32>, tensor<2xf32>
    }
    return %w#2 : tensor<2xf32>
  }
}
