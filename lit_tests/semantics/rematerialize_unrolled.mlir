// RUN: stablehlo-tools opt %s -p 'rematerialize{memory-limit=7.5e-5}' -o %t.after.mlir
// RUN: filecheck %s --check-prefix=REWRITTEN --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --backend interpreter --trials 1 | filecheck %s

// Unrolled layers: what runs again behind barriers is the same, bit for bit.
// REWRITTEN-COUNT-2: stablehlo.optimization_barrier
// CHECK: same: 3 outputs, 3,072 elements, bitwise

// What starts from the activation of another layer is seen.
// RUN: sed 's/stablehlo.tanh/stablehlo.sine/' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --backend interpreter --trials 1 \
// RUN:   | filecheck %s --check-prefix=DIFFERS
// DIFFERS: differs: output
func.func @main(%w0: tensor<32x32xf32>, %w1: tensor<32x32xf32>, %w2: tensor<32x32xf32>, %w3: tensor<32x32xf32>, %w4: tensor<32x32xf32>, %w5: tensor<32x32xf32>, %x: tensor<32x32xf32>) -> (tensor<32x32xf32>, tensor<32x32xf32>, tensor<32x32xf32>) {
  %a0 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
  %y0 = stablehlo.tanh %a0 : tensor<32x32xf32>
  %h0 = stablehlo.add %x, %y0 : tensor<32x32xf32>
  %s0 = stablehlo.multiply %y0, %a0 : tensor<32x32xf32>
  %a1 = stablehlo.dot_general %h0, %w1, contracting_dims = [1] x [0] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
  %y1 = stablehlo.tanh %a1 : tensor<32x32xf32>
  %h1 = stablehlo.add %h0, %y1 : tensor<32x32xf32>
  %s1 = stablehlo.multiply %y1, %a1 : tensor<32x32xf32>
  %a2 = stablehlo.dot_general %h1, %w2, contracting_dims = [1] x [0] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
  %y2 = stablehlo.tanh %a2 : tensor<32x32xf32>
  %h2 = stablehlo.add %h1, %y2 : tensor<32x32xf32>
  %s2 = stablehlo.multiply %y2, %a2 : tensor<32x32xf32>
  %a3 = stablehlo.dot_general %h2, %w3, contracting_dims = [1] x [0] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
  %y3 = stablehlo.tanh %a3 : tensor<32x32xf32>
  %h3 = stablehlo.add %h2, %y3 : tensor<32x32xf32>
  %s3 = stablehlo.multiply %y3, %a3 : tensor<32x32xf32>
  %a4 = stablehlo.dot_general %h3, %w4, contracting_dims = [1] x [0] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
  %y4 = stablehlo.tanh %a4 : tensor<32x32xf32>
  %h4 = stablehlo.add %h3, %y4 : tensor<32x32xf32>
  %s4 = stablehlo.multiply %y4, %a4 : tensor<32x32xf32>
  %a5 = stablehlo.dot_general %h4, %w5, contracting_dims = [1] x [0] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
  %y5 = stablehlo.tanh %a5 : tensor<32x32xf32>
  %h5 = stablehlo.add %h4, %y5 : tensor<32x32xf32>
  %s5 = stablehlo.multiply %y5, %a5 : tensor<32x32xf32>
  %u5 = stablehlo.multiply %h5, %s5 : tensor<32x32xf32>
  %g5 = stablehlo.dot_general %h4, %u5, contracting_dims = [0] x [0] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
  %v5 = stablehlo.dot_general %u5, %w5, contracting_dims = [1] x [1] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
  %d5 = stablehlo.add %h5, %v5 : tensor<32x32xf32>
  %u4 = stablehlo.multiply %d5, %s4 : tensor<32x32xf32>
  %g4 = stablehlo.dot_general %h3, %u4, contracting_dims = [0] x [0] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
  %t4 = stablehlo.add %g5, %g4 : tensor<32x32xf32>
  %v4 = stablehlo.dot_general %u4, %w4, contracting_dims = [1] x [1] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
  %d4 = stablehlo.add %d5, %v4 : tensor<32x32xf32>
  %u3 = stablehlo.multiply %d4, %s3 : tensor<32x32xf32>
  %g3 = stablehlo.dot_general %h2, %u3, contracting_dims = [0] x [0] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
  %t3 = stablehlo.add %t4, %g3 : tensor<32x32xf32>
  %v3 = stablehlo.dot_general %u3, %w3, contracting_dims = [1] x [1] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
  %d3 = stablehlo.add %d4, %v3 : tensor<32x32xf32>
  %u2 = stablehlo.multiply %d3, %s2 : tensor<32x32xf32>
  %g2 = stablehlo.dot_general %h1, %u2, contracting_dims = [0] x [0] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
  %t2 = stablehlo.add %t3, %g2 : tensor<32x32xf32>
  %v2 = stablehlo.dot_general %u2, %w2, contracting_dims = [1] x [1] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
  %d2 = stablehlo.add %d3, %v2 : tensor<32x32xf32>
  %u1 = stablehlo.multiply %d2, %s1 : tensor<32x32xf32>
  %g1 = stablehlo.dot_general %h0, %u1, contracting_dims = [0] x [0] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
  %t1 = stablehlo.add %t2, %g1 : tensor<32x32xf32>
  %v1 = stablehlo.dot_general %u1, %w1, contracting_dims = [1] x [1] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
  %d1 = stablehlo.add %d2, %v1 : tensor<32x32xf32>
  %u0 = stablehlo.multiply %d1, %s0 : tensor<32x32xf32>
  %g0 = stablehlo.dot_general %x, %u0, contracting_dims = [0] x [0] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
  %t0 = stablehlo.add %t1, %g0 : tensor<32x32xf32>
  %v0 = stablehlo.dot_general %u0, %w0, contracting_dims = [1] x [1] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
  %d0 = stablehlo.add %d1, %v0 : tensor<32x32xf32>
  return %h5, %t0, %d0 : tensor<32x32xf32>, tensor<32x32xf32>, tensor<32x32xf32>
}
