// RUN: stablehlo-tools opt %s -p 'pipeline-collectives{direction=delay hold=false}' --split-input-file | filecheck %s --enable-var-scope
// RUN: stablehlo-tools opt %s -p 'pipeline-collectives{direction=delay hold=false explain}' --split-input-file 2>&1 >%t.mlir | filecheck %s --check-prefix=EXPLAINED

// What a collective sends waits in the carry; its row is stored an iteration late.
// EXPLAINED: note: all_reduce ends one iteration late
// CHECK-LABEL: module @by_one attributes
// CHECK: %[[M:.+]] = stablehlo.dot_general
// CHECK-NOT: "stablehlo.all_reduce"
// CHECK: %[[START:.+]] = stablehlo.constant dense<1>
// CHECK-NEXT: %[[W:.+]]:3 = stablehlo.while(%[[I:.+]] = %[[START]], %[[DST:.+]] = %arg0, %[[HELD:.+]] = %[[M]])
// CHECK: } do {
// CHECK: %[[G:.+]] = "stablehlo.all_reduce"(%[[HELD]])
// CHECK: %[[NEW:.+]] = stablehlo.dynamic_update_slice %[[DST]]
// CHECK: %[[NEXT:.+]] = stablehlo.dot_general
// CHECK: stablehlo.return %{{.+}}, %[[NEW]], %[[NEXT]]
// CHECK-NEXT: }
// CHECK: "stablehlo.all_reduce"(%[[W]]#2)
// CHECK: %[[LAST:.+]] = stablehlo.dynamic_update_slice %[[W]]#1
// CHECK-NEXT: return %[[LAST]]
module @by_one attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%p: tensor<5x4x8xbf16>, %src: tensor<5x4x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<5x4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %dst = %p) : tensor<i32>, tensor<5x4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
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

// Row by row.
// CHECK-LABEL: module @minimal attributes
// CHECK: %[[M:.+]] = stablehlo.dot_general
// CHECK-NOT: "stablehlo.all_reduce"
// CHECK: %[[START:.+]] = stablehlo.constant dense<1>
// CHECK-NEXT: %[[W:.+]]:3 = stablehlo.while(%[[I:.+]] = %[[START]], %[[DST:.+]] = %arg0, %[[HELD:.+]] = %[[M]])
// CHECK: } do {
// CHECK: %[[G:.+]] = "stablehlo.all_reduce"(%[[HELD]])
// CHECK: %[[NEW:.+]] = stablehlo.dynamic_update_slice %[[DST]]
// CHECK: %[[NEXT:.+]] = stablehlo.dot_general
// CHECK: stablehlo.return %{{.+}}, %[[NEW]], %[[NEXT]]
// CHECK-NEXT: }
// CHECK: "stablehlo.all_reduce"(%[[W]]#2)
// CHECK: %[[LAST:.+]] = stablehlo.dynamic_update_slice %[[W]]#1
// CHECK-NEXT: return %[[LAST]]
module @minimal attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%p: tensor<5x4x8xbf16>, %src: tensor<5x4x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<5x4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %dst = %p) : tensor<i32>, tensor<5x4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
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
    stablehlo.return %n, %new : tensor<i32>, tensor<5x4x8xbf16>
  }
  return %r#1 : tensor<5x4x8xbf16>
}
}

// -----

// Two iterations, of rows 2 and 0.
// CHECK-LABEL: module @by_two attributes
// CHECK: %[[M:.+]] = stablehlo.dot_general
// CHECK-NOT: "stablehlo.all_reduce"
// CHECK: %[[START:.+]] = stablehlo.constant dense<2>
// CHECK-NEXT: %[[W:.+]]:3 = stablehlo.while(%[[I:.+]] = %[[START]], %[[DST:.+]] = %arg0, %[[HELD:.+]] = %[[M]])
// CHECK: } do {
// CHECK: %[[G:.+]] = "stablehlo.all_reduce"(%[[HELD]])
// CHECK: %[[NEW:.+]] = stablehlo.dynamic_update_slice %[[DST]]
// CHECK: %[[NEXT:.+]] = stablehlo.dot_general
// CHECK: stablehlo.return %{{.+}}, %[[NEW]], %[[NEXT]]
// CHECK-NEXT: }
// CHECK: "stablehlo.all_reduce"(%[[W]]#2)
// CHECK: %[[LAST:.+]] = stablehlo.dynamic_update_slice %[[W]]#1
// CHECK-NEXT: return %[[LAST]]
module @by_two attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%p: tensor<5x4x8xbf16>, %src: tensor<5x4x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<5x4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %two = stablehlo.constant dense<2> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %dst = %p) : tensor<i32>, tensor<5x4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
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
    %n = stablehlo.add %i, %two : tensor<i32>
    stablehlo.return %n, %new : tensor<i32>, tensor<5x4x8xbf16>
  }
  return %r#1 : tensor<5x4x8xbf16>
}
}

// -----

// The rows need not be the first dimension.
// CHECK-LABEL: module @not_first_index attributes
// CHECK: %[[M:.+]] = stablehlo.dot_general
// CHECK-NOT: "stablehlo.all_reduce"
// CHECK: %[[START:.+]] = stablehlo.constant dense<1>
// CHECK-NEXT: %[[W:.+]]:3 = stablehlo.while(%[[I:.+]] = %[[START]], %[[DST:.+]] = %arg0, %[[HELD:.+]] = %[[M]])
// CHECK: } do {
// CHECK: %[[G:.+]] = "stablehlo.all_reduce"(%[[HELD]])
// CHECK: %[[NEW:.+]] = stablehlo.dynamic_update_slice %[[DST]]
// CHECK: %[[NEXT:.+]] = stablehlo.dot_general
// CHECK: stablehlo.return %{{.+}}, %[[NEW]], %[[NEXT]]
// CHECK-NEXT: }
// CHECK: "stablehlo.all_reduce"(%[[W]]#2)
// CHECK: %[[LAST:.+]] = stablehlo.dynamic_update_slice %[[W]]#1
// CHECK-NEXT: return %[[LAST]]
module @not_first_index attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%p: tensor<4x5x8xbf16>, %src: tensor<5x4x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<4x5x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %dst = %p) : tensor<i32>, tensor<4x5x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %cut = stablehlo.dynamic_slice %src, %i, %zero, %zero, sizes = [1, 4, 8] : (tensor<5x4x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x8xbf16>
    %m0 = stablehlo.reshape %cut : (tensor<1x4x8xbf16>) -> tensor<4x8xbf16>
    %m = stablehlo.dot_general %m0, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %g = "stablehlo.all_reduce"(%m) ({
    ^bb0(%l: tensor<bf16>, %q: tensor<bf16>):
      %s = stablehlo.add %l, %q : tensor<bf16>
      stablehlo.return %s : tensor<bf16>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xbf16>) -> tensor<4x8xbf16>
    %put = stablehlo.reshape %g : (tensor<4x8xbf16>) -> tensor<4x1x8xbf16>
    %new = stablehlo.dynamic_update_slice %dst, %put, %zero, %i, %zero : (tensor<4x5x8xbf16>, tensor<4x1x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x5x8xbf16>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %new : tensor<i32>, tensor<4x5x8xbf16>
  }
  return %r#1 : tensor<4x5x8xbf16>
}
}

// -----

// A chain, and a conversion behind it, into rows of another type: all of it ends late.
// EXPLAINED: note: reduce_scatter ends one iteration late
// EXPLAINED-NEXT: note: all_gather ends one iteration late
// CHECK-LABEL: module @chain
// CHECK: %[[M:.+]] = stablehlo.dot_general
// CHECK: stablehlo.while({{.+}}, %[[HELD:.+]] = %[[M]])
// CHECK: %[[S:.+]] = "stablehlo.reduce_scatter"(%[[HELD]])
// CHECK: "stablehlo.all_gather"(%[[S]])
// CHECK: stablehlo.dot_general
// CHECK: "stablehlo.reduce_scatter"(
// CHECK: "stablehlo.all_gather"(
// CHECK: stablehlo.convert
// CHECK: stablehlo.dynamic_update_slice
// CHECK-NEXT: return
module @chain attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%p: tensor<5x4x8xf32>, %src: tensor<5x4x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<5x4x8xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %dst = %p) : tensor<i32>, tensor<5x4x8xf32>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %cut = stablehlo.dynamic_slice %src, %i, %zero, %zero, sizes = [1, 4, 8] : (tensor<5x4x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x8xbf16>
    %m0 = stablehlo.reshape %cut : (tensor<1x4x8xbf16>) -> tensor<4x8xbf16>
    %m = stablehlo.dot_general %m0, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %s = "stablehlo.reduce_scatter"(%m) ({
    ^bb0(%l: tensor<bf16>, %q: tensor<bf16>):
      %s = stablehlo.add %l, %q : tensor<bf16>
      stablehlo.return %s : tensor<bf16>
    }) {scatter_dimension = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xbf16>) -> tensor<2x8xbf16>
    %g = "stablehlo.all_gather"(%s) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x8xbf16>) -> tensor<4x8xbf16>
    %f = stablehlo.convert %g : (tensor<4x8xbf16>) -> tensor<4x8xf32>
    %put = stablehlo.reshape %f : (tensor<4x8xf32>) -> tensor<1x4x8xf32>
    %new = stablehlo.dynamic_update_slice %dst, %put, %i, %zero, %zero : (tensor<5x4x8xf32>, tensor<1x4x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<5x4x8xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %new : tensor<i32>, tensor<5x4x8xf32>
  }
  return %r#1 : tensor<5x4x8xf32>
}
}

// -----

// What it is multiplied with waits too: the same as what it sends, once.
// CHECK-LABEL: module @side_input
// CHECK: %[[M:.+]] = stablehlo.dot_general
// CHECK: stablehlo.while({{.+}}, %[[HELD:.+]] = %[[M]])
// CHECK: %[[G:.+]] = "stablehlo.all_reduce"(%[[HELD]])
// CHECK: stablehlo.multiply %[[G]], %[[HELD]]
module @side_input attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%p: tensor<5x4x8xbf16>, %src: tensor<5x4x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<5x4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %dst = %p) : tensor<i32>, tensor<5x4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %cut = stablehlo.dynamic_slice %src, %i, %zero, %zero, sizes = [1, 4, 8] : (tensor<5x4x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x8xbf16>
    %m0 = stablehlo.reshape %cut : (tensor<1x4x8xbf16>) -> tensor<4x8xbf16>
    %m = stablehlo.dot_general %m0, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %g = "stablehlo.all_reduce"(%m) ({
    ^bb0(%l: tensor<bf16>, %q: tensor<bf16>):
      %s = stablehlo.add %l, %q : tensor<bf16>
      stablehlo.return %s : tensor<bf16>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xbf16>) -> tensor<4x8xbf16>
    %h = stablehlo.multiply %g, %m : tensor<4x8xbf16>
    %put = stablehlo.reshape %h : (tensor<4x8xbf16>) -> tensor<1x4x8xbf16>
    %new = stablehlo.dynamic_update_slice %dst, %put, %i, %zero, %zero : (tensor<5x4x8xbf16>, tensor<1x4x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<5x4x8xbf16>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %new : tensor<i32>, tensor<5x4x8xbf16>
  }
  return %r#1 : tensor<5x4x8xbf16>
}
}

// -----

// An accumulator that nothing else reads.
// CHECK-LABEL: module @accumulator
// CHECK: stablehlo.while({{.+}}, %[[SUM:.+]] = %arg0, %[[HELD:.+]] = %{{.+}})
// CHECK: %[[G:.+]] = "stablehlo.all_reduce"(%[[HELD]])
// CHECK: stablehlo.add %[[SUM]], %[[G]]
module @accumulator attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%p: tensor<4x8xbf16>, %src: tensor<5x4x8xbf16>, %v: tensor<8x8xbf16>) -> (tensor<4x8xbf16>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %dst = %p) : tensor<i32>, tensor<4x8xbf16>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %cut = stablehlo.dynamic_slice %src, %i, %zero, %zero, sizes = [1, 4, 8] : (tensor<5x4x8xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x8xbf16>
    %m0 = stablehlo.reshape %cut : (tensor<1x4x8xbf16>) -> tensor<4x8xbf16>
    %m = stablehlo.dot_general %m0, %v, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x8xbf16>) -> tensor<4x8xbf16>
    %g = "stablehlo.all_reduce"(%m) ({
    ^bb0(%l: tensor<bf16>, %q: tensor<bf16>):
      %s = stablehlo.add %l, %q : tensor<bf16>
      stablehlo.return %s : tensor<bf16>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xbf16>) -> tensor<4x8xbf16>
    %new = stablehlo.add %dst, %g : tensor<4x8xbf16>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %new : tensor<i32>, tensor<4x8xbf16>
  }
  return %r#1 : tensor<4x8xbf16>
}
}
