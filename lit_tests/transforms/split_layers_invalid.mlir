// RUN: stablehlo-tools opt %s -p 'split-layers{counts=1,2}' --split-input-file --verify-diagnostics
// RUN: not stablehlo-tools opt %s -p 'split-layers{counts=3,0}' --split-input-file 2>&1 | filecheck %s --check-prefix=EMPTY
// RUN: not stablehlo-tools opt %s -p 'split-layers{counts=1,2 loop=1}' --split-input-file 2>&1 | filecheck %s --check-prefix=SECOND

// P2: `loop` is the number of a loop over layers.
// SECOND: error: split-layers: loop 1 over layers does not exist: the program has 1 (P2)
func.func @numbered_p2(%w: tensor<3x4x4xf32>, %x: tensor<2x4xf32>) -> tensor<2x4xf32> {
  %c0 = stablehlo.constant dense<0> : tensor<i32>
  %c1 = stablehlo.constant dense<1> : tensor<i32>
  %c3 = stablehlo.constant dense<3> : tensor<i32>
  %k0 = stablehlo.constant dense<0.0> : tensor<3x2x4xf32>
  %forward:4 = stablehlo.while(%i = %c0, %ws = %w, %h = %x, %kept = %k0) : tensor<i32>, tensor<3x4x4xf32>, tensor<2x4xf32>, tensor<3x2x4xf32>
  cond {
    %more = stablehlo.compare LT, %i, %c3 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %ws, %i, %c0, %c0, sizes = [1, 4, 4] : (tensor<3x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
    %one = stablehlo.reshape %row : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
    %next = stablehlo.dot_general %h, %one, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
    %up = stablehlo.reshape %h : (tensor<2x4xf32>) -> tensor<1x2x4xf32>
    %stack = stablehlo.dynamic_update_slice %kept, %up, %i, %c0, %c0 : (tensor<3x2x4xf32>, tensor<1x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x2x4xf32>
    %j = stablehlo.add %i, %c1 : tensor<i32>
    stablehlo.return %j, %ws, %next, %stack : tensor<i32>, tensor<3x4x4xf32>, tensor<2x4xf32>, tensor<3x2x4xf32>
  }
  return %forward#2 : tensor<2x4xf32>
}

// -----

// P1: counts are positive and add up to the trips of a loop over layers.
// EMPTY: error: split-layers: every range needs at least one layer: counts=3, 0 (P1)
// expected-error@+1 {{split-layers: no loop goes over 3 layers, the sum of 1, 2: loops go over 4 (P1)}}
func.func @height_p1(%w: tensor<4x4x4xf32>, %x: tensor<2x4xf32>) -> tensor<2x4xf32> {
  %c0 = stablehlo.constant dense<0> : tensor<i32>
  %c1 = stablehlo.constant dense<1> : tensor<i32>
  %c4 = stablehlo.constant dense<4> : tensor<i32>
  %k0 = stablehlo.constant dense<0.0> : tensor<4x2x4xf32>
  %forward:4 = stablehlo.while(%i = %c0, %ws = %w, %h = %x, %kept = %k0) : tensor<i32>, tensor<4x4x4xf32>, tensor<2x4xf32>, tensor<4x2x4xf32>
  cond {
    %more = stablehlo.compare LT, %i, %c4 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %ws, %i, %c0, %c0, sizes = [1, 4, 4] : (tensor<4x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
    %one = stablehlo.reshape %row : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
    %next = stablehlo.dot_general %h, %one, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
    %up = stablehlo.reshape %h : (tensor<2x4xf32>) -> tensor<1x2x4xf32>
    %stack = stablehlo.dynamic_update_slice %kept, %up, %i, %c0, %c0 : (tensor<4x2x4xf32>, tensor<1x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x2x4xf32>
    %j = stablehlo.add %i, %c1 : tensor<i32>
    stablehlo.return %j, %ws, %next, %stack : tensor<i32>, tensor<4x4x4xf32>, tensor<2x4xf32>, tensor<4x2x4xf32>
  }
  return %forward#2 : tensor<2x4xf32>
}

// -----

// expected-error@+1 {{split-layers: no loop goes over 3 layers, the sum of 1, 2: no loop over layers is left to cut (P1)}}
func.func @none_p1(%x: tensor<4xf32>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}

// -----

// P3: a loop stands where rows are followed.
func.func @named_p3(%w: tensor<3x4x4xf32>, %x: tensor<2x4xf32>) -> tensor<2x4xf32> {
  %out = sdy.named_computation<"layers">(%w, %x) (%v: tensor<3x4x4xf32>, %y: tensor<2x4xf32>) {
    %c0 = stablehlo.constant dense<0> : tensor<i32>
    %c1 = stablehlo.constant dense<1> : tensor<i32>
    %c3 = stablehlo.constant dense<3> : tensor<i32>
    %k0 = stablehlo.constant dense<0.0> : tensor<3x2x4xf32>
    // expected-error@+1 {{split-layers: the loop over layers is inside sdy.named_computation, through which rows cannot be followed (P3)}}
    %forward:4 = stablehlo.while(%i = %c0, %ws = %v, %h = %y, %kept = %k0) : tensor<i32>, tensor<3x4x4xf32>, tensor<2x4xf32>, tensor<3x2x4xf32>
    cond {
      %more = stablehlo.compare LT, %i, %c3 : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    } do {
      %row = stablehlo.dynamic_slice %ws, %i, %c0, %c0, sizes = [1, 4, 4] : (tensor<3x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
      %one = stablehlo.reshape %row : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
      %next = stablehlo.dot_general %h, %one, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
      %up = stablehlo.reshape %h : (tensor<2x4xf32>) -> tensor<1x2x4xf32>
      %stack = stablehlo.dynamic_update_slice %kept, %up, %i, %c0, %c0 : (tensor<3x2x4xf32>, tensor<1x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x2x4xf32>
      %j = stablehlo.add %i, %c1 : tensor<i32>
      stablehlo.return %j, %ws, %next, %stack : tensor<i32>, tensor<3x4x4xf32>, tensor<2x4xf32>, tensor<3x2x4xf32>
    }
    sdy.return %forward#2 : tensor<2x4xf32>
  } : (tensor<3x4x4xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>
  return %out : tensor<2x4xf32>
}
