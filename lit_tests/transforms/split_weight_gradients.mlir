// RUN: stablehlo-tools opt %s -p split-weight-gradients --split-input-file | filecheck %s
// RUN: stablehlo-tools opt %s -p 'split-weight-gradients{explain}' --split-input-file -o /dev/null 2>&1 | filecheck %s --check-prefix=EXPLAINED
// RUN: stablehlo-tools opt %s -p 'split-layers{counts=1,2},split-weight-gradients' --split-input-file | filecheck %s --check-prefix=RANGES

// The chain stores the cotangents; behind it, the gradients are made of them and of what the forward
// has kept.
// EXPLAINED: note: split-weight-gradients: 1 results of a loop over 3 layers move to a loop after it, which needs 1 values (32 bytes) that each iteration stores
// CHECK-LABEL: func.func @training
// CHECK: %[[F:.+]]:4 = stablehlo.while(
// CHECK: %[[ROOM:.+]] = stablehlo.broadcast_in_dim %{{.+}}, dims = [] : (tensor<f32>) -> tensor<3x2x4xf32>
// CHECK: %[[CHAIN:.+]]:4 = stablehlo.while(%{{.+}} = %c, %{{.+}} = %arg0, %[[D:.+]] = %[[F]]#2, %[[STORED:.+]] = %[[ROOM]])
// CHECK-NOT: contracting_dims = [0] x [0]
// CHECK: stablehlo.dot_general %[[D]], %{{.+}}, contracting_dims = [1] x [1]
// CHECK: %[[UP:.+]] = stablehlo.reshape %[[D]] : (tensor<2x4xf32>) -> tensor<1x2x4xf32>
// CHECK: stablehlo.dynamic_update_slice %[[STORED]], %[[UP]]
// CHECK: %[[W:.+]]:4 = stablehlo.while(%{{.+}} = %c, %{{.+}} = %[[F]]#3, %[[DW:.+]] = %{{.+}}, %[[ROWS:.+]] = %[[CHAIN]]#3)
// CHECK: %[[DOWN:.+]] = stablehlo.dynamic_slice %[[ROWS]]
// CHECK: %[[DY:.+]] = stablehlo.reshape %[[DOWN]]
// CHECK: stablehlo.dot_general %{{.+}}, %[[DY]], contracting_dims = [0] x [0]
// CHECK: stablehlo.dynamic_update_slice %[[DW]]
// CHECK: stablehlo.subtract %arg0, %[[W]]#2
// CHECK: return %{{.+}}, %{{.+}}, %[[CHAIN]]#2

// In each range, of one layer too, with the mark on both loops.
// RANGES-LABEL: func.func @training
// RANGES-COUNT-2: stablehlo.while
// RANGES: stablehlo.while({{.+}} attributes {stablehlo_tools.range = 1 : i64}
// RANGES-NOT: contracting_dims = [0] x [0]
// RANGES: stablehlo.while({{.+}} attributes {stablehlo_tools.range = 1 : i64}
// RANGES: contracting_dims = [0] x [0]
// RANGES: stablehlo.while({{.+}} attributes {stablehlo_tools.range = 0 : i64}
// RANGES-NOT: contracting_dims = [0] x [0]
// RANGES: stablehlo.while({{.+}} attributes {stablehlo_tools.range = 0 : i64}
// RANGES: contracting_dims = [0] x [0]
func.func @training(%w: tensor<3x4x4xf32>, %x: tensor<2x4xf32>) -> (tensor<3x4x4xf32>, tensor<f32>, tensor<2x4xf32>) {
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
  %g0 = stablehlo.constant dense<0.0> : tensor<3x4x4xf32>
  %backward:5 = stablehlo.while(%i = %c0, %ws = %w, %kept = %forward#3, %d = %forward#2, %dws = %g0) : tensor<i32>, tensor<3x4x4xf32>, tensor<3x2x4xf32>, tensor<2x4xf32>, tensor<3x4x4xf32>
  cond {
    %more = stablehlo.compare LT, %i, %c3 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %c2 = stablehlo.constant dense<2> : tensor<i32>
    %r = stablehlo.subtract %c2, %i : tensor<i32>
    %row = stablehlo.dynamic_slice %ws, %r, %c0, %c0, sizes = [1, 4, 4] : (tensor<3x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
    %one = stablehlo.reshape %row : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
    %in = stablehlo.dynamic_slice %kept, %r, %c0, %c0, sizes = [1, 2, 4] : (tensor<3x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
    %h = stablehlo.reshape %in : (tensor<1x2x4xf32>) -> tensor<2x4xf32>
    %dw = stablehlo.dot_general %h, %d, contracting_dims = [0] x [0] : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<4x4xf32>
    %dx = stablehlo.dot_general %d, %one, contracting_dims = [1] x [1] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
    %up = stablehlo.reshape %dw : (tensor<4x4xf32>) -> tensor<1x4x4xf32>
    %stack = stablehlo.dynamic_update_slice %dws, %up, %r, %c0, %c0 : (tensor<3x4x4xf32>, tensor<1x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x4x4xf32>
    %j = stablehlo.add %i, %c1 : tensor<i32>
    stablehlo.return %j, %ws, %kept, %dx, %stack : tensor<i32>, tensor<3x4x4xf32>, tensor<3x2x4xf32>, tensor<2x4xf32>, tensor<3x4x4xf32>
  }
  %next = stablehlo.subtract %w, %backward#4 : tensor<3x4x4xf32>
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %sum = stablehlo.reduce(%backward#4 init: %zero) applies stablehlo.add across dimensions = [0, 1, 2] : (tensor<3x4x4xf32>, tensor<f32>) -> tensor<f32>
  return %next, %sum, %backward#3 : tensor<3x4x4xf32>, tensor<f32>, tensor<2x4xf32>
}

// -----

// A loop over microbatches around it: both loops are in it.
// CHECK-LABEL: func.func @accumulated
// CHECK: %{{.+}}:4 = stablehlo.while(
// CHECK-COUNT-3: stablehlo.while(
func.func @accumulated(%w: tensor<3x4x4xf32>, %xs: tensor<2x2x4xf32>) -> tensor<3x4x4xf32> {
  %c0 = stablehlo.constant dense<0> : tensor<i32>
  %c1 = stablehlo.constant dense<1> : tensor<i32>
  %c3 = stablehlo.constant dense<3> : tensor<i32>
  %k0 = stablehlo.constant dense<0.0> : tensor<3x2x4xf32>
  %parts = stablehlo.constant dense<2> : tensor<i32>
  %a0 = stablehlo.constant dense<0.0> : tensor<3x4x4xf32>
  %all:4 = stablehlo.while(%m = %c0, %v = %w, %batch = %xs, %sums = %a0) : tensor<i32>, tensor<3x4x4xf32>, tensor<2x2x4xf32>, tensor<3x4x4xf32>
  cond {
    %go = stablehlo.compare LT, %m, %parts : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %go : tensor<i1>
  } do {
    %part = stablehlo.dynamic_slice %batch, %m, %c0, %c0, sizes = [1, 2, 4] : (tensor<2x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
    %x = stablehlo.reshape %part : (tensor<1x2x4xf32>) -> tensor<2x4xf32>
    %forward:4 = stablehlo.while(%i = %c0, %ws = %v, %h = %x, %kept = %k0) : tensor<i32>, tensor<3x4x4xf32>, tensor<2x4xf32>, tensor<3x2x4xf32>
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
    %g0 = stablehlo.constant dense<0.0> : tensor<3x4x4xf32>
    %backward:5 = stablehlo.while(%i = %c0, %ws = %v, %kept = %forward#3, %d = %forward#2, %dws = %g0) : tensor<i32>, tensor<3x4x4xf32>, tensor<3x2x4xf32>, tensor<2x4xf32>, tensor<3x4x4xf32>
    cond {
      %more = stablehlo.compare LT, %i, %c3 : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    } do {
      %c2 = stablehlo.constant dense<2> : tensor<i32>
      %r = stablehlo.subtract %c2, %i : tensor<i32>
      %row = stablehlo.dynamic_slice %ws, %r, %c0, %c0, sizes = [1, 4, 4] : (tensor<3x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
      %one = stablehlo.reshape %row : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
      %in = stablehlo.dynamic_slice %kept, %r, %c0, %c0, sizes = [1, 2, 4] : (tensor<3x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
      %h = stablehlo.reshape %in : (tensor<1x2x4xf32>) -> tensor<2x4xf32>
      %dw = stablehlo.dot_general %h, %d, contracting_dims = [0] x [0] : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<4x4xf32>
      %dx = stablehlo.dot_general %d, %one, contracting_dims = [1] x [1] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
      %up = stablehlo.reshape %dw : (tensor<4x4xf32>) -> tensor<1x4x4xf32>
      %stack = stablehlo.dynamic_update_slice %dws, %up, %r, %c0, %c0 : (tensor<3x4x4xf32>, tensor<1x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x4x4xf32>
      %j = stablehlo.add %i, %c1 : tensor<i32>
      stablehlo.return %j, %ws, %kept, %dx, %stack : tensor<i32>, tensor<3x4x4xf32>, tensor<3x2x4xf32>, tensor<2x4xf32>, tensor<3x4x4xf32>
    }
    %added = stablehlo.add %sums, %backward#4 : tensor<3x4x4xf32>
    %n = stablehlo.add %m, %c1 : tensor<i32>
    stablehlo.return %n, %v, %batch, %added : tensor<i32>, tensor<3x4x4xf32>, tensor<2x2x4xf32>, tensor<3x4x4xf32>
  }
  return %all#3 : tensor<3x4x4xf32>
}
