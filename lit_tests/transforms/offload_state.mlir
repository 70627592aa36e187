// RUN: stablehlo-tools opt %s -p 'offload{memory-limit=0.009 margin=0 state explain}' -o %t.mlir 2>&1 | filecheck %s --check-prefix=SAYS
// RUN: filecheck %s --input-file %t.mlir
// RUN: stablehlo-tools verify %s %t.mlir --backend cpu --trials 1 | filecheck %s --check-prefix=SAME
// SAME: same: 6 outputs, 393,216 elements, bitwise

// The state that a gradient updates is given in the host's memory, and given back there. It comes
// to the device when its gradient is there; the third group waits for the first one's new state,
// whose copy to the host comes behind that. The norm reads the gradients as they were.
// SAYS: note: to the host's memory: 256 KiB of state, argument 3
// SAYS-NEXT: {{.*}} 256 KiB of state, argument 4
// SAYS-NEXT: {{.*}} 256 KiB of state, argument 5

// CHECK-LABEL: func.func @main
// CHECK-SAME:    %[[M0:arg3]]: tensor<256x256xf32> {mhlo.memory_kind = "pinned_host", tf.aliasing_output = 3 : i32}
// CHECK-SAME:    %arg5: tensor<256x256xf32> {mhlo.memory_kind = "pinned_host"
// CHECK-SAME:    -> (tensor<256x256xf32>, tensor<256x256xf32>, tensor<256x256xf32>, tensor<256x256xf32> {mhlo.memory_kind = "pinned_host"}
// CHECK:       stablehlo.reduce
// CHECK-NEXT:  %[[G0:.+]] = stablehlo.dot_general
// CHECK-NEXT:  %[[T0:.+]]:2 = stablehlo.optimization_barrier %[[M0]], %[[G0]] :
// CHECK-NEXT:  %[[D0:.+]] = stablehlo.custom_call @annotate_device_placement(%[[T0]]#0) {has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "device"}}
// CHECK:       stablehlo.dot_general
// CHECK:       %[[G2:.+]] = stablehlo.dot_general
// CHECK:       %[[SQUARE:.+]] = stablehlo.multiply %[[G0]], %[[G0]]
// CHECK:       %[[CLIPPED:.+]] = stablehlo.multiply %[[T0]]#1, %{{.+}} :
// CHECK:       %[[N0:.+]] = stablehlo.add %[[D0]], %[[CLIPPED]]
// CHECK:       %[[T2:.+]]:3 = stablehlo.optimization_barrier %arg5, %[[G2]], %[[N0]] :
// CHECK:       stablehlo.custom_call @annotate_device_placement(%[[T2]]#0) {{.*}}"device"
// CHECK:       stablehlo.custom_call @annotate_device_placement(%[[T2]]#2) {{.*}}"pinned_host"
func.func @main(%w0: tensor<256x256xf32> {tf.aliasing_output = 0 : i32}, %w1: tensor<256x256xf32> {tf.aliasing_output = 1 : i32}, %w2: tensor<256x256xf32> {tf.aliasing_output = 2 : i32}, %m0: tensor<256x256xf32> {tf.aliasing_output = 3 : i32}, %m1: tensor<256x256xf32> {tf.aliasing_output = 4 : i32}, %m2: tensor<256x256xf32> {tf.aliasing_output = 5 : i32}, %x: tensor<256x256xf32>) -> (tensor<256x256xf32>, tensor<256x256xf32>, tensor<256x256xf32>, tensor<256x256xf32>, tensor<256x256xf32>, tensor<256x256xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %many = stablehlo.broadcast_in_dim %x, dims = [1, 2] : (tensor<256x256xf32>) -> tensor<16x256x256xf32>
  %products = stablehlo.dot_general %many, %many, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<16x256x256xf32>, tensor<16x256x256xf32>) -> tensor<16x256x256xf32>
  %sum = stablehlo.reduce(%products init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<16x256x256xf32>, tensor<f32>) -> tensor<256x256xf32>
  %g0 = stablehlo.dot_general %sum, %w0, contracting_dims = [1] x [0] : (tensor<256x256xf32>, tensor<256x256xf32>) -> tensor<256x256xf32>
  %g1 = stablehlo.dot_general %g0, %w1, contracting_dims = [1] x [0] : (tensor<256x256xf32>, tensor<256x256xf32>) -> tensor<256x256xf32>
  %g2 = stablehlo.dot_general %g1, %w2, contracting_dims = [1] x [0] : (tensor<256x256xf32>, tensor<256x256xf32>) -> tensor<256x256xf32>
  %square = stablehlo.multiply %g0, %g0 : tensor<256x256xf32>
  %norm = stablehlo.reduce(%square init: %zero) applies stablehlo.add across dimensions = [0, 1] : (tensor<256x256xf32>, tensor<f32>) -> tensor<f32>
  %scale = stablehlo.rsqrt %norm : tensor<f32>
  %scales = stablehlo.broadcast_in_dim %scale, dims = [] : (tensor<f32>) -> tensor<256x256xf32>
  %c0 = stablehlo.multiply %g0, %scales : tensor<256x256xf32>
  %c1 = stablehlo.multiply %g1, %scales : tensor<256x256xf32>
  %c2 = stablehlo.multiply %g2, %scales : tensor<256x256xf32>
  %n0 = stablehlo.add %m0, %c0 : tensor<256x256xf32>
  %n1 = stablehlo.add %m1, %c1 : tensor<256x256xf32>
  %n2 = stablehlo.add %m2, %c2 : tensor<256x256xf32>
  %v0 = stablehlo.subtract %w0, %n0 : tensor<256x256xf32>
  %v1 = stablehlo.subtract %w1, %n1 : tensor<256x256xf32>
  %v2 = stablehlo.subtract %w2, %n2 : tensor<256x256xf32>
  return %v0, %v1, %v2, %n0, %n1, %n2 : tensor<256x256xf32>, tensor<256x256xf32>, tensor<256x256xf32>, tensor<256x256xf32>, tensor<256x256xf32>, tensor<256x256xf32>
}
