// RUN: stablehlo-tools opt %s -p 'split-layers{counts=1,2 loop=0}' --split-input-file | filecheck %s

// With `loop`, a loop over other stacks stays as it is, and takes its stack whole.
// CHECK-LABEL: func.func @two_stacks
// CHECK: stablehlo.while({{.+}} attributes {stablehlo_tools.range = 0 : i64}
// CHECK: %[[LAST:.+]]:4 = stablehlo.while({{.+}} attributes {stablehlo_tools.range = 1 : i64}
// CHECK: stablehlo.while(%{{.+}} = %c, %{{.+}} = %arg2, %{{.+}} = %[[LAST]]#2, %{{.+}} = %{{.+}}) : tensor<i32>, tensor<3x4x4xf32>, tensor<2x4xf32>, tensor<3x2x4xf32>
// CHECK-NOT: attributes
// CHECK: return
func.func @two_stacks(%w: tensor<3x4x4xf32>, %x: tensor<2x4xf32>, %v: tensor<3x4x4xf32>) -> tensor<2x4xf32> {
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
  %other:4 = stablehlo.while(%i = %c0, %ws = %v, %h = %forward#2, %kept = %k0) : tensor<i32>, tensor<3x4x4xf32>, tensor<2x4xf32>, tensor<3x2x4xf32>
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
  return %other#2 : tensor<2x4xf32>
}

// -----

// Other loops over so many rows are no layers: they take no stack of weights.
// CHECK-LABEL: func.func @with_sum
// CHECK: stablehlo.while(%{{.+}} = %c, %{{.+}} = %{{.+}}) : tensor<i32>, tensor<2x4xf32>
// CHECK-NEXT: cond {
// CHECK: stablehlo.while({{.+}} attributes {stablehlo_tools.range = 0 : i64}
func.func @with_sum(%w: tensor<3x4x4xf32>, %x: tensor<2x4xf32>) -> tensor<2x4xf32> {
  %c0 = stablehlo.constant dense<0> : tensor<i32>
  %c1 = stablehlo.constant dense<1> : tensor<i32>
  %c3 = stablehlo.constant dense<3> : tensor<i32>
  %k0 = stablehlo.constant dense<0.0> : tensor<3x2x4xf32>
  %doubled:2 = stablehlo.while(%i = %c0, %h = %x) : tensor<i32>, tensor<2x4xf32>
  cond {
    %more = stablehlo.compare LT, %i, %c3 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %twice = stablehlo.add %h, %h : tensor<2x4xf32>
    %j = stablehlo.add %i, %c1 : tensor<i32>
    stablehlo.return %j, %twice : tensor<i32>, tensor<2x4xf32>
  }
  %forward:4 = stablehlo.while(%i = %c0, %ws = %w, %h = %doubled#1, %kept = %k0) : tensor<i32>, tensor<3x4x4xf32>, tensor<2x4xf32>, tensor<3x2x4xf32>
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
