// RUN: stablehlo-tools opt %s -p 'pipeline-collectives{direction=prefetch hold=false}' --split-input-file | filecheck %s --enable-var-scope
// RUN: stablehlo-tools opt %s -p 'pipeline-collectives{direction=prefetch hold=false distance=2}' --split-input-file | filecheck %s --check-prefix=TWO --enable-var-scope
// RUN: stablehlo-tools opt %s -p 'pipeline-collectives{direction=prefetch hold=false explain}' --split-input-file 2>&1 >%t.mlir | filecheck %s --check-prefix=EXPLAINED

// The first gather is in front of the loop, each other one an iteration ahead, the last iteration
// behind the loop.
// EXPLAINED: note: all_gather is issued one iteration ahead
// CHECK-LABEL: module @by_one attributes
// CHECK: %[[FIRST:.+]] = "stablehlo.all_gather"
// CHECK: %[[START:.+]] = stablehlo.constant dense<1>
// CHECK-NEXT: %[[W:.+]]:3 = stablehlo.while(%[[I:.+]] = %[[START]], %[[X:.+]] = %arg0, %[[G:.+]] = %[[FIRST]])
// CHECK: } do {
// CHECK: %[[NEXT:.+]] = "stablehlo.all_gather"
// CHECK: %[[D:.+]] = stablehlo.dot_general %[[X]]
// CHECK: %[[Y:.+]] = stablehlo.add %[[D]], %[[G]]
// CHECK: stablehlo.return %{{.+}}, %[[Y]], %[[NEXT]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[D:.+]] = stablehlo.dot_general %[[W]]#1
// CHECK-NEXT: %[[Y:.+]] = stablehlo.add %[[D]], %[[W]]#2
// CHECK-NEXT: return %[[Y]]

// Two iterations ahead: two gathers in front of the loop, the older one is read first.
// TWO-LABEL: module @by_one
// TWO: %[[ONE:.+]] = "stablehlo.all_gather"
// TWO: %[[OTHER:.+]] = "stablehlo.all_gather"
// TWO: stablehlo.constant dense<2>
// TWO-NEXT: stablehlo.while({{.+}}, %[[NEW:.+]] = %[[OTHER]], %[[OLD:.+]] = %[[ONE]])
// TWO: %[[NEXT:.+]] = "stablehlo.all_gather"
// TWO: stablehlo.add %{{.+}}, %[[OLD]]
// TWO: stablehlo.return %{{.+}}, %[[NEXT]], %[[NEW]]
// TWO-NEXT: }
// TWO-COUNT-2: stablehlo.dot_general
// TWO: return
module @by_one attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%arg: tensor<4x8xbf16>, %k: tensor<5x2x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %x = %arg) : tensor<i32>, tensor<4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
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

// The counter starts at two: what is ahead is ahead by the step, not by the start.
// CHECK-LABEL: module @from_two attributes
// CHECK: %[[FIRST:.+]] = "stablehlo.all_gather"
// CHECK: %[[START:.+]] = stablehlo.constant dense<3>
// CHECK-NEXT: %[[W:.+]]:3 = stablehlo.while(%[[I:.+]] = %[[START]], %[[X:.+]] = %arg0, %[[G:.+]] = %[[FIRST]])
// CHECK: } do {
// CHECK: %[[NEXT:.+]] = "stablehlo.all_gather"
// CHECK: %[[D:.+]] = stablehlo.dot_general %[[X]]
// CHECK: %[[Y:.+]] = stablehlo.add %[[D]], %[[G]]
// CHECK: stablehlo.return %{{.+}}, %[[Y]], %[[NEXT]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[D:.+]] = stablehlo.dot_general %[[W]]#1
// CHECK-NEXT: %[[Y:.+]] = stablehlo.add %[[D]], %[[W]]#2
// CHECK-NEXT: return %[[Y]]
module @from_two attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%arg: tensor<4x8xbf16>, %k: tensor<5x2x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %two = stablehlo.constant dense<2> : tensor<i32>
  %five = stablehlo.constant dense<5> : tensor<i32>
  %r:2 = stablehlo.while(%i = %two, %x = %arg) : tensor<i32>, tensor<4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %five : (tensor<i32>, tensor<i32>) -> tensor<i1>
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

// Every other row.
// CHECK-LABEL: module @by_two attributes
// CHECK: %[[FIRST:.+]] = "stablehlo.all_gather"
// CHECK: %[[START:.+]] = stablehlo.constant dense<2>
// CHECK-NEXT: %[[W:.+]]:3 = stablehlo.while(%[[I:.+]] = %[[START]], %[[X:.+]] = %arg0, %[[G:.+]] = %[[FIRST]])
// CHECK: } do {
// CHECK: %[[NEXT:.+]] = "stablehlo.all_gather"
// CHECK: %[[D:.+]] = stablehlo.dot_general %[[X]]
// CHECK: %[[Y:.+]] = stablehlo.add %[[D]], %[[G]]
// CHECK: stablehlo.return %{{.+}}, %[[Y]], %[[NEXT]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[D:.+]] = stablehlo.dot_general %[[W]]#1
// CHECK-NEXT: %[[Y:.+]] = stablehlo.add %[[D]], %[[W]]#2
// CHECK-NEXT: return %[[Y]]
module @by_two attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%arg: tensor<4x8xbf16>, %k: tensor<5x2x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %two = stablehlo.constant dense<2> : tensor<i32>
  %five = stablehlo.constant dense<5> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %x = %arg) : tensor<i32>, tensor<4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %five : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %k, %i, %zero, %zero, sizes = [1, 2, 8] : (tensor<5x2x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x8xbf16>
    %part = stablehlo.reshape %row : (tensor<1x2x8xbf16>) -> tensor<2x8xbf16>
    %g = "stablehlo.all_gather"(%part) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x8xbf16>) -> tensor<4x8xbf16>
    %d = stablehlo.dot_general %x, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %y = stablehlo.add %d, %g : tensor<4x8xbf16>
    %n = stablehlo.add %i, %two : tensor<i32>
    stablehlo.return %n, %y : tensor<i32>, tensor<4x8xbf16>
  }
  return %r#1 : tensor<4x8xbf16>
}
}

// -----

// Down to zero.
// CHECK-LABEL: module @down attributes
// CHECK: %[[FIRST:.+]] = "stablehlo.all_gather"
// CHECK: %[[START:.+]] = stablehlo.constant dense<3>
// CHECK-NEXT: %[[W:.+]]:3 = stablehlo.while(%[[I:.+]] = %[[START]], %[[X:.+]] = %arg0, %[[G:.+]] = %[[FIRST]])
// CHECK: } do {
// CHECK: %[[NEXT:.+]] = "stablehlo.all_gather"
// CHECK: %[[D:.+]] = stablehlo.dot_general %[[X]]
// CHECK: %[[Y:.+]] = stablehlo.add %[[D]], %[[G]]
// CHECK: stablehlo.return %{{.+}}, %[[Y]], %[[NEXT]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[D:.+]] = stablehlo.dot_general %[[W]]#1
// CHECK-NEXT: %[[Y:.+]] = stablehlo.add %[[D]], %[[W]]#2
// CHECK-NEXT: return %[[Y]]
module @down attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%arg: tensor<4x8xbf16>, %k: tensor<5x2x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %r:2 = stablehlo.while(%i = %four, %x = %arg) : tensor<i32>, tensor<4x8xbf16>
  cond {
    %more = stablehlo.compare GE, %i, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
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

// From the last row to the first, as jnp's negative indices count.
// CHECK-LABEL: module @reversed attributes
// CHECK: %[[FIRST:.+]] = "stablehlo.all_gather"
// CHECK: %[[START:.+]] = stablehlo.constant dense<1>
// CHECK-NEXT: %[[W:.+]]:3 = stablehlo.while(%[[I:.+]] = %[[START]], %[[X:.+]] = %arg0, %[[G:.+]] = %[[FIRST]])
// CHECK: } do {
// CHECK: %[[NEXT:.+]] = "stablehlo.all_gather"
// CHECK: %[[D:.+]] = stablehlo.dot_general %[[X]]
// CHECK: %[[Y:.+]] = stablehlo.add %[[D]], %[[G]]
// CHECK: stablehlo.return %{{.+}}, %[[Y]], %[[NEXT]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[D:.+]] = stablehlo.dot_general %[[W]]#1
// CHECK-NEXT: %[[Y:.+]] = stablehlo.add %[[D]], %[[W]]#2
// CHECK-NEXT: return %[[Y]]
module @reversed attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%arg: tensor<4x8xbf16>, %k: tensor<5x2x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %five = stablehlo.constant dense<5> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %x = %arg) : tensor<i32>, tensor<4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %five : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %total = stablehlo.constant dense<5> : tensor<i32>
    %left = stablehlo.subtract %total, %i : tensor<i32>
    %minus = stablehlo.constant dense<-1> : tensor<i32>
    %below = stablehlo.add %left, %minus : tensor<i32>
    %most = stablehlo.constant dense<4> : tensor<i32>
    %above = stablehlo.add %left, %most : tensor<i32>
    %wraps = stablehlo.compare LT, %below, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %at = stablehlo.select %wraps, %above, %below : tensor<i1>, tensor<i32>
    %row = stablehlo.dynamic_slice %k, %at, %zero, %zero, sizes = [1, 2, 8] : (tensor<5x2x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x8xbf16>
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

// A collective of another one's result: both go ahead, and what formats it between them.
// EXPLAINED: note: all_reduce is issued one iteration ahead
// CHECK-LABEL: module @chain
// CHECK: "stablehlo.all_gather"
// CHECK: stablehlo.transpose
// CHECK: %[[FIRST:.+]] = "stablehlo.all_reduce"
// CHECK: %[[W:.+]]:3 = stablehlo.while({{.+}} = %[[FIRST]])
// CHECK: stablehlo.add
// CHECK: stablehlo.add %{{.+}}, %[[W]]#2
module @chain attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%arg: tensor<4x8xbf16>, %k: tensor<5x2x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %x = %arg) : tensor<i32>, tensor<4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %k, %i, %zero, %zero, sizes = [1, 2, 8] : (tensor<5x2x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x8xbf16>
    %part = stablehlo.reshape %row : (tensor<1x2x8xbf16>) -> tensor<2x8xbf16>
    %g = "stablehlo.all_gather"(%part) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x8xbf16>) -> tensor<4x8xbf16>
    %f = stablehlo.transpose %g, dims = [1, 0] : (tensor<4x8xbf16>) -> tensor<8x4xbf16>
    %e = stablehlo.reshape %f : (tensor<8x4xbf16>) -> tensor<4x8xbf16>
    %h = "stablehlo.all_reduce"(%e) ({
    ^bb0(%l: tensor<bf16>, %q: tensor<bf16>):
      %s = stablehlo.add %l, %q : tensor<bf16>
      stablehlo.return %s : tensor<bf16>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xbf16>) -> tensor<4x8xbf16>
    %d = stablehlo.dot_general %x, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %y = stablehlo.add %d, %h : tensor<4x8xbf16>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %y : tensor<i32>, tensor<4x8xbf16>
  }
  return %r#1 : tensor<4x8xbf16>
}
}

// -----

// What goes ahead reads past the barrier that jax.checkpoint writes; the rest waits behind it.
// CHECK-LABEL: module @barrier
// CHECK: %[[FIRST:.+]] = "stablehlo.all_gather"
// CHECK: stablehlo.while({{.+}} = %[[FIRST]])
// CHECK: %[[B:.+]]:2 = stablehlo.optimization_barrier
// CHECK: stablehlo.dot_general %[[B]]#1
module @barrier attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%arg: tensor<4x8xbf16>, %k: tensor<5x2x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %x = %arg) : tensor<i32>, tensor<4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %k, %i, %zero, %zero, sizes = [1, 2, 8] : (tensor<5x2x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x8xbf16>
    %part = stablehlo.reshape %row : (tensor<1x2x8xbf16>) -> tensor<2x8xbf16>
    %b:2 = stablehlo.optimization_barrier %part, %x : tensor<2x8xbf16>, tensor<4x8xbf16>
    %g = "stablehlo.all_gather"(%b#0) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x8xbf16>) -> tensor<4x8xbf16>
    %d = stablehlo.dot_general %b#1, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %y = stablehlo.add %d, %g : tensor<4x8xbf16>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %y : tensor<i32>, tensor<4x8xbf16>
  }
  return %r#1 : tensor<4x8xbf16>
}
}

// -----

// What sends the same each time runs once.
// EXPLAINED: note: all_gather runs once, before the loop: its operand never changes
// CHECK-LABEL: module @same
// CHECK: %[[G:.+]] = "stablehlo.all_gather"
// CHECK-NEXT: stablehlo.while({{.+}} = %[[G]])
// CHECK-NOT: "stablehlo.all_gather"
// CHECK: return
module @same attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%arg: tensor<4x8xbf16>, %k: tensor<5x2x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %x = %arg) : tensor<i32>, tensor<4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
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

// A gather in a function: calls are inlined.
// CHECK-LABEL: module @called
// CHECK-NOT: call @layer
// CHECK: %[[FIRST:.+]] = "stablehlo.all_gather"
// CHECK: stablehlo.while({{.+}} = %[[FIRST]])
module @called attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func private @layer(%p: tensor<2x8xbf16>) -> tensor<4x8xbf16> {
    %g = "stablehlo.all_gather"(%p) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x8xbf16>) -> tensor<4x8xbf16>
  return %g : tensor<4x8xbf16>
}
func.func @main(%arg: tensor<4x8xbf16>, %k: tensor<5x2x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %x = %arg) : tensor<i32>, tensor<4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %k, %i, %zero, %zero, sizes = [1, 2, 8] : (tensor<5x2x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x8xbf16>
    %part = stablehlo.reshape %row : (tensor<1x2x8xbf16>) -> tensor<2x8xbf16>
    %g = func.call @layer(%part) : (tensor<2x8xbf16>) -> tensor<4x8xbf16>
    %d = stablehlo.dot_general %x, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %y = stablehlo.add %d, %g : tensor<4x8xbf16>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %y : tensor<i32>, tensor<4x8xbf16>
  }
  return %r#1 : tensor<4x8xbf16>
}
}
