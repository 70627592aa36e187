// RUN: stablehlo-tools opt %s -p 'split-layers{counts=1,2}' --split-input-file | filecheck %s
// RUN: stablehlo-tools opt %s -p 'split-layers{counts=1,2 explain}' --split-input-file -o /dev/null 2>&1 | filecheck %s --check-prefix=EXPLAINED

// A training step: the weights are sliced, what the forward keeps goes on to the backward in pieces,
// the backward has the last range first, the new weights are put together where they leave.
// EXPLAINED: note: split-layers: 2 loops over 3 layers become 2 each, over 1, 2; 2 ops on stacks run on pieces
// CHECK-LABEL: func.func @training
// CHECK: %[[W0:.+]] = stablehlo.slice %arg0 [0:1, 0:4, 0:4]
// CHECK-NEXT: %[[W1:.+]] = stablehlo.slice %arg0 [1:3, 0:4, 0:4]
// CHECK: %[[F0:.+]]:4 = stablehlo.while(%{{.+}} = %c, %{{.+}} = %[[W0]], %{{.+}} = %arg1, %{{.+}} = %{{.+}}) : {{.+}} attributes {stablehlo_tools.range = 0 : i64}
// CHECK: %[[END:.+]] = stablehlo.constant dense<1> : tensor<i32>
// CHECK-NEXT: stablehlo.compare LT, %iterArg, %[[END]]
// CHECK: %[[F1:.+]]:4 = stablehlo.while(%{{.+}} = %{{.+}}, %{{.+}} = %[[W1]], %{{.+}} = %[[F0]]#2, %{{.+}} = %{{.+}}) : {{.+}} attributes {stablehlo_tools.range = 1 : i64}
// CHECK: %[[ONE:.+]] = stablehlo.constant dense<1> : tensor<i32>
// CHECK-NEXT: %[[ROW:.+]] = stablehlo.subtract %iterArg, %[[ONE]]
// CHECK-NEXT: stablehlo.dynamic_slice %{{.+}}, %[[ROW]], {{.+}} (tensor<2x4x4xf32>
// CHECK: stablehlo.dynamic_update_slice %{{.+}}, %{{.+}}, %[[ROW]], {{.+}} -> tensor<2x2x4xf32>
// CHECK: %[[B1:.+]]:5 = stablehlo.while(%{{.+}} = %c, %{{.+}} = %[[W1]], %{{.+}} = %[[F1]]#3, %{{.+}} = %[[F1]]#2, %{{.+}} = %{{.+}}) : {{.+}} attributes {stablehlo_tools.range = 1 : i64}
// CHECK: %[[B0:.+]]:5 = stablehlo.while(%{{.+}} = %{{.+}}, %{{.+}} = %[[W0]], %{{.+}} = %[[F0]]#3, %{{.+}} = %[[B1]]#3, %{{.+}} = %{{.+}}) : {{.+}} attributes {stablehlo_tools.range = 0 : i64}
// CHECK-NOT: stablehlo.slice
// CHECK-NOT: stablehlo.concatenate
// CHECK: %[[N0:.+]] = stablehlo.subtract %[[W0]], %[[B0]]#4
// CHECK-NEXT: %[[N1:.+]] = stablehlo.subtract %[[W1]], %[[B1]]#4
// CHECK: %[[S0:.+]] = stablehlo.reduce(%[[B0]]#4
// CHECK: %[[S1:.+]] = stablehlo.reduce(%[[B1]]#4
// CHECK-NEXT: %[[S:.+]] = stablehlo.add %[[S0]], %[[S1]]
// CHECK-NEXT: %[[N:.+]] = stablehlo.concatenate %[[N0]], %[[N1]], dim = 0
// CHECK-NEXT: return %[[N]], %[[S]], %[[B0]]#3
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

// A loop over microbatches around it carries the pieces, the sums of gradients among them.
// CHECK-LABEL: func.func @accumulated
// CHECK: %[[W0:.+]] = stablehlo.slice %arg0 [0:1, 0:4, 0:4]
// CHECK-NEXT: %[[W1:.+]] = stablehlo.slice %arg0 [1:3, 0:4, 0:4]
// CHECK: %[[ALL:.+]]:6 = stablehlo.while({{.+}} = %[[W0]], {{.+}} = %[[W1]], {{.+}}) : tensor<i32>, tensor<2x2x4xf32>, tensor<1x4x4xf32>, tensor<2x4x4xf32>, tensor<1x4x4xf32>, tensor<2x4x4xf32>
// CHECK-NOT: stablehlo.slice
// CHECK: %[[SUMS:.+]] = stablehlo.concatenate %[[ALL]]#4, %[[ALL]]#5, dim = 0
// CHECK-NEXT: return %[[SUMS]]
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

// -----

// What takes rows of several layers at once takes them together.
// CHECK-LABEL: func.func @mixed
// CHECK: %[[D0:.+]] = stablehlo.add %[[W0:.+]], %[[W0]] : tensor<1x4x4xf32>
// CHECK-NEXT: %[[D1:.+]] = stablehlo.add %[[W1:.+]], %[[W1]] : tensor<2x4x4xf32>
// CHECK-NEXT: %[[D:.+]] = stablehlo.concatenate %[[D0]], %[[D1]], dim = 0
// CHECK-NEXT: stablehlo.reverse %[[D]], dims = [0]
func.func @mixed(%w: tensor<3x4x4xf32>, %x: tensor<2x4xf32>) -> (tensor<2x4xf32>, tensor<3x4x4xf32>) {
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
  %double = stablehlo.add %w, %w : tensor<3x4x4xf32>
  %turned = stablehlo.reverse %double, dims = [0] : tensor<3x4x4xf32>
  return %forward#2, %turned : tensor<2x4xf32>, tensor<3x4x4xf32>
}

// -----

// Rows 1 to 4 of a higher stack.
// CHECK-LABEL: func.func @window
// CHECK: stablehlo.slice %arg0 [1:2, 0:4, 0:4]
// CHECK-NEXT: stablehlo.slice %arg0 [2:4, 0:4, 0:4]
// CHECK: %[[TWO:.+]] = stablehlo.constant dense<2> : tensor<i32>
// CHECK-NEXT: stablehlo.subtract %{{.+}}, %[[TWO]]
func.func @window(%w: tensor<5x4x4xf32>, %x: tensor<2x4xf32>) -> (tensor<2x4xf32>, tensor<3x2x4xf32>) {
  %c0 = stablehlo.constant dense<0> : tensor<i32>
  %c1 = stablehlo.constant dense<1> : tensor<i32>
  %c3 = stablehlo.constant dense<3> : tensor<i32>
  %k0 = stablehlo.constant dense<0.0> : tensor<3x2x4xf32>
  %forward:4 = stablehlo.while(%i = %c0, %ws = %w, %h = %x, %kept = %k0) : tensor<i32>, tensor<5x4x4xf32>, tensor<2x4xf32>, tensor<3x2x4xf32>
  cond {
    %more = stablehlo.compare LT, %i, %c3 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %at = stablehlo.add %i, %c1 : tensor<i32>
    %row = stablehlo.dynamic_slice %ws, %at, %c0, %c0, sizes = [1, 4, 4] : (tensor<5x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
    %one = stablehlo.reshape %row : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
    %next = stablehlo.dot_general %h, %one, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
    %up = stablehlo.reshape %h : (tensor<2x4xf32>) -> tensor<1x2x4xf32>
    %stack = stablehlo.dynamic_update_slice %kept, %up, %i, %c0, %c0 : (tensor<3x2x4xf32>, tensor<1x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x2x4xf32>
    %j = stablehlo.add %i, %c1 : tensor<i32>
    stablehlo.return %j, %ws, %next, %stack : tensor<i32>, tensor<5x4x4xf32>, tensor<2x4xf32>, tensor<3x2x4xf32>
  }
  return %forward#2, %forward#3 : tensor<2x4xf32>, tensor<3x2x4xf32>
}
