// Each part is a module of its own; the parts come out as they went in.
// RUN: stablehlo-tools opt %s --split-input-file | filecheck %s

// Without the flag the separator is a comment, and the two functions of one name collide.
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools opt %s | filecheck %s --check-prefix=WHOLE
// WHOLE: split_input_file.mlir:{{[0-9]+}}:1: error: invalid MLIR text: redefinition of symbol named 'main'

// An error in a part is located in the file.
// RUN: sed 's/negate/negat/' %s > %t.mlir
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools opt %t.mlir --split-input-file | filecheck %s --check-prefix=LOCATED
// LOCATED: split_input_file.mlir.tmp.mlir:31:8: error:

// A separator at the end parts nothing from the rest.
// RUN: cat %s %{inputs}/separator.txt > %t.mlir
// RUN: stablehlo-tools opt %t.mlir --split-input-file | filecheck %s

// CHECK: module {
// CHECK-NEXT: func.func @main(%arg0: tensor<f32>)
// CHECK: {{^}}// -----{{$}}
// CHECK-NEXT: module {
// CHECK-NEXT: func.func @main(%arg0: tensor<2xf32>)
// CHECK-NEXT: stablehlo.negate
// CHECK-NOT: // -----
func.func @main(%x: tensor<f32>) -> tensor<f32> {
  return %x : tensor<f32>
}

// -----

func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.negate %x : tensor<2xf32>
  return %0 : tensor<2xf32>
}
