// RUN: stablehlo-tools opt %s -p 'rematerialize{memory-limit=0.0235}' | filecheck %s

// Unrolled layers: what runs again starts from what a barrier hands on, together with the gradient
// that it meets, so that no compiler takes it for what ran before, or runs it early.
// CHECK-LABEL: func.func @unrolled
// CHECK-COUNT-2: stablehlo.optimization_barrier
// CHECK:         %[[TIED:.+]]:2 = stablehlo.optimization_barrier %[[KEPT:.+]], %[[GRADIENT:.+]] :
// CHECK-NEXT:    %[[AGAIN:.+]] = stablehlo.tanh %[[TIED]]#0
// CHECK:         stablehlo.multiply %[[TIED]]#1
func.func @unrolled(%w0: tensor<512x512xf32>, %w1: tensor<512x512xf32>, %w2: tensor<512x512xf32>, %w3: tensor<512x512xf32>, %w4: tensor<512x512xf32>, %w5: tensor<512x512xf32>, %w6: tensor<512x512xf32>, %w7: tensor<512x512xf32>, %x: tensor<512x512xf32>) -> (tensor<512x512xf32>, tensor<512x512xf32>, tensor<512x512xf32>) {
  %a0 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %y0 = stablehlo.tanh %a0 : tensor<512x512xf32>
  %h0 = stablehlo.add %x, %y0 : tensor<512x512xf32>
  %s0 = stablehlo.multiply %y0, %a0 : tensor<512x512xf32>
  %a1 = stablehlo.dot_general %h0, %w1, contracting_dims = [1] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %y1 = stablehlo.tanh %a1 : tensor<512x512xf32>
  %h1 = stablehlo.add %h0, %y1 : tensor<512x512xf32>
  %s1 = stablehlo.multiply %y1, %a1 : tensor<512x512xf32>
  %a2 = stablehlo.dot_general %h1, %w2, contracting_dims = [1] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %y2 = stablehlo.tanh %a2 : tensor<512x512xf32>
  %h2 = stablehlo.add %h1, %y2 : tensor<512x512xf32>
  %s2 = stablehlo.multiply %y2, %a2 : tensor<512x512xf32>
  %a3 = stablehlo.dot_general %h2, %w3, contracting_dims = [1] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %y3 = stablehlo.tanh %a3 : tensor<512x512xf32>
  %h3 = stablehlo.add %h2, %y3 : tensor<512x512xf32>
  %s3 = stablehlo.multiply %y3, %a3 : tensor<512x512xf32>
  %a4 = stablehlo.dot_general %h3, %w4, contracting_dims = [1] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %y4 = stablehlo.tanh %a4 : tensor<512x512xf32>
  %h4 = stablehlo.add %h3, %y4 : tensor<512x512xf32>
  %s4 = stablehlo.multiply %y4, %a4 : tensor<512x512xf32>
  %a5 = stablehlo.dot_general %h4, %w5, contracting_dims = [1] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %y5 = stablehlo.tanh %a5 : tensor<512x512xf32>
  %h5 = stablehlo.add %h4, %y5 : tensor<512x512xf32>
  %s5 = stablehlo.multiply %y5, %a5 : tensor<512x512xf32>
  %a6 = stablehlo.dot_general %h5, %w6, contracting_dims = [1] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %y6 = stablehlo.tanh %a6 : tensor<512x512xf32>
  %h6 = stablehlo.add %h5, %y6 : tensor<512x512xf32>
  %s6 = stablehlo.multiply %y6, %a6 : tensor<512x512xf32>
  %a7 = stablehlo.dot_general %h6, %w7, contracting_dims = [1] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %y7 = stablehlo.tanh %a7 : tensor<512x512xf32>
  %h7 = stablehlo.add %h6, %y7 : tensor<512x512xf32>
  %s7 = stablehlo.multiply %y7, %a7 : tensor<512x512xf32>
  %u7 = stablehlo.multiply %h7, %s7 : tensor<512x512xf32>
  %g7 = stablehlo.dot_general %h6, %u7, contracting_dims = [0] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %v7 = stablehlo.dot_general %u7, %w7, contracting_dims = [1] x [1] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %d7 = stablehlo.add %h7, %v7 : tensor<512x512xf32>
  %u6 = stablehlo.multiply %d7, %s6 : tensor<512x512xf32>
  %g6 = stablehlo.dot_general %h5, %u6, contracting_dims = [0] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %t6 = stablehlo.add %g7, %g6 : tensor<512x512xf32>
  %v6 = stablehlo.dot_general %u6, %w6, contracting_dims = [1] x [1] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %d6 = stablehlo.add %d7, %v6 : tensor<512x512xf32>
  %u5 = stablehlo.multiply %d6, %s5 : tensor<512x512xf32>
  %g5 = stablehlo.dot_general %h4, %u5, contracting_dims = [0] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %t5 = stablehlo.add %t6, %g5 : tensor<512x512xf32>
  %v5 = stablehlo.dot_general %u5, %w5, contracting_dims = [1] x [1] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %d5 = stablehlo.add %d6, %v5 : tensor<512x512xf32>
  %u4 = stablehlo.multiply %d5, %s4 : tensor<512x512xf32>
  %g4 = stablehlo.dot_general %h3, %u4, contracting_dims = [0] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %t4 = stablehlo.add %t5, %g4 : tensor<512x512xf32>
  %v4 = stablehlo.dot_general %u4, %w4, contracting_dims = [1] x [1] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %d4 = stablehlo.add %d5, %v4 : tensor<512x512xf32>
  %u3 = stablehlo.multiply %d4, %s3 : tensor<512x512xf32>
  %g3 = stablehlo.dot_general %h2, %u3, contracting_dims = [0] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %t3 = stablehlo.add %t4, %g3 : tensor<512x512xf32>
  %v3 = stablehlo.dot_general %u3, %w3, contracting_dims = [1] x [1] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %d3 = stablehlo.add %d4, %v3 : tensor<512x512xf32>
  %u2 = stablehlo.multiply %d3, %s2 : tensor<512x512xf32>
  %g2 = stablehlo.dot_general %h1, %u2, contracting_dims = [0] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %t2 = stablehlo.add %t3, %g2 : tensor<512x512xf32>
  %v2 = stablehlo.dot_general %u2, %w2, contracting_dims = [1] x [1] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %d2 = stablehlo.add %d3, %v2 : tensor<512x512xf32>
  %u1 = stablehlo.multiply %d2, %s1 : tensor<512x512xf32>
  %g1 = stablehlo.dot_general %h0, %u1, contracting_dims = [0] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %t1 = stablehlo.add %t2, %g1 : tensor<512x512xf32>
  %v1 = stablehlo.dot_general %u1, %w1, contracting_dims = [1] x [1] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %d1 = stablehlo.add %d2, %v1 : tensor<512x512xf32>
  %u0 = stablehlo.multiply %d1, %s0 : tensor<512x512xf32>
  %g0 = stablehlo.dot_general %x, %u0, contracting_dims = [0] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %t0 = stablehlo.add %t1, %g0 : tensor<512x512xf32>
  %v0 = stablehlo.dot_general %u0, %w0, contracting_dims = [1] x [1] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %d0 = stablehlo.add %d1, %v0 : tensor<512x512xf32>
  return %h7, %t0, %d0 : tensor<512x512xf32>, tensor<512x512xf32>, tensor<512x512xf32>
}
