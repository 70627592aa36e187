// RUN: stablehlo-tools opt %s --split-input-file > %t.before.mlir
// RUN: stablehlo-tools opt %s -p 'decompose-collective-permute{form=collective-permute validity explain}' --split-input-file 2>&1 >%t.after.mlir | filecheck %s
// RUN: diff %t.before.mlir %t.after.mlir

// CHECK: note: collective_permute: every edge is needed in every iteration
// CHECK: note: collective_permute: no transfer is skipped: the number of iterations of its loop is unknown before the run, or differs by device
// CHECK: note: collective_permute: every edge is needed in every iteration
// CHECK: note: collective_permute: no transfer is skipped: it is in a branch on the iteration already
// CHECK-NOT: note:

// Sends and recvs are those of the pass without the option.
// RUN: stablehlo-tools opt %s -p break-permute-cycles,decompose-collective-permute --split-input-file > %t.plain.mlir
// RUN: stablehlo-tools opt %s -p 'break-permute-cycles,decompose-collective-permute{validity}' --split-input-file | diff %t.plain.mlir -

// A ring goes round in full, and its last data is put out; the called function stays.
module @ring attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %seven = stablehlo.constant dense<7> : tensor<i32>
  %w:2 = stablehlo.while(%i = %zero, %p = %x) : tensor<i32>, tensor<2xf32>
  cond {
    %c = stablehlo.compare LT, %i, %seven : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %j = stablehlo.add %i, %one : tensor<i32>
    %q = func.call @round(%p) : (tensor<2xf32>) -> tensor<2xf32>
    stablehlo.return %j, %q : tensor<i32>, tensor<2xf32>
  }
  return %w#1 : tensor<2xf32>
}
func.func private @round(%p: tensor<2xf32>) -> tensor<2xf32> {
  %q = "stablehlo.collective_permute"(%p) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2], [2, 3], [3, 0]]> : tensor<4x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
  return %q : tensor<2xf32>
}
}

// -----

// Nobody knows how often this loop runs.
module @until_small attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<f32>) -> tensor<f32> {
  %one = stablehlo.constant dense<1.0> : tensor<f32>
  %w = stablehlo.while(%p = %x) : tensor<f32>
  cond {
    %c = stablehlo.compare GT, %p, %one : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %q = "stablehlo.collective_permute"(%p) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2], [2, 3]]> : tensor<3x2xi64>} : (tensor<f32>) -> tensor<f32>
    stablehlo.return %q : tensor<f32>
  }
  return %w : tensor<f32>
}
}

// -----

// A product with zero is no proof: of a NaN it is NaN.
module @times_zero attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %seven = stablehlo.constant dense<7> : tensor<i32>
  %nothing = stablehlo.constant dense<0.0> : tensor<2xf32>
  %w:2 = stablehlo.while(%i = %zero, %p = %x) : tensor<i32>, tensor<2xf32>
  cond {
    %c = stablehlo.compare LT, %i, %seven : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %j = stablehlo.add %i, %one : tensor<i32>
    %q = "stablehlo.collective_permute"(%p) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2], [2, 3]]> : tensor<3x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
    %r = stablehlo.multiply %q, %nothing : tensor<2xf32>
    %s = stablehlo.add %p, %r : tensor<2xf32>
    stablehlo.return %j, %s : tensor<i32>, tensor<2xf32>
  }
  return %w#1 : tensor<2xf32>
}
}

// -----

// What was written by a first run; the last round is not needed.
module @written attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %w:3 = stablehlo.while(%i = %zero, %p = %x, %sum = %x) : tensor<i32>, tensor<2xf32>, tensor<2xf32>
  cond {
    %c = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %j = stablehlo.add %i, %one : tensor<i32>
    %early = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %q = "stablehlo.if"(%early) ({
      %r = "stablehlo.collective_permute"(%p) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2], [2, 3]]> : tensor<3x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
      stablehlo.return %r : tensor<2xf32>
    }, {
      %none = stablehlo.constant dense<0.0> : tensor<2xf32>
      stablehlo.return %none : tensor<2xf32>
    }) : (tensor<i1>) -> tensor<2xf32>
    %s = stablehlo.add %sum, %p : tensor<2xf32>
    stablehlo.return %j, %q, %s : tensor<i32>, tensor<2xf32>, tensor<2xf32>
  }
  return %w#2 : tensor<2xf32>
}
}

// -----

// What stands outside of loops always runs, and is no note.
module @no_loop attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %q = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2], [2, 3]]> : tensor<3x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
  return %q : tensor<2xf32>
}
}
