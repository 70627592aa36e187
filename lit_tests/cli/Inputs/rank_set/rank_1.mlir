module @jit_step attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func public @main(%w0: tensor<1x4x4xf32>) -> (tensor<1x4x4xf32>, tensor<f32>, tensor<f32>) {
  %v1 = stablehlo.after_all : !stablehlo.token
  %v2 = stablehlo.after_all : !stablehlo.token
  %v3 = stablehlo.constant dense<0> : tensor<i32>
  %v4 = stablehlo.constant dense<1> : tensor<i32>
  %v5:2 = func.call @prepare() : () -> (tensor<1x4x4xf32>, tensor<f32>)
  %v6:2 = "stablehlo.recv"(%v1) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, is_host_transfer = false, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}> : (!stablehlo.token) -> (tensor<2x4xf32>, !stablehlo.token)
  %v7:3 = stablehlo.optimization_barrier %v3, %v6#0, %v2 : tensor<i32>, tensor<2x4xf32>, !stablehlo.token
  %v8:1 = func.call @stage_1_forward(%v7#0, %v7#1, %w0) : (tensor<i32>, tensor<2x4xf32>, tensor<1x4x4xf32>) -> (tensor<2x4xf32>)
  %v9:2 = stablehlo.optimization_barrier %v8#0, %v7#2 : tensor<2x4xf32>, !stablehlo.token
  %v10:2 = "stablehlo.recv"(%v6#1) <{channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, is_host_transfer = false, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}> : (!stablehlo.token) -> (tensor<2x4xf32>, !stablehlo.token)
  %v11:4 = stablehlo.optimization_barrier %v3, %v9#0, %v6#0, %v9#1 : tensor<i32>, tensor<2x4xf32>, tensor<2x4xf32>, !stablehlo.token
  %v12:3 = func.call @stage_1_backward(%v11#0, %v11#1, %v11#2, %w0, %v5#0, %v5#1) : (tensor<i32>, tensor<2x4xf32>, tensor<2x4xf32>, tensor<1x4x4xf32>, tensor<1x4x4xf32>, tensor<f32>) -> (tensor<2x4xf32>, tensor<1x4x4xf32>, tensor<f32>)
  %v13:4 = stablehlo.optimization_barrier %v12#0, %v12#1, %v12#2, %v11#3 : tensor<2x4xf32>, tensor<1x4x4xf32>, tensor<f32>, !stablehlo.token
  %v14 = "stablehlo.send"(%v13#0, %v10#1) <{channel_handle = #stablehlo.channel_handle<handle = 3, type = 1>, is_host_transfer = false, source_target_pairs = dense<[[1, 0]]> : tensor<1x2xi64>}> : (tensor<2x4xf32>, !stablehlo.token) -> !stablehlo.token
  %v15:3 = stablehlo.optimization_barrier %v4, %v10#0, %v13#3 : tensor<i32>, tensor<2x4xf32>, !stablehlo.token
  %v16:1 = func.call @stage_1_forward(%v15#0, %v15#1, %w0) : (tensor<i32>, tensor<2x4xf32>, tensor<1x4x4xf32>) -> (tensor<2x4xf32>)
  %v17:2 = stablehlo.optimization_barrier %v16#0, %v15#2 : tensor<2x4xf32>, !stablehlo.token
  %v18:4 = stablehlo.optimization_barrier %v4, %v17#0, %v10#0, %v17#1 : tensor<i32>, tensor<2x4xf32>, tensor<2x4xf32>, !stablehlo.token
  %v19:3 = func.call @stage_1_backward(%v18#0, %v18#1, %v18#2, %w0, %v13#1, %v13#2) : (tensor<i32>, tensor<2x4xf32>, tensor<2x4xf32>, tensor<1x4x4xf32>, tensor<1x4x4xf32>, tensor<f32>) -> (tensor<2x4xf32>, tensor<1x4x4xf32>, tensor<f32>)
  %v20:4 = stablehlo.optimization_barrier %v19#0, %v19#1, %v19#2, %v18#3 : tensor<2x4xf32>, tensor<1x4x4xf32>, tensor<f32>, !stablehlo.token
  %v21 = "stablehlo.send"(%v20#0, %v14) <{channel_handle = #stablehlo.channel_handle<handle = 4, type = 1>, is_host_transfer = false, source_target_pairs = dense<[[1, 0]]> : tensor<1x2xi64>}> : (tensor<2x4xf32>, !stablehlo.token) -> !stablehlo.token
  %v22:3 = func.call @finish_0(%w0, %v20#1, %v20#2) : (tensor<1x4x4xf32>, tensor<1x4x4xf32>, tensor<f32>) -> (tensor<1x4x4xf32>, tensor<f32>, tensor<f32>)
  %v23:2 = "stablehlo.recv"(%v21) <{channel_handle = #stablehlo.channel_handle<handle = 5, type = 1>, is_host_transfer = false, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}> : (!stablehlo.token) -> (tensor<f32>, !stablehlo.token)
  %v24:1 = func.call @finish_1(%v22#2, %v23#0) : (tensor<f32>, tensor<f32>) -> (tensor<f32>)
  return %v22#0, %v22#1, %v24#0 : tensor<1x4x4xf32>, tensor<f32>, tensor<f32>
}
func.func private @prepare() -> (tensor<1x4x4xf32>, tensor<f32>) {
    %z0 = stablehlo.constant dense<0.0> : tensor<1x4x4xf32>
    %z1 = stablehlo.constant dense<0.0> : tensor<f32>
    return %z0, %z1 : tensor<1x4x4xf32>, tensor<f32>
}
func.func private @stage_1_forward(%a0: tensor<i32>, %a1: tensor<2x4xf32>, %a2: tensor<1x4x4xf32>) -> (tensor<2x4xf32>) {
    %w = stablehlo.reshape %a2 : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
    %p = stablehlo.dot_general %a1, %w, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
    %y = stablehlo.tanh %p : tensor<2x4xf32>
    return %y : tensor<2x4xf32>
}
func.func private @stage_1_backward(%a0: tensor<i32>, %a1: tensor<2x4xf32>, %a2: tensor<2x4xf32>, %a3: tensor<1x4x4xf32>, %a4: tensor<1x4x4xf32>, %a5: tensor<f32>) -> (tensor<2x4xf32>, tensor<1x4x4xf32>, tensor<f32>) {
    %w = stablehlo.reshape %a3 : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
    %dy = stablehlo.add %a1, %a1 : tensor<2x4xf32>
    %yy = stablehlo.multiply %a1, %a1 : tensor<2x4xf32>
    %ones = stablehlo.constant dense<1.0> : tensor<2x4xf32>
    %d = stablehlo.subtract %ones, %yy : tensor<2x4xf32>
    %dz = stablehlo.multiply %dy, %d : tensor<2x4xf32>
    %dx = stablehlo.dot_general %dz, %w, contracting_dims = [1] x [1] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
    %g = stablehlo.dot_general %a2, %dz, contracting_dims = [0] x [0] : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<4x4xf32>
    %h = stablehlo.reshape %g : (tensor<4x4xf32>) -> tensor<1x4x4xf32>
    %t = stablehlo.add %a4, %h : tensor<1x4x4xf32>
    %term_zero = stablehlo.constant dense<0.0> : tensor<f32>
    %term = stablehlo.reduce(%yy init: %term_zero) applies stablehlo.add across dimensions = [0, 1] : (tensor<2x4xf32>, tensor<f32>) -> tensor<f32>
    %loss = stablehlo.add %a5, %term : tensor<f32>
    return %dx, %t, %loss : tensor<2x4xf32>, tensor<1x4x4xf32>, tensor<f32>
}
func.func private @finish_0(%a0: tensor<1x4x4xf32>, %a1: tensor<1x4x4xf32>, %a2: tensor<f32>) -> (tensor<1x4x4xf32>, tensor<f32>, tensor<f32>) {
    %n = stablehlo.constant dense<0.0> : tensor<f32>
    %rate = stablehlo.constant dense<0.1> : tensor<1x4x4xf32>
    %step0 = stablehlo.multiply %rate, %a1 : tensor<1x4x4xf32>
    %new0 = stablehlo.subtract %a0, %step0 : tensor<1x4x4xf32>
    %square0 = stablehlo.multiply %a1, %a1 : tensor<1x4x4xf32>
    %part0_zero = stablehlo.constant dense<0.0> : tensor<f32>
    %part0 = stablehlo.reduce(%square0 init: %part0_zero) applies stablehlo.add across dimensions = [0, 1, 2] : (tensor<1x4x4xf32>, tensor<f32>) -> tensor<f32>
    %norm0 = stablehlo.add %n, %part0 : tensor<f32>
    return %new0, %a2, %norm0 : tensor<1x4x4xf32>, tensor<f32>, tensor<f32>
}
func.func private @finish_1(%a0: tensor<f32>, %a1: tensor<f32>) -> (tensor<f32>) {
    %t = stablehlo.add %a1, %a0 : tensor<f32>
    return %t : tensor<f32>
}
}
