// RUN: stablehlo-tools opt %s -p "rematerialize{memory-limit=0.0235}" --split-input-file | filecheck %s

// What the forward loop keeps for the backward is tanh's operand no more, nor its result: both are
// computed again from what a layer is given, and the loops carry one stack less.
// CHECK-LABEL: func.func @loops
// CHECK-SAME:    %[[W:.+]]: tensor<8x256x256xf32>, %[[X:[^:]+]]:
// CHECK:       %[[FORWARD:.+]]:4 = stablehlo.while
// CHECK:         %[[INNER:.+]] = stablehlo.dot_general
// CHECK-NEXT:    stablehlo.tanh %[[INNER]]
// CHECK:         stablehlo.dynamic_update_slice
// CHECK-NOT:     stablehlo.dynamic_update_slice
// CHECK:       stablehlo.while({{.*}}%[[ROWS:[^ ]+]] = %[[FORWARD]]#3
// CHECK:         %[[ROW:.+]] = stablehlo.dynamic_slice %[[ROWS]]
// CHECK:         %[[H:.+]] = stablehlo.reshape %[[ROW]]
// CHECK:         %[[AGAIN:.+]] = stablehlo.dot_general %[[H]]
// CHECK-NEXT:    stablehlo.tanh %[[AGAIN]]
func.func @loops(%w: tensor<8x256x256xf32>, %x: tensor<256x256xf32>) -> (tensor<256x256xf32>, tensor<8x256x256xf32>) {
  %c0 = stablehlo.constant dense<0> : tensor<i32>
  %c1 = stablehlo.constant dense<1> : tensor<i32>
  %c7 = stablehlo.constant dense<7> : tensor<i32>
  %c8 = stablehlo.constant dense<8> : tensor<i32>
  %one = stablehlo.constant dense<1.0> : tensor<256x256xf32>
  %zeros = stablehlo.constant dense<0.0> : tensor<8x256x256xf32>
  %forward:6 = stablehlo.while(%i = %c0, %ws = %w, %h = %x, %kept = %zeros, %tanhs = %zeros, %sums = %zeros) : tensor<i32>, tensor<8x256x256xf32>, tensor<256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>
  cond {
    %more = stablehlo.compare LT, %i, %c8 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %ws, %i, %c0, %c0, sizes = [1, 256, 256] : (tensor<8x256x256xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x256x256xf32>
    %weights = stablehlo.reshape %row : (tensor<1x256x256xf32>) -> tensor<256x256xf32>
    %inner = stablehlo.dot_general %h, %weights, contracting_dims = [1] x [0] : (tensor<256x256xf32>, tensor<256x256xf32>) -> tensor<256x256xf32>
    %next = stablehlo.tanh %inner : tensor<256x256xf32>
    %h_row = stablehlo.reshape %h : (tensor<256x256xf32>) -> tensor<1x256x256xf32>
    %kept_next = stablehlo.dynamic_update_slice %kept, %h_row, %i, %c0, %c0 : (tensor<8x256x256xf32>, tensor<1x256x256xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<8x256x256xf32>
    %tanh_row = stablehlo.reshape %next : (tensor<256x256xf32>) -> tensor<1x256x256xf32>
    %tanhs_next = stablehlo.dynamic_update_slice %tanhs, %tanh_row, %i, %c0, %c0 : (tensor<8x256x256xf32>, tensor<1x256x256xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<8x256x256xf32>
    %sum_row = stablehlo.reshape %inner : (tensor<256x256xf32>) -> tensor<1x256x256xf32>
    %sums_next = stablehlo.dynamic_update_slice %sums, %sum_row, %i, %c0, %c0 : (tensor<8x256x256xf32>, tensor<1x256x256xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<8x256x256xf32>
    %i_next = stablehlo.add %i, %c1 : tensor<i32>
    stablehlo.return %i_next, %ws, %next, %kept_next, %tanhs_next, %sums_next : tensor<i32>, tensor<8x256x256xf32>, tensor<256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>
  }
  %backward:7 = stablehlo.while(%j = %c0, %ws = %w, %d = %forward#2, %kept = %forward#3, %tanhs = %forward#4, %sums = %forward#5, %gradients = %zeros) : tensor<i32>, tensor<8x256x256xf32>, tensor<256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>
  cond {
    %more = stablehlo.compare LT, %j, %c8 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %i = stablehlo.subtract %c7, %j : tensor<i32>
    %row = stablehlo.dynamic_slice %ws, %i, %c0, %c0, sizes = [1, 256, 256] : (tensor<8x256x256xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x256x256xf32>
    %weights = stablehlo.reshape %row : (tensor<1x256x256xf32>) -> tensor<256x256xf32>
    %h_row = stablehlo.dynamic_slice %kept, %i, %c0, %c0, sizes = [1, 256, 256] : (tensor<8x256x256xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x256x256xf32>
    %h = stablehlo.reshape %h_row : (tensor<1x256x256xf32>) -> tensor<256x256xf32>
    %tanh_row = stablehlo.dynamic_slice %tanhs, %i, %c0, %c0, sizes = [1, 256, 256] : (tensor<8x256x256xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x256x256xf32>
    %tanh = stablehlo.reshape %tanh_row : (tensor<1x256x256xf32>) -> tensor<256x256xf32>
    %sum_row = stablehlo.dynamic_slice %sums, %i, %c0, %c0, sizes = [1, 256, 256] : (tensor<8x256x256xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x256x256xf32>
    %sum = stablehlo.reshape %sum_row : (tensor<1x256x256xf32>) -> tensor<256x256xf32>
    %square = stablehlo.multiply %tanh, %tanh : tensor<256x256xf32>
    %slope = stablehlo.subtract %one, %square : tensor<256x256xf32>
    %scaled = stablehlo.multiply %d, %slope : tensor<256x256xf32>
    %d_inner = stablehlo.add %scaled, %sum : tensor<256x256xf32>
    %gradient = stablehlo.dot_general %h, %d_inner, contracting_dims = [0] x [0] : (tensor<256x256xf32>, tensor<256x256xf32>) -> tensor<256x256xf32>
    %d_next = stablehlo.dot_general %d_inner, %weights, contracting_dims = [1] x [1] : (tensor<256x256xf32>, tensor<256x256xf32>) -> tensor<256x256xf32>
    %gradient_row = stablehlo.reshape %gradient : (tensor<256x256xf32>) -> tensor<1x256x256xf32>
    %gradients_next = stablehlo.dynamic_update_slice %gradients, %gradient_row, %i, %c0, %c0 : (tensor<8x256x256xf32>, tensor<1x256x256xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<8x256x256xf32>
    %j_next = stablehlo.add %j, %c1 : tensor<i32>
    stablehlo.return %j_next, %ws, %d_next, %kept, %tanhs, %sums, %gradients_next : tensor<i32>, tensor<8x256x256xf32>, tensor<256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>
  }
  return %backward#2, %backward#6 : tensor<256x256xf32>, tensor<8x256x256xf32>
}

// -----

// Unrolled layers: what runs again starts from what a barrier hands on, together with the gradient
// that it meets, so that no compiler takes it for what ran before, or runs it early.
// CHECK-LABEL: func.func @unrolled
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
