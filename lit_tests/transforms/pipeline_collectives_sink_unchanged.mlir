// RUN: stablehlo-tools opt %s --split-input-file > %t.before.mlir
// RUN: stablehlo-tools opt %s -p 'pipeline-collectives{direction=sink explain}' --split-input-file >%t.after.mlir 2>%t.notes
// RUN: diff %t.before.mlir %t.after.mlir
// RUN: filecheck %s --check-prefix=EXPLAINED --input-file %t.notes

// The sum so far is read in the loop.
// EXPLAINED: note: all_reduce stays in its iteration: the tanh also reads the accumulator, carry 1
module @read attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%total0: tensor<8x8xf32>, %y0: tensor<8x8xf32>, %xs: tensor<4x8x8xf32>) -> (tensor<8x8xf32>, tensor<8x8xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %bound = stablehlo.constant dense<4> : tensor<i32>
  %r:3 = stablehlo.while(%i = %zero, %total = %total0, %y = %y0) : tensor<i32>, tensor<8x8xf32>, tensor<8x8xf32>
  cond {
    %more = stablehlo.compare LT, %i, %bound : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %cut = stablehlo.dynamic_slice %xs, %i, %zero, %zero, sizes = [1, 8, 8] : (tensor<4x8x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x8xf32>
    %x = stablehlo.reshape %cut : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
    %g = stablehlo.dot_general %x, %x, contracting_dims = [0] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    %sum = "stablehlo.all_reduce"(%g) ({
    ^bb0(%l: tensor<f32>, %q: tensor<f32>):
      %s = stablehlo.add %l, %q : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %next = stablehlo.add %total, %sum : tensor<8x8xf32>
    %h = stablehlo.tanh %total : tensor<8x8xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %next, %h : tensor<i32>, tensor<8x8xf32>, tensor<8x8xf32>
  }
  return %r#1, %r#2 : tensor<8x8xf32>, tensor<8x8xf32>
}
}

// -----

// What is reduced is not what is added.
// EXPLAINED: note: all_reduce stays in its iteration: the tanh is not linear for add
module @not_linear attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%total0: tensor<8x8xf32>, %xs: tensor<4x8x8xf32>) -> (tensor<8x8xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %bound = stablehlo.constant dense<4> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %total = %total0) : tensor<i32>, tensor<8x8xf32>
  cond {
    %more = stablehlo.compare LT, %i, %bound : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %cut = stablehlo.dynamic_slice %xs, %i, %zero, %zero, sizes = [1, 8, 8] : (tensor<4x8x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x8xf32>
    %x = stablehlo.reshape %cut : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
    %g = stablehlo.dot_general %x, %x, contracting_dims = [0] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    %sum = "stablehlo.all_reduce"(%g) ({
    ^bb0(%l: tensor<f32>, %q: tensor<f32>):
      %s = stablehlo.add %l, %q : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %h = stablehlo.tanh %sum : tensor<8x8xf32>
    %next = stablehlo.add %total, %h : tensor<8x8xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %next : tensor<i32>, tensor<8x8xf32>
  }
  return %r#1 : tensor<8x8xf32>
}
}

// -----

// Each term is rounded to the sum's type; a sum of terms would be rounded once.
// EXPLAINED: note: all_reduce stays in its iteration: the convert rounds
module @rounds attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%total0: tensor<8x8xbf16>, %xs: tensor<4x8x8xf32>) -> (tensor<8x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %bound = stablehlo.constant dense<4> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %total = %total0) : tensor<i32>, tensor<8x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %bound : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %cut = stablehlo.dynamic_slice %xs, %i, %zero, %zero, sizes = [1, 8, 8] : (tensor<4x8x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x8xf32>
    %x = stablehlo.reshape %cut : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
    %g = stablehlo.dot_general %x, %x, contracting_dims = [0] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    %sum = "stablehlo.all_reduce"(%g) ({
    ^bb0(%l: tensor<f32>, %q: tensor<f32>):
      %s = stablehlo.add %l, %q : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %h = stablehlo.convert %sum : (tensor<8x8xf32>) -> tensor<8x8xbf16>
    %next = stablehlo.add %total, %h : tensor<8x8xbf16>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %next : tensor<i32>, tensor<8x8xbf16>
  }
  return %r#1 : tensor<8x8xbf16>
}
}

// -----

// A sum of maxima is no maximum of sums.
// EXPLAINED: note: all_reduce stays in its iteration: the all_reduce does not reduce by maximum
module @maximum_of_sums attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%total0: tensor<8x8xf32>, %xs: tensor<4x8x8xf32>) -> (tensor<8x8xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %bound = stablehlo.constant dense<4> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %total = %total0) : tensor<i32>, tensor<8x8xf32>
  cond {
    %more = stablehlo.compare LT, %i, %bound : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %cut = stablehlo.dynamic_slice %xs, %i, %zero, %zero, sizes = [1, 8, 8] : (tensor<4x8x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x8xf32>
    %x = stablehlo.reshape %cut : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
    %g = stablehlo.dot_general %x, %x, contracting_dims = [0] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    %sum = "stablehlo.all_reduce"(%g) ({
    ^bb0(%l: tensor<f32>, %q: tensor<f32>):
      %s = stablehlo.add %l, %q : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %next = stablehlo.maximum %total, %sum : tensor<8x8xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %next : tensor<i32>, tensor<8x8xf32>
  }
  return %r#1 : tensor<8x8xf32>
}
}

// -----

// Every iteration writes the same row.
// EXPLAINED: note: all_reduce stays in its iteration: the dynamic_update_slice does not write the rows one after the other
module @same_row attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%rows0: tensor<4x8x8xf32>, %xs: tensor<4x8x8xf32>) -> (tensor<4x8x8xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %bound = stablehlo.constant dense<4> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %rows = %rows0) : tensor<i32>, tensor<4x8x8xf32>
  cond {
    %more = stablehlo.compare LT, %i, %bound : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %cut = stablehlo.dynamic_slice %xs, %i, %zero, %zero, sizes = [1, 8, 8] : (tensor<4x8x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x8xf32>
    %x = stablehlo.reshape %cut : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
    %g = stablehlo.dot_general %x, %x, contracting_dims = [0] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    %sum = "stablehlo.all_reduce"(%g) ({
    ^bb0(%l: tensor<f32>, %q: tensor<f32>):
      %s = stablehlo.add %l, %q : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %row = stablehlo.reshape %sum : (tensor<8x8xf32>) -> tensor<1x8x8xf32>
    %next = stablehlo.dynamic_update_slice %rows, %row, %one, %zero, %zero : (tensor<4x8x8xf32>, tensor<1x8x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x8x8xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %next : tensor<i32>, tensor<4x8x8xf32>
  }
  return %r#1 : tensor<4x8x8xf32>
}
}

// -----

// What the carry starts as is left where the loop does not run.
// EXPLAINED: note: all_reduce stays in its iteration: the loop is not known to run at all
module @perhaps_never attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%kept0: tensor<8x8xf32>, %xs: tensor<4x8x8xf32>, %bound: tensor<i32>) -> (tensor<8x8xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %kept = %kept0) : tensor<i32>, tensor<8x8xf32>
  cond {
    %more = stablehlo.compare LT, %i, %bound : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %cut = stablehlo.dynamic_slice %xs, %i, %zero, %zero, sizes = [1, 8, 8] : (tensor<4x8x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x8xf32>
    %x = stablehlo.reshape %cut : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
    %g = stablehlo.dot_general %x, %x, contracting_dims = [0] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    %sum = "stablehlo.all_reduce"(%g) ({
    ^bb0(%l: tensor<f32>, %q: tensor<f32>):
      %s = stablehlo.add %l, %q : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %sum : tensor<i32>, tensor<8x8xf32>
  }
  return %r#1 : tensor<8x8xf32>
}
}

// -----

// The same for a loop that does not run.
// EXPLAINED: note: all_reduce stays in its iteration: the loop never runs
module @never attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%kept0: tensor<8x8xf32>, %xs: tensor<4x8x8xf32>) -> (tensor<8x8xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %bound = stablehlo.constant dense<0> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %kept = %kept0) : tensor<i32>, tensor<8x8xf32>
  cond {
    %more = stablehlo.compare LT, %i, %bound : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %cut = stablehlo.dynamic_slice %xs, %i, %zero, %zero, sizes = [1, 8, 8] : (tensor<4x8x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x8xf32>
    %x = stablehlo.reshape %cut : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
    %g = stablehlo.dot_general %x, %x, contracting_dims = [0] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    %sum = "stablehlo.all_reduce"(%g) ({
    ^bb0(%l: tensor<f32>, %q: tensor<f32>):
      %s = stablehlo.add %l, %q : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %sum : tensor<i32>, tensor<8x8xf32>
  }
  return %r#1 : tensor<8x8xf32>
}
}
