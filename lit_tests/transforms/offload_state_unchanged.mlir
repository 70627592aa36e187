// RUN: stablehlo-tools opt %s -p 'offload{memory-limit=0.001 state explain}' 2>%t.says | filecheck %s
// RUN: filecheck %s --check-prefix=FITS --input-file %t.says
// RUN: not stablehlo-tools opt %s -p 'offload{memory-limit=0.0001 state}' -o %t.mlir 2>&1 | filecheck %s --check-prefix=NONE
// RUN: not test -e %t.mlir

// A program that fits is left alone; what a product depends on (as Muon's momentum), and what lies
// in the host's memory already, is not moved.
// FITS: note: offload: the program fits without a change
// NONE: offload_state_unchanged.mlir:16:1: error: offload: the least memory that was found is {{.*}} (P3)

// CHECK-LABEL: func.func @main
// CHECK-NOT:     optimization_barrier
// CHECK-COUNT-1: @annotate_device_placement
// CHECK-NOT:     @annotate_device_placement
// CHECK:         return
func.func @main(%w: tensor<128x128xf32>, %m: tensor<128x128xf32>, %v: tensor<128x128xf32> {mhlo.memory_kind = "pinned_host"}) -> (tensor<128x128xf32>, tensor<128x128xf32>, tensor<128x128xf32>) {
  %g = stablehlo.dot_general %w, %w, contracting_dims = [1] x [0] : (tensor<128x128xf32>, tensor<128x128xf32>) -> tensor<128x128xf32>
  %m1 = stablehlo.add %m, %g : tensor<128x128xf32>
  %steps = stablehlo.dot_general %m1, %m1, contracting_dims = [1] x [0] : (tensor<128x128xf32>, tensor<128x128xf32>) -> tensor<128x128xf32>
  %there = stablehlo.custom_call @annotate_device_placement(%v) {has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "device"}} : (tensor<128x128xf32>) -> tensor<128x128xf32>
  %v1 = stablehlo.add %there, %g : tensor<128x128xf32>
  %w1 = stablehlo.subtract %w, %steps : tensor<128x128xf32>
  return %w1, %m1, %v1 : tensor<128x128xf32>, tensor<128x128xf32>, tensor<128x128xf32>
}
