// A training step of two layers that adds up the gradients of 4 microbatches of 2 samples.
module @step attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%w0: tensor<8x8xf32>, %w1: tensor<8x8xf32>, %x: tensor<4x2x8xf32>) -> (tensor<8x8xf32>, tensor<8x8xf32>, tensor<f32>) {
    %zeros = stablehlo.constant dense<0.0> : tensor<8x8xf32>
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %c0 = stablehlo.constant dense<0> : tensor<i32>
    %c1 = stablehlo.constant dense<1> : tensor<i32>
    %c4 = stablehlo.constant dense<4> : tensor<i32>
    %r:4 = stablehlo.while(%i = %c0, %g0 = %zeros, %g1 = %zeros, %l = %zero) : tensor<i32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<f32>
    cond {
      %more = stablehlo.compare LT, %i, %c4 : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    } do {
      %row = stablehlo.dynamic_slice %x, %i, %c0, %c0, sizes = [1, 2, 8] : (tensor<4x2x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x8xf32>
      %samples = stablehlo.reshape %row : (tensor<1x2x8xf32>) -> tensor<2x8xf32>
      %a = stablehlo.dot_general %samples, %w0, contracting_dims = [1] x [0] : (tensor<2x8xf32>, tensor<8x8xf32>) -> tensor<2x8xf32>
      %h = stablehlo.tanh %a : tensor<2x8xf32>
      %y = stablehlo.dot_general %h, %w1, contracting_dims = [1] x [0] : (tensor<2x8xf32>, tensor<8x8xf32>) -> tensor<2x8xf32>
      %squares = stablehlo.multiply %y, %y : tensor<2x8xf32>
      %loss = stablehlo.reduce(%squares init: %zero) applies stablehlo.add across dimensions = [0, 1] : (tensor<2x8xf32>, tensor<f32>) -> tensor<f32>
      %dy = stablehlo.add %y, %y : tensor<2x8xf32>
      %dw1 = stablehlo.dot_general %h, %dy, contracting_dims = [0] x [0] : (tensor<2x8xf32>, tensor<2x8xf32>) -> tensor<8x8xf32>
      %dh = stablehlo.dot_general %dy, %w1, contracting_dims = [1] x [1] : (tensor<2x8xf32>, tensor<8x8xf32>) -> tensor<2x8xf32>
      %hh = stablehlo.multiply %h, %h : tensor<2x8xf32>
      %gone = stablehlo.multiply %dh, %hh : tensor<2x8xf32>
      %da = stablehlo.subtract %dh, %gone : tensor<2x8xf32>
      %dw0 = stablehlo.dot_general %samples, %da, contracting_dims = [0] x [0] : (tensor<2x8xf32>, tensor<2x8xf32>) -> tensor<8x8xf32>
      %next = stablehlo.add %i, %c1 : tensor<i32>
      %s0 = stablehlo.add %g0, %dw0 : tensor<8x8xf32>
      %s1 = stablehlo.add %g1, %dw1 : tensor<8x8xf32>
      %sl = stablehlo.add %l, %loss : tensor<f32>
      stablehlo.return %next, %s0, %s1, %sl : tensor<i32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<f32>
    }
    %new0 = stablehlo.subtract %w0, %r#1 : tensor<8x8xf32>
    %new1 = stablehlo.subtract %w1, %r#2 : tensor<8x8xf32>
    return %new0, %new1, %r#3 : tensor<8x8xf32>, tensor<8x8xf32>, tensor<f32>
  }
}
