// RUN: stablehlo-tools opt %s --split-input-file > %t.before.mlir
// RUN: stablehlo-tools opt %s -p 'pipeline-collectives{direction=prefetch explain}' --split-input-file 2>%t.prefetch.txt >%t.after.mlir
// RUN: diff %t.before.mlir %t.after.mlir
// RUN: filecheck %s --check-prefix=PREFETCH --input-file %t.prefetch.txt
// RUN: stablehlo-tools opt %s -p 'pipeline-collectives{direction=delay explain}' --split-input-file 2>%t.delay.txt >%t.after.mlir
// RUN: diff %t.before.mlir %t.after.mlir
// RUN: filecheck %s --check-prefix=DELAY --input-file %t.delay.txt
// RUN: stablehlo-tools opt %s -p pipeline-collectives --split-input-file | diff %t.before.mlir -

// The positions wrap around, from row 0 to row 2: rows would be stored in another order.
// PREFETCH: note: all_reduce stays in its iteration: its operand needs the dot_general
// DELAY: note: all_reduce stays in its iteration: the positions of the dynamic_update_slice {{.*}}are not known to go one way without wrapping around
module @wraps attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%p: tensor<5x4x8xbf16>, %src: tensor<5x4x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<5x4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %minus_one = stablehlo.constant dense<-1> : tensor<i32>
  %r:2 = stablehlo.while(%i = %minus_one, %dst = %p) : tensor<i32>, tensor<5x4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %total = stablehlo.constant dense<3> : tensor<i32>
    %left = stablehlo.subtract %total, %i : tensor<i32>
    %minus = stablehlo.constant dense<-1> : tensor<i32>
    %below = stablehlo.add %left, %minus : tensor<i32>
    %most = stablehlo.constant dense<2> : tensor<i32>
    %above = stablehlo.add %left, %most : tensor<i32>
    %wraps = stablehlo.compare LT, %below, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %at = stablehlo.select %wraps, %above, %below : tensor<i1>, tensor<i32>
    %cut = stablehlo.dynamic_slice %src, %at, %zero, %zero, sizes = [1, 4, 8] : (tensor<5x4x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x8xbf16>
    %m0 = stablehlo.reshape %cut : (tensor<1x4x8xbf16>) -> tensor<4x8xbf16>
    %m = stablehlo.dot_general %m0, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %g = "stablehlo.all_reduce"(%m) ({
    ^bb0(%l: tensor<bf16>, %q: tensor<bf16>):
      %s = stablehlo.add %l, %q : tensor<bf16>
      stablehlo.return %s : tensor<bf16>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xbf16>) -> tensor<4x8xbf16>
    %put = stablehlo.reshape %g : (tensor<4x8xbf16>) -> tensor<1x4x8xbf16>
    %new = stablehlo.dynamic_update_slice %dst, %put, %at, %zero, %zero : (tensor<5x4x8xbf16>, tensor<1x4x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<5x4x8xbf16>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %new : tensor<i32>, tensor<5x4x8xbf16>
  }
  return %r#1 : tensor<5x4x8xbf16>
}
}

// -----

// The rows are read while they are written.
// PREFETCH: note: all_reduce stays in its iteration: its operand needs the dot_general
// DELAY: note: all_reduce stays in its iteration: the dynamic_slice of the next iteration needs its result
module @escaped attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%p: tensor<5x4x8xbf16>, %src: tensor<5x4x8xbf16>, %v: tensor<8x8xbf16>, %e: tensor<1x4x8xbf16>) -> (tensor<5x4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %r:3 = stablehlo.while(%i = %zero, %dst = %p, %extra = %e) : tensor<i32>, tensor<5x4x8xbf16>, tensor<1x4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %first = stablehlo.dynamic_slice %dst, %zero, %zero, %zero, sizes = [1, 4, 8] : (tensor<5x4x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x8xbf16>
    %cut = stablehlo.dynamic_slice %src, %i, %zero, %zero, sizes = [1, 4, 8] : (tensor<5x4x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x8xbf16>
    %m0 = stablehlo.reshape %cut : (tensor<1x4x8xbf16>) -> tensor<4x8xbf16>
    %m = stablehlo.dot_general %m0, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %g = "stablehlo.all_reduce"(%m) ({
    ^bb0(%l: tensor<bf16>, %q: tensor<bf16>):
      %s = stablehlo.add %l, %q : tensor<bf16>
      stablehlo.return %s : tensor<bf16>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xbf16>) -> tensor<4x8xbf16>
    %put = stablehlo.reshape %g : (tensor<4x8xbf16>) -> tensor<1x4x8xbf16>
    %new = stablehlo.dynamic_update_slice %dst, %put, %i, %zero, %zero : (tensor<5x4x8xbf16>, tensor<1x4x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<5x4x8xbf16>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %new, %first : tensor<i32>, tensor<5x4x8xbf16>, tensor<1x4x8xbf16>
  }
  return %r#1 : tensor<5x4x8xbf16>
}
}

// -----

// The weights change from iteration to iteration.
// PREFETCH: note: all_gather stays in its iteration: its operand follows from carry 2, which the previous iteration computes
// DELAY: note: all_gather stays in its iteration: it runs late already: its operand is a value of the previous iteration
module @modified attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%arg: tensor<4x8xbf16>, %k: tensor<5x2x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %r:3 = stablehlo.while(%i = %zero, %x = %arg, %stack = %k) : tensor<i32>, tensor<4x8xbf16>, tensor<5x2x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %stack, %i, %zero, %zero, sizes = [1, 2, 8] : (tensor<5x2x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x8xbf16>
    %part = stablehlo.reshape %row : (tensor<1x2x8xbf16>) -> tensor<2x8xbf16>
    %g = "stablehlo.all_gather"(%part) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x8xbf16>) -> tensor<4x8xbf16>
    %d = stablehlo.dot_general %x, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %y = stablehlo.add %d, %g : tensor<4x8xbf16>
    %zeros = stablehlo.constant dense<0.0> : tensor<5x2x8xbf16>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %y, %zeros : tensor<i32>, tensor<4x8xbf16>, tensor<5x2x8xbf16>
  }
  return %r#1 : tensor<4x8xbf16>
}
}

// -----

// One iteration: there is none before it.
// PREFETCH: note: all_gather stays in its iteration: the loop runs {{once|not at all}}, but must run more than once
// DELAY: note: all_gather stays in its iteration: the dot_general of the next iteration needs its result
module @once attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%arg: tensor<4x8xbf16>, %k: tensor<5x2x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %x = %arg) : tensor<i32>, tensor<4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %k, %i, %zero, %zero, sizes = [1, 2, 8] : (tensor<5x2x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x8xbf16>
    %part = stablehlo.reshape %row : (tensor<1x2x8xbf16>) -> tensor<2x8xbf16>
    %g = "stablehlo.all_gather"(%part) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x8xbf16>) -> tensor<4x8xbf16>
    %d = stablehlo.dot_general %x, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %y = stablehlo.add %d, %g : tensor<4x8xbf16>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %y : tensor<i32>, tensor<4x8xbf16>
  }
  return %r#1 : tensor<4x8xbf16>
}
}

// -----

// No iteration.
// PREFETCH: note: all_gather stays in its iteration: the loop runs {{once|not at all}}, but must run more than once
// DELAY: note: all_gather stays in its iteration: the dot_general of the next iteration needs its result
module @never attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%arg: tensor<4x8xbf16>, %k: tensor<5x2x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %x = %arg) : tensor<i32>, tensor<4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %k, %i, %zero, %zero, sizes = [1, 2, 8] : (tensor<5x2x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x8xbf16>
    %part = stablehlo.reshape %row : (tensor<1x2x8xbf16>) -> tensor<2x8xbf16>
    %g = "stablehlo.all_gather"(%part) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x8xbf16>) -> tensor<4x8xbf16>
    %d = stablehlo.dot_general %x, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %y = stablehlo.add %d, %g : tensor<4x8xbf16>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %y : tensor<i32>, tensor<4x8xbf16>
  }
  return %r#1 : tensor<4x8xbf16>
}
}

// -----

// No iteration: what would be the same each time does not run at all.
// PREFETCH: note: all_gather stays in its iteration: the loop runs {{once|not at all}}, but must run more than once
// DELAY: note: all_gather stays in its iteration: the dot_general of the next iteration needs its result
module @never_the_same attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%arg: tensor<4x8xbf16>, %k: tensor<5x2x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %x = %arg) : tensor<i32>, tensor<4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %k, %one, %zero, %zero, sizes = [1, 2, 8] : (tensor<5x2x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x8xbf16>
    %part = stablehlo.reshape %row : (tensor<1x2x8xbf16>) -> tensor<2x8xbf16>
    %g = "stablehlo.all_gather"(%part) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x8xbf16>) -> tensor<4x8xbf16>
    %d = stablehlo.dot_general %x, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %y = stablehlo.add %d, %g : tensor<4x8xbf16>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %y : tensor<i32>, tensor<4x8xbf16>
  }
  return %r#1 : tensor<4x8xbf16>
}
}

// -----

// The bound is an argument.
// PREFETCH: note: all_gather stays in its iteration: the bound of its counter is not known before the run
// DELAY: note: all_gather stays in its iteration: 
module @unknown attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%arg: tensor<4x8xbf16>, %k: tensor<5x2x8xbf16>, %v: tensor<8x8xbf16>, %bound: tensor<i32>) -> (tensor<4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %x = %arg) : tensor<i32>, tensor<4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %bound : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %k, %i, %zero, %zero, sizes = [1, 2, 8] : (tensor<5x2x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x8xbf16>
    %part = stablehlo.reshape %row : (tensor<1x2x8xbf16>) -> tensor<2x8xbf16>
    %g = "stablehlo.all_gather"(%part) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x8xbf16>) -> tensor<4x8xbf16>
    %d = stablehlo.dot_general %x, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %y = stablehlo.add %d, %g : tensor<4x8xbf16>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %y : tensor<i32>, tensor<4x8xbf16>
  }
  return %r#1 : tensor<4x8xbf16>
}
}

// -----

// The counter is stepped by an amount that is an argument.
// PREFETCH: note: all_gather stays in its iteration: its operand follows from carry 0, which the previous iteration computes
// DELAY: note: all_gather stays in its iteration: it runs late already
module @unknown_step attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%arg: tensor<4x8xbf16>, %k: tensor<5x2x8xbf16>, %v: tensor<8x8xbf16>, %by: tensor<i32>) -> (tensor<4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %x = %arg) : tensor<i32>, tensor<4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %k, %i, %zero, %zero, sizes = [1, 2, 8] : (tensor<5x2x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x8xbf16>
    %part = stablehlo.reshape %row : (tensor<1x2x8xbf16>) -> tensor<2x8xbf16>
    %g = "stablehlo.all_gather"(%part) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x8xbf16>) -> tensor<4x8xbf16>
    %d = stablehlo.dot_general %x, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %y = stablehlo.add %d, %g : tensor<4x8xbf16>
    %n = stablehlo.add %i, %by : tensor<i32>
    stablehlo.return %n, %y : tensor<i32>, tensor<4x8xbf16>
  }
  return %r#1 : tensor<4x8xbf16>
}
}

// -----

// It would wrap around.
// PREFETCH: note: all_gather stays in its iteration: its counter would overflow before it reaches its bound
// DELAY: note: all_gather stays in its iteration: 
module @endless attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%arg: tensor<4x8xbf16>, %k: tensor<5x2x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %x = %arg) : tensor<i32>, tensor<4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %k, %i, %zero, %zero, sizes = [1, 2, 8] : (tensor<5x2x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x8xbf16>
    %part = stablehlo.reshape %row : (tensor<1x2x8xbf16>) -> tensor<2x8xbf16>
    %g = "stablehlo.all_gather"(%part) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x8xbf16>) -> tensor<4x8xbf16>
    %d = stablehlo.dot_general %x, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %y = stablehlo.add %d, %g : tensor<4x8xbf16>
    %n = stablehlo.subtract %i, %one : tensor<i32>
    stablehlo.return %n, %y : tensor<i32>, tensor<4x8xbf16>
  }
  return %r#1 : tensor<4x8xbf16>
}
}

// -----

// What it sends needs a dot of the same iteration.
// PREFETCH: note: all_reduce stays in its iteration: its operand follows from carry 1, which the previous iteration computes
// DELAY: note: all_reduce stays in its iteration: the dot_general needs its result
module @dot attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%arg: tensor<4x8xbf16>, %k: tensor<5x2x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %x = %arg) : tensor<i32>, tensor<4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %d = stablehlo.dot_general %x, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %g = "stablehlo.all_reduce"(%d) ({
    ^bb0(%l: tensor<bf16>, %q: tensor<bf16>):
      %s = stablehlo.add %l, %q : tensor<bf16>
      stablehlo.return %s : tensor<bf16>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xbf16>) -> tensor<4x8xbf16>
    %y = stablehlo.dot_general %g, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %y : tensor<i32>, tensor<4x8xbf16>
  }
  return %r#1 : tensor<4x8xbf16>
}
}
