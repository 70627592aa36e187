// A module survives every form: text, bytecode, portable artifact and back.

// RUN: stablehlo-tools opt %s -o %t.mlir
// RUN: stablehlo-tools opt %t.mlir -o %t.mlirbc
// RUN: stablehlo-tools opt %t.mlirbc -o %t.bc
// RUN: stablehlo-tools opt %t.bc -o %t.again.mlir
// RUN: diff -u %t.mlir %t.again.mlir
// RUN: filecheck %s < %t.again.mlir

// The suffix picked the form.
// RUN: grep -q 'StableHLO_v' %t.bc
// RUN: not grep -q 'StableHLO_v' %t.mlirbc
// RUN: grep -q 'MLIR' %t.mlirbc

// The form is told by content, not by the suffix.
// RUN: cp %t.bc %t.misnamed.mlir
// RUN: stablehlo-tools opt %t.misnamed.mlir | diff -u %t.mlir -

// The same input makes the same bytes.
// RUN: stablehlo-tools opt %t.mlirbc -o %t.second.bc
// RUN: cmp %t.bc %t.second.bc

// Locations are always in the binary forms; text has them when asked.
// RUN: stablehlo-tools opt %s --print-locations > %t.located.mlir
// RUN: filecheck %s --check-prefix=LOCATED < %t.located.mlir
// RUN: stablehlo-tools opt %s -o %t.located.bc
// RUN: stablehlo-tools opt %t.located.bc --print-locations | diff -u %t.located.mlir -

// CHECK: sdy.mesh @mesh = <["x"=2]>
// CHECK: func.func @main
// CHECK-NOT: loc(
// LOCATED: loc("mlp/psum"
sdy.mesh @mesh = <["x"=2]>
func.func @main(%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<4xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}]>]
      manual_axes={"x"} (%a: tensor<2xf32>) {
    %1 = "stablehlo.all_reduce"(%a) ({
    ^bb0(%b: tensor<f32>, %c: tensor<f32>):
      %sum = stablehlo.add %b, %c : tensor<f32>
      stablehlo.return %sum : tensor<f32>
    }) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
      use_global_device_ids
    } : (tensor<2xf32>) -> tensor<2xf32> loc("mlp/psum"("model.py":11:4))
    sdy.return %1 : tensor<2xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
