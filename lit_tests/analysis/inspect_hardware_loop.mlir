// RUN: stablehlo-tools inspect %s --hardware %{inputs}/round.toml --all | filecheck %s

// A loop is kept as one: its collective runs five times, each time waited for at once, since all of
// the iteration needs it. The weights are ready early in the iteration before.

// CHECK: total 241 us compute 219 us, communication 22.5 us
// CHECK: 0 all_gather {0,1} - f32 800 B 5 22.5 us 22.5 us - 0 % inspect_hardware_loop.mlir:
// CHECK: reasons why no order hides these whole:
// CHECK-NEXT: #0: only 8 ns of compute in this iteration is independent of it; the previous iteration computes its operand early: it could be issued there
// CHECK: loop trips time an iteration place
// CHECK-NEXT: while 5 241 us 48.1 us inspect_hardware_loop.mlir:
module attributes {mhlo.num_partitions = 2 : i32} {
  func.func @main(%x: tensor<100xf32>, %w: tensor<5x100xf32>,
                  %m: tensor<100x100xf32>) -> tensor<100xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %r:3 = stablehlo.while(%i = %zero, %a = %x, %v = %w)
        : tensor<i32>, tensor<100xf32>, tensor<5x100xf32>
    cond {
      %n = stablehlo.constant dense<5> : tensor<i32>
      %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %one = stablehlo.constant dense<1> : tensor<i32>
      %z = stablehlo.constant dense<0> : tensor<i32>
      %j = stablehlo.add %i, %one : tensor<i32>
      %s = stablehlo.dynamic_slice %v, %i, %z, sizes = [1, 100]
           : (tensor<5x100xf32>, tensor<i32>, tensor<i32>) -> tensor<1x100xf32>
      %b = stablehlo.reshape %s : (tensor<1x100xf32>) -> tensor<100xf32>
      %g = "stablehlo.all_gather"(%b) {
        all_gather_dim = 0 : i64,
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
        replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids
      } : (tensor<100xf32>) -> tensor<200xf32>
      %h = stablehlo.slice %g [0:100] : (tensor<200xf32>) -> tensor<100xf32>
      %p = stablehlo.dot_general %h, %m, contracting_dims = [0] x [0]
           : (tensor<100xf32>, tensor<100x100xf32>) -> tensor<100xf32>
      %k = stablehlo.add %a, %p : tensor<100xf32>
      stablehlo.return %j, %k, %v : tensor<i32>, tensor<100xf32>, tensor<5x100xf32>
    }
    return %r#1 : tensor<100xf32>
  }
}
