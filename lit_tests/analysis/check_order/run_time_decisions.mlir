// A branch that is decided while the program runs, by the first element of %decides.

// Of a sum over all four participants: they decide alike, whoever compiles them.
// RUN: stablehlo-tools check-order --target none %s | filecheck %s
// RUN: stablehlo-tools check-order --target none %s %s %s %s | filecheck %s --check-prefix=APART
// CHECK: ordered: 1 program on devices 0 to 3, 2 collectives
// APART: ordered: 4 programs on devices 0 to 3, 8 collectives

// Of a sum over two of them: the others may decide otherwise.
// RUN: sed '/of the sum/s/\[\[0, 1, 2, 3\]\]> : tensor<1x4xi64>/[[0, 1], [2, 3]]> : tensor<2x2xi64>/' %s > %t.part.mlir
// RUN: not stablehlo-tools check-order --target none %t.part.mlir > %t.out
// RUN: filecheck %s --check-prefix=PART < %t.out
// PART: may-deadlock: all_gather at {{.*}}part.mlir:{{.*}} is inside a branch at {{.*}}part.mlir:{{.*}}, and the branch to take may differ between its participants 0 and 2
// PART-NEXT: nothing shows that device 0 and device 2 decide the same way
// PART: not replayed

// Of an argument: each device has its own, but for one that is said to be replicated.
// RUN: sed 's/slice %reduced/slice %x/' %s > %t.own.mlir
// RUN: not stablehlo-tools check-order --target none %t.own.mlir > %t.out
// RUN: filecheck %s --check-prefix=OWN < %t.out
// RUN: sed 's/slice %reduced/slice %x/; s/%x: tensor<4xf32>/%x: tensor<4xf32> {mhlo.sharding = "{replicated}"}/' %s > %t.alike.mlir
// RUN: stablehlo-tools check-order --target none %t.alike.mlir | filecheck %s
// OWN: may-deadlock: all_gather at {{.*}} the branch to take may differ between its participants 0 and 1

// But programs compiled apart may be given other arguments, replicated or not.
// RUN: not stablehlo-tools check-order --target none %t.alike.mlir %t.alike.mlir > %t.out
// RUN: filecheck %s --check-prefix=FOREIGN < %t.out
// RUN: not stablehlo-tools check-order --target none %t.alike.mlir %t.alike.mlir --json | filecheck %s --check-prefix=RULE
// FOREIGN: may-deadlock: the branch at {{.*}}alike.mlir:{{.*}} communicates with {{.*}}alike.mlir, and the branch to take is decided at run time
// RULE: "rule": "decided-at-run-time"

// Unless the caller says that the argument has one value on all devices.
// RUN: stablehlo-tools check-order --target none %t.alike.mlir %t.alike.mlir --equal 0 | filecheck %s --check-prefix=EQUAL
// RUN: stablehlo-tools check-order --target none %t.own.mlir %t.own.mlir --equal 0:0 --equal 1:0 | filecheck %s --check-prefix=EQUAL
// RUN: not stablehlo-tools check-order --target none %t.own.mlir %t.own.mlir --equal 0:0 | filecheck %s --check-prefix=ONE
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools check-order --target none %t.own.mlir %t.own.mlir --equal 4 | filecheck %s --check-prefix=ABSENT
// EQUAL: ordered: 2 programs on devices 0 to 3, 4 collectives
// ONE: may-deadlock: all_gather at {{.*}} the branch to take may differ between its participants 2 and 3
// ABSENT: --equal 4: none of the program's 1 arguments is '4'
module attributes {mhlo.num_replicas = 1 : i32, mhlo.num_partitions = 4 : i32} {
  func.func @main(%x: tensor<4xf32>) -> tensor<16xf32> {
    %reduced = "stablehlo.all_reduce"(%x) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, use_global_device_ids,
      replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64> // of the sum
    } : (tensor<4xf32>) -> tensor<4xf32>
    %first = stablehlo.slice %reduced [0:1] : (tensor<4xf32>) -> tensor<1xf32>
    %decides = stablehlo.reshape %first : (tensor<1xf32>) -> tensor<f32>
    %limit = stablehlo.constant dense<1.0> : tensor<f32>
    %large = stablehlo.compare GT, %decides, %limit : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %y = "stablehlo.if"(%large) ({
      %g = "stablehlo.all_gather"(%reduced) {
        all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>,
        channel_handle = #stablehlo.channel_handle<handle = 2, type = 0>, use_global_device_ids
      } : (tensor<4xf32>) -> tensor<16xf32>
      stablehlo.return %g : tensor<16xf32>
    }, {
      %z = stablehlo.constant dense<0.0> : tensor<16xf32>
      stablehlo.return %z : tensor<16xf32>
    }) : (tensor<i1>) -> tensor<16xf32>
    return %y : tensor<16xf32>
  }
}
