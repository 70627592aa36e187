// RUN: stablehlo-tools opt %s --split-input-file > %t.before
// RUN: stablehlo-tools opt %s -p partition --split-input-file | diff -u %t.before -

// What is partitioned already stays as it is, to the byte.
// RUN: cat %S/partition.mlir %{inputs}/separator.txt %S/partition_bodies.mlir \
// RUN:   %{inputs}/separator.txt %S/partition_again.mlir \
// RUN:   %{inputs}/separator.txt %S/partition_meshes.mlir \
// RUN:   %{inputs}/separator.txt %S/partition_places.mlir \
// RUN:   %{inputs}/separator.txt %S/partition_ops.mlir > %t.mlir
// RUN: stablehlo-tools opt %t.mlir -p partition --split-input-file > %t.once
// RUN: filecheck %s --input-file %t.once --check-prefix=ONCE
// RUN: stablehlo-tools opt %t.once -p partition --split-input-file | diff -u %t.once -
// ONCE-COUNT-46: sdy.manual_computation

// So it does with a chain of tokens in it and around it.
// RUN: stablehlo-tools opt %t.once -p thread-tokens --split-input-file > %t.threaded
// RUN: filecheck %s --input-file %t.threaded --check-prefix=THREADED
// RUN: stablehlo-tools opt %t.threaded -p partition --split-input-file | diff -u %t.threaded -
// THREADED-COUNT-25: sdy.manual_computation({{.*}}!stablehlo.token

// No mesh.
func.func @no_mesh(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %0 = stablehlo.negate %x : tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}

// -----

// A mesh of no axes.
sdy.mesh @mesh = <[]>
func.func @no_axes(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) -> tensor<8x4xf32> {
  %0 = stablehlo.negate %x : tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}

// -----

// One device, even with what may not stand outside of manual computations on several.
sdy.mesh @mesh = <["x"=1, "y"=1]>
func.func @one_device(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> (tensor<8x4xf32>, tensor<ui32>) {
  %0 = stablehlo.partition_id : tensor<ui32>
  return %x, %0 : tensor<8x4xf32>, tensor<ui32>
}

// -----

// All of the body is one manual computation over every axis.
sdy.mesh @mesh = <["x"=4, "y"=2]>
func.func @partitioned(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, %n: tensor<i32>
) -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, tensor<i32>) {
  %0:2 = sdy.manual_computation(%x, %n) in_shardings=[<@mesh, [{"x"}, {}]>, <@mesh, []>] out_shardings=[<@mesh, [{"x"}, {}]>, <@mesh, []>] manual_axes={"x", "y"} (%a: tensor<2x4xf32>, %b: tensor<i32>) {
    %1 = "stablehlo.collective_permute"(%a) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      source_target_pairs = dense<[[0, 2]]> : tensor<1x2xi64>
    } : (tensor<2x4xf32>) -> tensor<2x4xf32>
    sdy.return %1, %b : tensor<2x4xf32>, tensor<i32>
  } : (tensor<8x4xf32>, tensor<i32>) -> (tensor<8x4xf32>, tensor<i32>)
  return %0#0, %0#1 : tensor<8x4xf32>, tensor<i32>
}

// -----

// Axes of one device need not be manual.
sdy.mesh @mesh = <["x"=4, "y"=1]>
func.func @partitioned_but_for_an_axis_of_one(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x"}, {}]>] out_shardings=[<@mesh, [{"x"}, {}]>] manual_axes={"x"} (%a: tensor<2x4xf32>) {
    %1 = stablehlo.partition_id : tensor<ui32>
    sdy.return %a : tensor<2x4xf32>
  } : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}
