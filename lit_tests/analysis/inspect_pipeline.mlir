// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=4}' \
// RUN:   | stablehlo-tools inspect - | filecheck %s
// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=4},partition' \
// RUN:   | stablehlo-tools inspect - | filecheck %s
// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=4 schedule=circular repeats=2}' \
// RUN:   | stablehlo-tools inspect - --json | filecheck %s --check-prefix=JSON
// RUN: stablehlo-tools inspect %s | filecheck %s --check-prefix=BEFORE

// A pipeline is read back from its table, in the program for all ranks and in that of one: four
// microbatches go through two ranks in five ticks, and the bubble is as small as GPipe's can be.

// CHECK: pipeline over "stage": gpipe, 2 ranks of 1 chunk of 2 layers, 4 microbatches
// CHECK-NEXT: bubble 20.0 %: 2 of 10 cells in 5 ticks have no work; closed form (S - 1) / (MV + S - 1) = 20.0 %
// CHECK-NEXT: garbage computed in cells without work
// CHECK-NEXT: permuted forward 64 B a tick; 320 B in all, 40.0 % of it read
// CHECK-NEXT: received forward 64 B in 1 slot
// CHECK-NEXT: weights 512 B
// CHECK-NEXT: reduced 256 B, by 1 reduction over the ranks at the end
// CHECK: 0 2 4 ticks
// CHECK-NEXT: r0 F0--F1--F2--F3--....
// CHECK-NEXT: r1 ....F0--F1--F2--F3--

// JSON: "pipelines": [
// JSON: "kind": "circular"
// JSON: "axis": "stage"
// JSON: "chunks": 2
// JSON: "ticks": 9
// JSON: "closed_form": 0.11111111111111
// JSON: "timeline": [
// JSON: "0F0"

// A loop over layers is no pipeline.

// BEFORE-NOT: pipeline over
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @main(%weights: tensor<4x8x8xf32>, %x: tensor<8x8xf32>) -> tensor<8x8xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %r:3 = stablehlo.while(%i = %zero, %h = %x, %w = %weights)
        : tensor<i32>, tensor<8x8xf32>, tensor<4x8x8xf32>
    cond {
      %n = stablehlo.constant dense<4> : tensor<i32>
      %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %one = stablehlo.constant dense<1> : tensor<i32>
      %z = stablehlo.constant dense<0> : tensor<i32>
      %s = stablehlo.dynamic_slice %w, %i, %z, %z, sizes = [1, 8, 8]
           : (tensor<4x8x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x8xf32>
      %m = stablehlo.reshape %s : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
      %d = stablehlo.dot_general %h, %m, contracting_dims = [1] x [0]
           : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
      %t = stablehlo.tanh %d : tensor<8x8xf32>
      %j = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %j, %t, %w : tensor<i32>, tensor<8x8xf32>, tensor<4x8x8xf32>
    }
    return %r#1 : tensor<8x8xf32>
  }
}
