// RUN: stablehlo-tools opt %s -p 'rematerialize{memory-limit=0.00009}' -o %t.after.mlir
// RUN: filecheck %s --check-prefix=REWRITTEN --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --backend interpreter --trials 1 | filecheck %s

// Loops over layers: what the backward computes again is the same, bit for bit.
// REWRITTEN: stablehlo.while
// REWRITTEN: stablehlo.while
// REWRITTEN: stablehlo.tanh
// CHECK: same: 2 outputs, 6,144 elements, bitwise

// Rows of another layer are seen.
// RUN: sed 's/dense<4> : tensor<i32>/dense<3> : tensor<i32>/' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --backend interpreter --trials 1 \
// RUN:   | filecheck %s --check-prefix=DIFFERS
// DIFFERS: differs: output
func.func @main(%w: tensor<5x32x32xf32>, %x: tensor<32x32xf32>) -> (tensor<32x32xf32>, tensor<5x32x32xf32>) {
  %c0 = stablehlo.constant dense<0> : tensor<i32>
  %c1 = stablehlo.constant dense<1> : tensor<i32>
  %c4 = stablehlo.constant dense<4> : tensor<i32>
  %c5 = stablehlo.constant dense<5> : tensor<i32>
  %one = stablehlo.constant dense<1.0> : tensor<32x32xf32>
  %zeros = stablehlo.constant dense<0.0> : tensor<5x32x32xf32>
  %forward:6 = stablehlo.while(%i = %c0, %ws = %w, %h = %x, %kept = %zeros, %tanhs = %zeros, %sums = %zeros) : tensor<i32>, tensor<5x32x32xf32>, tensor<32x32xf32>, tensor<5x32x32xf32>, tensor<5x32x32xf32>, tensor<5x32x32xf32>
  cond {
    %more = stablehlo.compare LT, %i, %c5 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %ws, %i, %c0, %c0, sizes = [1, 32, 32] : (tensor<5x32x32xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x32x32xf32>
    %weights = stablehlo.reshape %row : (tensor<1x32x32xf32>) -> tensor<32x32xf32>
    %inner = stablehlo.dot_general %h, %weights, contracting_dims = [1] x [0] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
    %next = stablehlo.tanh %inner : tensor<32x32xf32>
    %h_row = stablehlo.reshape %h : (tensor<32x32xf32>) -> tensor<1x32x32xf32>
    %kept_next = stablehlo.dynamic_update_slice %kept, %h_row, %i, %c0, %c0 : (tensor<5x32x32xf32>, tensor<1x32x32xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<5x32x32xf32>
    %tanh_row = stablehlo.reshape %next : (tensor<32x32xf32>) -> tensor<1x32x32xf32>
    %tanhs_next = stablehlo.dynamic_update_slice %tanhs, %tanh_row, %i, %c0, %c0 : (tensor<5x32x32xf32>, tensor<1x32x32xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<5x32x32xf32>
    %sum_row = stablehlo.reshape %inner : (tensor<32x32xf32>) -> tensor<1x32x32xf32>
    %sums_next = stablehlo.dynamic_update_slice %sums, %sum_row, %i, %c0, %c0 : (tensor<5x32x32xf32>, tensor<1x32x32xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<5x32x32xf32>
    %i_next = stablehlo.add %i, %c1 : tensor<i32>
    stablehlo.return %i_next, %ws, %next, %kept_next, %tanhs_next, %sums_next : tensor<i32>, tensor<5x32x32xf32>, tensor<32x32xf32>, tensor<5x32x32xf32>, tensor<5x32x32xf32>, tensor<5x32x32xf32>
  }
  %backward:7 = stablehlo.while(%j = %c0, %ws = %w, %d = %forward#2, %kept = %forward#3, %tanhs = %forward#4, %sums = %forward#5, %gradients = %zeros) : tensor<i32>, tensor<5x32x32xf32>, tensor<32x32xf32>, tensor<5x32x32xf32>, tensor<5x32x32xf32>, tensor<5x32x32xf32>, tensor<5x32x32xf32>
  cond {
    %more = stablehlo.compare LT, %j, %c5 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %i = stablehlo.subtract %c4, %j : tensor<i32>
    %row = stablehlo.dynamic_slice %ws, %i, %c0, %c0, sizes = [1, 32, 32] : (tensor<5x32x32xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x32x32xf32>
    %weights = stablehlo.reshape %row : (tensor<1x32x32xf32>) -> tensor<32x32xf32>
    %h_row = stablehlo.dynamic_slice %kept, %i, %c0, %c0, sizes = [1, 32, 32] : (tensor<5x32x32xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x32x32xf32>
    %h = stablehlo.reshape %h_row : (tensor<1x32x32xf32>) -> tensor<32x32xf32>
    %tanh_row = stablehlo.dynamic_slice %tanhs, %i, %c0, %c0, sizes = [1, 32, 32] : (tensor<5x32x32xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x32x32xf32>
    %tanh = stablehlo.reshape %tanh_row : (tensor<1x32x32xf32>) -> tensor<32x32xf32>
    %sum_row = stablehlo.dynamic_slice %sums, %i, %c0, %c0, sizes = [1, 32, 32] : (tensor<5x32x32xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x32x32xf32>
    %sum = stablehlo.reshape %sum_row : (tensor<1x32x32xf32>) -> tensor<32x32xf32>
    %square = stablehlo.multiply %tanh, %tanh : tensor<32x32xf32>
    %slope = stablehlo.subtract %one, %square : tensor<32x32xf32>
    %scaled = stablehlo.multiply %d, %slope : tensor<32x32xf32>
    %d_inner = stablehlo.add %scaled, %sum : tensor<32x32xf32>
    %gradient = stablehlo.dot_general %h, %d_inner, contracting_dims = [0] x [0] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
    %d_next = stablehlo.dot_general %d_inner, %weights, contracting_dims = [1] x [1] : (tensor<32x32xf32>, tensor<32x32xf32>) -> tensor<32x32xf32>
    %gradient_row = stablehlo.reshape %gradient : (tensor<32x32xf32>) -> tensor<1x32x32xf32>
    %gradients_next = stablehlo.dynamic_update_slice %gradients, %gradient_row, %i, %c0, %c0 : (tensor<5x32x32xf32>, tensor<1x32x32xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<5x32x32xf32>
    %j_next = stablehlo.add %j, %c1 : tensor<i32>
    stablehlo.return %j_next, %ws, %d_next, %kept, %tanhs, %sums, %gradients_next : tensor<i32>, tensor<5x32x32xf32>, tensor<32x32xf32>, tensor<5x32x32xf32>, tensor<5x32x32xf32>, tensor<5x32x32xf32>, tensor<5x32x32xf32>
  }
  return %backward#2, %backward#6 : tensor<32x32xf32>, tensor<5x32x32xf32>
}
