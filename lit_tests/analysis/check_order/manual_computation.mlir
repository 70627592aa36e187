// Along "y" all devices hold the same of what decides; a group along "y" decides alike.

// RUN: stablehlo-tools check-order --target none %s | filecheck %s
// CHECK: ordered: 1 program on devices 0 to 3, 1 collective
// RUN: sed 's/#stablehlo.axis_ref<name = "y">/#stablehlo.axis_ref<name = "x">/' %s > %t.x.mlir
// RUN: not stablehlo-tools check-order --target none %t.x.mlir > %t.out
// RUN: filecheck %s --check-prefix=DIVIDED < %t.out
// DIVIDED: may-deadlock: all_gather at {{.*}}x.mlir:{{.*}} is inside a branch at {{.*}}, and the branch to take may differ between its participants 0 and 2
// RUN: sed 's/<@mesh, \[{"x"}\]>, <@mesh, \[{"x", "y"}\]>/<@mesh, [{}]>, <@mesh, [{"x", "y"}]>/; s/%own: tensor<1xi1>/%own: tensor<2xi1>/; s/slice %own \[0:1\] : (tensor<1xi1>)/slice %own [0:1] : (tensor<2xi1>)/' %t.x.mlir > %t.alike.mlir
// RUN: stablehlo-tools check-order --target none %t.alike.mlir | filecheck %s

// The devices of another mesh stand in another order: its first axis is the second of this one.
// RUN: sed 's/mesh = @mesh, axes/mesh = @turned, axes/; s/"x"=2, "y"=2\]> . turned/"y"=2, "x"=2], device_ids=[0, 2, 1, 3]>/' %s > %t.turned.mlir
// RUN: stablehlo-tools check-order --target none %t.turned.mlir | filecheck %s
// RUN: sed 's/name = "y">/name = "x">/' %t.turned.mlir > %t.turnedx.mlir
// RUN: not stablehlo-tools check-order --target none %t.turnedx.mlir > %t.out
// RUN: filecheck %s --check-prefix=TURNED < %t.out
// TURNED: may-deadlock: all_gather at {{.*}} the branch to take may differ between its participants 0 and 2

// What decides is an argument: programs compiled apart may be given another.
// RUN: not stablehlo-tools check-order --target none %s %t.alike.mlir > %t.out
// RUN: filecheck %s --check-prefix=FOREIGN < %t.out
// FOREIGN: may-deadlock: the branch at {{.*}}alike.mlir:{{.*}} communicates with {{.*}}manual_computation.mlir, and the branch to take is decided at run time
module attributes {mhlo.num_replicas = 1 : i32, mhlo.num_partitions = 4 : i32} {
  sdy.mesh @mesh = <["x"=2, "y"=2]>
  sdy.mesh @turned = <["x"=2, "y"=2]> // turned
  func.func @main(%p: tensor<2xi1>, %x: tensor<8xf32>) -> tensor<8xf32> {
    %y = sdy.manual_computation(%p, %x)
        in_shardings=[<@mesh, [{"x"}]>, <@mesh, [{"x", "y"}]>] out_shardings=[<@mesh, [{"x", "y"}]>]
        manual_axes={"x", "y"} (%own: tensor<1xi1>, %v: tensor<2xf32>) {
      %one = stablehlo.slice %own [0:1] : (tensor<1xi1>) -> tensor<1xi1>
      %decides = stablehlo.reshape %one : (tensor<1xi1>) -> tensor<i1>
      %r = "stablehlo.if"(%decides) ({
        %g = "stablehlo.all_gather"(%v) {
          all_gather_dim = 0 : i64,
          replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "y">]>,
          channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, use_global_device_ids
        } : (tensor<2xf32>) -> tensor<4xf32>
        %h = stablehlo.slice %g [1:3] : (tensor<4xf32>) -> tensor<2xf32>
        stablehlo.return %h : tensor<2xf32>
      }, {
        stablehlo.return %v : tensor<2xf32>
      }) : (tensor<i1>) -> tensor<2xf32>
      sdy.return %r : tensor<2xf32>
    } : (tensor<2xi1>, tensor<8xf32>) -> tensor<8xf32>
    return %y : tensor<8xf32>
  }
}
