// The user states how often a loop runs that ends by a test.

// RUN: stablehlo-tools inspect %s --hardware h100 --all | filecheck %s --check-prefix=OPEN
// RUN: stablehlo-tools inspect %s --hardware h100 --trips trips.mlir:33=40 --all | filecheck %s --check-prefix=STATED
// RUN: not stablehlo-tools inspect %s --hardware h100 --trips trips.mlir:3=40 2>&1 | filecheck %s --check-prefix=ELSEWHERE
// RUN: not stablehlo-tools inspect %s --hardware h100 --trips trips.mlir:46=40 2>&1 | filecheck %s --check-prefix=KNOWN
// RUN: not stablehlo-tools inspect %s --trips trips.mlir:33 2>&1 | filecheck %s --check-prefix=FORM
// RUN: not stablehlo-tools inspect %s --trips trips.mlir:33=0 2>&1 | filecheck %s --check-prefix=ZERO
// RUN: not stablehlo-tools optimize %s --target gpu --trips trips.mlir:3=40 2>&1 | filecheck %s --check-prefix=ELSEWHERE

// OPEN: note: {{.*}}trips.mlir:33:10: the number of iterations is unknown: one iteration is timed; state it by --trips trips.mlir:33=N
// OPEN: all_reduce {{.*}} 4 B {{ +}}1 {{.*}}trips.mlir

// STATED-NOT: is unknown
// STATED: all_reduce {{.*}} 4 B {{ +}}40 {{.*}}trips.mlir
// STATED: while {{ +}}40 {{.*}}trips.mlir:33

// ELSEWHERE: error: trips of trips.mlir:3: no loop is there, and 1 in all have no known number of iterations: at trips.mlir:33
// ELSEWHERE: --trips trips.mlir:33=40

// KNOWN: error: trips of trips.mlir:46: the program states that this loop runs 3 times

// FORM: 'trips.mlir:33' is not LOCATION=N

// ZERO: '0' is not a whole number from 1 up

module attributes {mhlo.num_partitions = 4 : i32} {
  func.func public @main(%x: tensor<f32>, %tolerance: tensor<f32>) -> tensor<f32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %three = stablehlo.constant dense<3> : tensor<i32>
    %half = stablehlo.constant dense<0.5> : tensor<f32>
    %r = stablehlo.while(%u = %x) : tensor<f32>
     cond {
      %above = stablehlo.compare GT, %u, %tolerance : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %above : tensor<i1>
    } do {
      %s = "stablehlo.all_reduce"(%u) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %sum = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %sum : tensor<f32>
      }) : (tensor<f32>) -> tensor<f32>
      %less = stablehlo.multiply %s, %half : tensor<f32>
      stablehlo.return %less : tensor<f32>
    }
    %done:2 = stablehlo.while(%i = %zero, %v = %r) : tensor<i32>, tensor<f32>
     cond {
      %below = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %below : tensor<i1>
    } do {
      %next = stablehlo.add %i, %one : tensor<i32>
      %w = stablehlo.multiply %v, %half : tensor<f32>
      stablehlo.return %next, %w : tensor<i32>, tensor<f32>
    }
    return %done#1 : tensor<f32>
  }
}
