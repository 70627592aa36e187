module @jit_step attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func public @main(%w0: tensor<1x4x4xf32>, %x: tensor<2x2x4xf32>) -> (tensor<1x4x4xf32>) {
  %v1 = stablehlo.after_all : !stablehlo.token
  %v2 = stablehlo.after_all : !stablehlo.token
  %v3 = stablehlo.constant dense<0> : tensor<i32>
  %v4 = stablehlo.constant dense<1> : tensor<i32>
  %v5:1 = func.call @prepare() : () -> (tensor<1x4x4xf32>)
  %v6:2 = stablehlo.optimization_barrier %v3, %v2 : tensor<i32>, !stablehlo.token
  %v7:1 = func.call @stage_0_forward(%v6#0, %x, %w0) : (tensor<i32>, tensor<2x2x4xf32>, tensor<1x4x4xf32>) -> (tensor<2x4xf32>)
  %v8:2 = stablehlo.optimization_barrier %v7#0, %v6#1 : tensor<2x4xf32>, !stablehlo.token
  %v9 = "stablehlo.send"(%v8#0, %v1) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, is_host_transfer = false, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}> : (tensor<2x4xf32>, !stablehlo.token) -> !stablehlo.token
  %v10:2 = stablehlo.optimization_barrier %v4, %v8#1 : tensor<i32>, !stablehlo.token
  %v11:1 = func.call @stage_0_forward(%v10#0, %x, %w0) : (tensor<i32>, tensor<2x2x4xf32>, tensor<1x4x4xf32>) -> (tensor<2x4xf32>)
  %v12:2 = stablehlo.optimization_barrier %v11#0, %v10#1 : tensor<2x4xf32>, !stablehlo.token
  %v13 = "stablehlo.send"(%v12#0, %v9) <{channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, is_host_transfer = false, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}> : (tensor<2x4xf32>, !stablehlo.token) -> !stablehlo.token
  %v14:2 = "stablehlo.recv"(%v13) <{channel_handle = #stablehlo.channel_handle<handle = 3, type = 1>, is_host_transfer = false, source_target_pairs = dense<[[1, 0]]> : tensor<1x2xi64>}> : (!stablehlo.token) -> (tensor<2x4xf32>, !stablehlo.token)
  %v15:4 = stablehlo.optimization_barrier %v3, %v14#0, %v8#0, %v12#1 : tensor<i32>, tensor<2x4xf32>, tensor<2x4xf32>, !stablehlo.token
  %v16:1 = func.call @stage_0_backward(%v15#0, %v15#1, %v15#2, %x, %w0, %v5#0) : (tensor<i32>, tensor<2x4xf32>, tensor<2x4xf32>, tensor<2x2x4xf32>, tensor<1x4x4xf32>, tensor<1x4x4xf32>) -> (tensor<1x4x4xf32>)
  %v17:2 = stablehlo.optimization_barrier %v16#0, %v15#3 : tensor<1x4x4xf32>, !stablehlo.token
  %v18:2 = "stablehlo.recv"(%v14#1) <{channel_handle = #stablehlo.channel_handle<handle = 4, type = 1>, is_host_transfer = false, source_target_pairs = dense<[[1, 0]]> : tensor<1x2xi64>}> : (!stablehlo.token) -> (tensor<2x4xf32>, !stablehlo.token)
  %v19:4 = stablehlo.optimization_barrier %v4, %v18#0, %v12#0, %v17#1 : tensor<i32>, tensor<2x4xf32>, tensor<2x4xf32>, !stablehlo.token
  %v20:1 = func.call @stage_0_backward(%v19#0, %v19#1, %v19#2, %x, %w0, %v17#0) : (tensor<i32>, tensor<2x4xf32>, tensor<2x4xf32>, tensor<2x2x4xf32>, tensor<1x4x4xf32>, tensor<1x4x4xf32>) -> (tensor<1x4x4xf32>)
  %v21:2 = stablehlo.optimization_barrier %v20#0, %v19#3 : tensor<1x4x4xf32>, !stablehlo.token
  %v22:2 = func.call @finish_0(%w0, %v21#0) : (tensor<1x4x4xf32>, tensor<1x4x4xf32>) -> (tensor<1x4x4xf32>, tensor<f32>)
  %v23 = "stablehlo.send"(%v22#1, %v18#1) <{channel_handle = #stablehlo.channel_handle<handle = 5, type = 1>, is_host_transfer = false, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}> : (tensor<f32>, !stablehlo.token) -> !stablehlo.token
  return %v22#0 : tensor<1x4x4xf32>
}
func.func private @prepare() -> (tensor<1x4x4xf32>) {
    %z0 = stablehlo.constant dense<0.0> : tensor<1x4x4xf32>
    return %z0 : tensor<1x4x4xf32>
}
func.func private @stage_0_forward(%a0: tensor<i32>, %a1: tensor<2x2x4xf32>, %a2: tensor<1x4x4xf32>) -> (tensor<2x4xf32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.dynamic_slice %a1, %a0, %zero, %zero, sizes = [1, 2, 4] : (tensor<2x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
    %x = stablehlo.reshape %one : (tensor<1x2x4xf32>) -> tensor<2x4xf32>
    %w = stablehlo.reshape %a2 : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
    %p = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
    %y = stablehlo.tanh %p : tensor<2x4xf32>
    return %y : tensor<2x4xf32>
}
func.func private @stage_0_backward(%a0: tensor<i32>, %a1: tensor<2x4xf32>, %a2: tensor<2x4xf32>, %a3: tensor<2x2x4xf32>, %a4: tensor<1x4x4xf32>, %a5: tensor<1x4x4xf32>) -> (tensor<1x4x4xf32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.dynamic_slice %a3, %a0, %zero, %zero, sizes = [1, 2, 4] : (tensor<2x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
    %x = stablehlo.reshape %one : (tensor<1x2x4xf32>) -> tensor<2x4xf32>
    %w = stablehlo.reshape %a4 : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
    %yy = stablehlo.multiply %a2, %a2 : tensor<2x4xf32>
    %ones = stablehlo.constant dense<1.0> : tensor<2x4xf32>
    %d = stablehlo.subtract %ones, %yy : tensor<2x4xf32>
    %dz = stablehlo.multiply %a1, %d : tensor<2x4xf32>
    %g = stablehlo.dot_general %x, %dz, contracting_dims = [0] x [0] : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<4x4xf32>
    %h = stablehlo.reshape %g : (tensor<4x4xf32>) -> tensor<1x4x4xf32>
    %t = stablehlo.add %a5, %h : tensor<1x4x4xf32>
    return %t : tensor<1x4x4xf32>
}
func.func private @finish_0(%a0: tensor<1x4x4xf32>, %a1: tensor<1x4x4xf32>) -> (tensor<1x4x4xf32>, tensor<f32>) {
    %n = stablehlo.constant dense<0.0> : tensor<f32>
    %rate = stablehlo.constant dense<0.1> : tensor<1x4x4xf32>
    %step0 = stablehlo.multiply %rate, %a1 : tensor<1x4x4xf32>
    %new0 = stablehlo.subtract %a0, %step0 : tensor<1x4x4xf32>
    %square0 = stablehlo.multiply %a1, %a1 : tensor<1x4x4xf32>
    %part0_zero = stablehlo.constant dense<0.0> : tensor<f32>
    %part0 = stablehlo.reduce(%square0 init: %part0_zero) applies stablehlo.add across dimensions = [0, 1, 2] : (tensor<1x4x4xf32>, tensor<f32>) -> tensor<f32>
    %norm0 = stablehlo.add %n, %part0 : tensor<f32>
    return %new0, %norm0 : tensor<1x4x4xf32>, tensor<f32>
}
}
