// The order is decided on the schedules that compilers make: XLA deletes a sum that only a triangular
// solve of one row with a unit diagonal reads, which the text does not show.

// RUN: sed "s|return .triangle|return %all|" %s > %t.used.mlir
// RUN: not stablehlo-tools check-order --target cpu %s %t.used.mlir > %t.out
// RUN: filecheck %s < %t.out
// CHECK: mismatch: device 1 issues all_reduce tensor<1x1xf32> -> tensor<1x1xf32> add
// CHECK-SAME: its participant device 0 never does
// CHECK-NEXT: as scheduled by XLA:CPU of jaxlib
// RUN: not stablehlo-tools check-order --target cpu %s %t.used.mlir --json | filecheck %s --check-prefix=JSON
// JSON: "verdict": "mismatch"
// JSON: "compilers"
// JSON: "target": "cpu"

// Without a compiler nothing is claimed of a collective that no barriers enclose.
// RUN: not stablehlo-tools check-order --target none %s %t.used.mlir > %t.out
// RUN: filecheck %s --check-prefix=NONE < %t.out
// NONE: ordered unless a compiler rewrites all_reduce at {{.*}}compiled.mlir:{{.*}}: no barrier produces its operands
// NONE-NEXT: try: stablehlo-tools check-order {{.*}} --target cpu

// align-order gives the sum a use that XLA keeps, and checks that it does.
// RUN: rm -rf %t.dir && stablehlo-tools align-order --target cpu %s %t.used.mlir -o %t.dir 2> %t.err
// RUN: filecheck %s --check-prefix=KEPT < %t.err
// KEPT: warning: stablehlo.all_reduce: others wait for it, so a returned value now uses it
// RUN: stablehlo-tools check-order --target cpu %t.dir/compiled.mlir %t.dir/compiled.mlir.tmp.used.mlir | filecheck %s --check-prefix=ALIGNED
// ALIGNED: ordered: 2 programs on devices 0 and 1, 2 collectives
// ALIGNED: a device issues in the order of its schedule

// RUN: python %{inputs}/expect_refusal.py stablehlo-tools check-order --target none --target cpu %s %s | filecheck %s --check-prefix=BOTH
// BOTH: --target none runs no compiler: omit other targets and compiler options

module attributes {mhlo.num_partitions = 2 : i32} {
  func.func @main(%x: tensor<1x1xf32>) -> tensor<1x1xf32> {
    %all = "stablehlo.all_reduce"(%x) <{
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
        replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) : (tensor<1x1xf32>) -> tensor<1x1xf32>
    %triangle = "stablehlo.triangular_solve"(%all, %x) <{left_side = true, lower = true,
        transpose_a = #stablehlo<transpose NO_TRANSPOSE>, unit_diagonal = true}>
        : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xf32>
    return %triangle : tensor<1x1xf32>
  }
}
