// RUN: stablehlo-tools opt %s -p roll-layers --split-input-file | filecheck %s
// RUN: stablehlo-tools opt %s -p 'roll-layers{explain}' --split-input-file -o %t.mlir 2>&1 | filecheck %s --check-prefix=EXPLAINED
// EXPLAINED: note: roll-layers: 3 times 4 ops become a loop: it carries 1 values, reads 1 stacks, and writes 2
// EXPLAINED: note: roll-layers: 3 times 3 ops become a loop from the last to the first: it carries 1 values, reads 3 stacks, and writes 1
// EXPLAINED: note: roll-layers: 3 times 2 ops become a loop: it carries 1 values, reads 1 stacks, and writes 0
// EXPLAINED: note: roll-layers: 3 times 3 ops become a loop: it carries 2 values, reads 1 stacks, and writes 0
// EXPLAINED: note: roll-layers: 3 times 2 ops become a loop: it carries 1 values, reads 1 stacks, and writes 0

// Three layers, each with a backward that reads what its forward left. The last iteration of the
// backward has no cotangent to hand on: nothing asked for it.
// CHECK-LABEL: func.func @main
// CHECK: %[[WEIGHTS:.+]] = stablehlo.concatenate
// CHECK-SAME: -> tensor<3x4x4xf32>
// CHECK: %[[FORWARD:.+]]:5 = stablehlo.while(
// CHECK-SAME: %[[WEIGHTS]])
// CHECK: stablehlo.tanh
// CHECK-NOT: stablehlo.tanh
// CHECK: %[[BACKWARD:.+]]:6 = stablehlo.while(
// CHECK-SAME: %[[FORWARD]]#1
// CHECK-SAME: %[[WEIGHTS]])
// CHECK: stablehlo.subtract %{{.+}} : tensor<i32>
// CHECK: stablehlo.slice %[[BACKWARD]]#2 [2:3, 0:4, 0:4]
// CHECK: stablehlo.slice %[[BACKWARD]]#2 [1:2, 0:4, 0:4]
// CHECK: stablehlo.slice %[[BACKWARD]]#2 [0:1, 0:4, 0:4]
// CHECK: return %{{.+}}, %{{.+}}, %{{.+}}, %[[FORWARD]]#1
func.func @main(%x: tensor<2x4xf32>, %w0: tensor<4x4xf32>, %w1: tensor<4x4xf32>, %w2: tensor<4x4xf32>) -> (tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>, tensor<2x4xf32>) {
  %ones = stablehlo.constant dense<1.0> : tensor<2x4xf32>
  %d0 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h0 = stablehlo.tanh %d0 : tensor<2x4xf32>
  %q0 = stablehlo.multiply %h0, %h0 : tensor<2x4xf32>
  %s0 = stablehlo.subtract %ones, %q0 : tensor<2x4xf32>
  %d1 = stablehlo.dot_general %h0, %w1, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h1 = stablehlo.tanh %d1 : tensor<2x4xf32>
  %q1 = stablehlo.multiply %h1, %h1 : tensor<2x4xf32>
  %s1 = stablehlo.subtract %ones, %q1 : tensor<2x4xf32>
  %d2 = stablehlo.dot_general %h1, %w2, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h2 = stablehlo.tanh %d2 : tensor<2x4xf32>
  %q2 = stablehlo.multiply %h2, %h2 : tensor<2x4xf32>
  %s2 = stablehlo.subtract %ones, %q2 : tensor<2x4xf32>
  %g2 = stablehlo.multiply %h2, %s2 : tensor<2x4xf32>
  %dw2 = stablehlo.dot_general %h1, %g2, contracting_dims = [0] x [0] : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<4x4xf32>
  %dx2 = stablehlo.dot_general %g2, %w2, contracting_dims = [1] x [1] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %g1 = stablehlo.multiply %dx2, %s1 : tensor<2x4xf32>
  %dw1 = stablehlo.dot_general %h0, %g1, contracting_dims = [0] x [0] : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<4x4xf32>
  %dx1 = stablehlo.dot_general %g1, %w1, contracting_dims = [1] x [1] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %g0 = stablehlo.multiply %dx1, %s0 : tensor<2x4xf32>
  %dw0 = stablehlo.dot_general %x, %g0, contracting_dims = [0] x [0] : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<4x4xf32>
  return %dw0, %dw1, %dw2, %h2 : tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>, tensor<2x4xf32>
}

// -----

// Weights that are stacked already, of which the layers take rows.
// CHECK-LABEL: func.func @rows
// CHECK-NOT: stablehlo.concatenate
// CHECK: stablehlo.while({{.+}} = %arg1)
// CHECK: stablehlo.dynamic_slice
// CHECK: stablehlo.dot_general
// CHECK-NOT: stablehlo.dot_general
func.func @rows(%x: tensor<2x4xf32>, %ws: tensor<3x4x4xf32>) -> tensor<2x4xf32> {
  %r0 = stablehlo.slice %ws [0:1, 0:4, 0:4] : (tensor<3x4x4xf32>) -> tensor<1x4x4xf32>
  %w0 = stablehlo.reshape %r0 : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
  %d0 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h0 = stablehlo.tanh %d0 : tensor<2x4xf32>
  %r1 = stablehlo.slice %ws [1:2, 0:4, 0:4] : (tensor<3x4x4xf32>) -> tensor<1x4x4xf32>
  %w1 = stablehlo.reshape %r1 : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
  %d1 = stablehlo.dot_general %h0, %w1, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h1 = stablehlo.tanh %d1 : tensor<2x4xf32>
  %r2 = stablehlo.slice %ws [2:3, 0:4, 0:4] : (tensor<3x4x4xf32>) -> tensor<1x4x4xf32>
  %w2 = stablehlo.reshape %r2 : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
  %d2 = stablehlo.dot_general %h1, %w2, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h2 = stablehlo.tanh %d2 : tensor<2x4xf32>
  return %h2 : tensor<2x4xf32>
}

// -----

// A sum over layers has nothing to add to in the first: the loop begins with -0.0.
// CHECK-LABEL: func.func @summed
// CHECK: %[[NOTHING:.+]] = stablehlo.constant dense<-0.000000e+00> : tensor<2x4xf32>
// CHECK: stablehlo.while({{.+}} = %[[NOTHING]]
// CHECK: stablehlo.add %{{.+}}, %{{.+}} : tensor<2x4xf32>
// CHECK-NOT: stablehlo.add %{{.+}}, %{{.+}} : tensor<2x4xf32>
func.func @summed(%x: tensor<2x4xf32>, %w0: tensor<4x4xf32>, %w1: tensor<4x4xf32>, %w2: tensor<4x4xf32>) -> (tensor<2x4xf32>, tensor<2x4xf32>) {
  %d0 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h0 = stablehlo.tanh %d0 : tensor<2x4xf32>
  %d1 = stablehlo.dot_general %h0, %w1, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h1 = stablehlo.tanh %d1 : tensor<2x4xf32>
  %s1 = stablehlo.add %h0, %h1 : tensor<2x4xf32>
  %d2 = stablehlo.dot_general %h1, %w2, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h2 = stablehlo.tanh %d2 : tensor<2x4xf32>
  %s2 = stablehlo.add %s1, %h2 : tensor<2x4xf32>
  return %h2, %s2 : tensor<2x4xf32>, tensor<2x4xf32>
}

// -----

// Branches of a layer take what is the layer's own, too.
// CHECK-LABEL: func.func @regions
// CHECK: stablehlo.while(%{{.+}} = %{{.+}}, %[[H:.+]] = %arg0, %{{.+}} = %{{.+}})
// CHECK: %[[D:.+]] = stablehlo.dot_general %[[H]], %[[W:[^ ]+]],
// CHECK: "stablehlo.if"(%arg1)
// CHECK: stablehlo.add %[[D]], %[[H]]
// CHECK: stablehlo.dot_general %[[D]], %[[W]],
// CHECK-NOT: stablehlo.if
func.func @regions(%x: tensor<2x4xf32>, %p: tensor<i1>, %w0: tensor<4x4xf32>, %w1: tensor<4x4xf32>, %w2: tensor<4x4xf32>) -> tensor<2x4xf32> {
  %d0 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h0 = "stablehlo.if"(%p) ({
    %a = stablehlo.add %d0, %x : tensor<2x4xf32>
    stablehlo.return %a : tensor<2x4xf32>
  }, { 
    %a = stablehlo.dot_general %d0, %w0, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
    stablehlo.return %a : tensor<2x4xf32> }) : (tensor<i1>) -> tensor<2x4xf32>
  %d1 = stablehlo.dot_general %h0, %w1, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h1 = "stablehlo.if"(%p) ({
    %a = stablehlo.add %d1, %h0 : tensor<2x4xf32>
    stablehlo.return %a : tensor<2x4xf32>
  }, { 
    %a = stablehlo.dot_general %d1, %w1, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
    stablehlo.return %a : tensor<2x4xf32> }) : (tensor<i1>) -> tensor<2x4xf32>
  %d2 = stablehlo.dot_general %h1, %w2, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %h2 = "stablehlo.if"(%p) ({
    %a = stablehlo.add %d2, %h1 : tensor<2x4xf32>
    stablehlo.return %a : tensor<2x4xf32>
  }, { 
    %a = stablehlo.dot_general %d2, %w2, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
    stablehlo.return %a : tensor<2x4xf32> }) : (tensor<i1>) -> tensor<2x4xf32>
  return %h2 : tensor<2x4xf32>
}
