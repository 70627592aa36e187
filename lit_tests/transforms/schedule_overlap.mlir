// RUN: stablehlo-tools opt %s -p 'schedule-overlap{hardware=%{inputs}/slow.toml}' --split-input-file | tee %t.once.mlir | filecheck %s --enable-var-scope
// RUN: stablehlo-tools opt %s -p 'schedule-overlap{hardware=%{inputs}/slow.toml explain}' --split-input-file 2>&1 >%t.mlir | filecheck %s --check-prefix=EXPLAINED
// RUN: stablehlo-tools opt %s -p 'schedule-overlap{hardware=%{inputs}/slow.toml streams=0}' --split-input-file | filecheck %s --check-prefix=MANY
// RUN: stablehlo-tools opt %s -p 'schedule-overlap{hardware=%{inputs}/slow.toml no-compute-reorder}' --split-input-file | filecheck %s --check-prefix=IN-ORDER

// What a second run finds is hidden already.
// RUN: stablehlo-tools opt %t.once.mlir -p 'schedule-overlap{hardware=%{inputs}/slow.toml}' --split-input-file | diff %t.once.mlir -

// EXPLAINED: note: 349 us as written, 321 us planned, no order below 321 us: scheduled
// EXPLAINED-NEXT: note: all_gather of 13.8 us: 13.8 us exposed: all compute of this program feeds it or needs its result
// EXPLAINED-NEXT: note: all_gather of 13.8 us: hidden under dot_general
// EXPLAINED-NEXT: note: all_gather of 13.8 us: hidden under dot_general

// A gather begins where the product before its own does, and is over where the next one begins.
// CHECK-LABEL: module @layers
// CHECK: %[[G0:.+]] = "stablehlo.all_gather"(%arg1)
// CHECK-NEXT: %[[F:.+]]:2 = stablehlo.optimization_barrier %[[G0]], %arg2
// CHECK-NEXT: %[[G1:.+]] = "stablehlo.all_gather"(%[[F]]#1)
// CHECK-NEXT: %[[Y0:.+]] = stablehlo.dot_general %arg0, %[[F]]#0
// CHECK-NEXT: %[[F:.+]]:3 = stablehlo.optimization_barrier %[[Y0]], %arg3, %[[G1]]
// CHECK-NEXT: %[[G2:.+]] = "stablehlo.all_gather"(%[[F]]#1)
// CHECK-NEXT: %[[Y1:.+]] = stablehlo.dot_general %[[F]]#0, %[[F]]#2
// CHECK-NEXT: stablehlo.dot_general %[[Y1]], %[[G2]]

// With any number in flight at a time nothing has to be over where another one begins; then XLA would
// combine the last two gathers, with fences or without.
// MANY-LABEL: module @layers
// MANY-NOT: stablehlo.optimization_barrier
// MANY-LABEL: module @calls
module @layers attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8x8xf32>, %w0: tensor<4x8xf32>, %w1: tensor<4x8xf32>, %w2: tensor<4x8xf32>) -> (tensor<8x8xf32>) {
  %g0 = "stablehlo.all_gather"(%w0) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %y0 = stablehlo.dot_general %x, %g0, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %g1 = "stablehlo.all_gather"(%w1) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %y1 = stablehlo.dot_general %y0, %g1, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %g2 = "stablehlo.all_gather"(%w2) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %y2 = stablehlo.dot_general %y1, %g2, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  return %y2 : tensor<8x8xf32>
}
}

// -----

// Calls are inlined: the layers of one function hide each other's gathers.
// EXPLAINED: note: 349 us as written, 321 us planned, no order below 321 us: scheduled
// CHECK-LABEL: module @calls
// CHECK-NOT: call @layer
// CHECK-COUNT-2: stablehlo.optimization_barrier
module @calls attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func private @layer(%h: tensor<8x8xf32>, %w: tensor<4x8xf32>) -> tensor<8x8xf32> {
  %g = "stablehlo.all_gather"(%w) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %y = stablehlo.dot_general %h, %g, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  return %y : tensor<8x8xf32>
}
func.func @main(%x: tensor<8x8xf32>, %w0: tensor<4x8xf32>, %w1: tensor<4x8xf32>, %w2: tensor<4x8xf32>) -> (tensor<8x8xf32>) {
  %y0 = call @layer(%x, %w0) : (tensor<8x8xf32>, tensor<4x8xf32>) -> tensor<8x8xf32>
  %y1 = call @layer(%y0, %w1) : (tensor<8x8xf32>, tensor<4x8xf32>) -> tensor<8x8xf32>
  %y2 = call @layer(%y1, %w2) : (tensor<8x8xf32>, tensor<4x8xf32>) -> tensor<8x8xf32>
  return %y2 : tensor<8x8xf32>
}
}

// -----

// The body of a loop is scheduled by itself: its first gather stays exposed.
// EXPLAINED: note: 4 times all_gather of 13.8 us: 55.2 us exposed: all compute of this iteration feeds it or needs its result
// CHECK-LABEL: module @loop
// CHECK: do {
// CHECK-NEXT: %[[G0:.+]] = "stablehlo.all_gather"(%arg1)
// CHECK-NEXT: %[[F:.+]]:2 = stablehlo.optimization_barrier %[[G0]], %arg2
// CHECK-NEXT: "stablehlo.all_gather"(%[[F]]#1)
// CHECK: stablehlo.optimization_barrier
// CHECK-NOT: stablehlo.optimization_barrier
// CHECK: return
module @loop attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8x8xf32>, %w0: tensor<4x8xf32>, %w1: tensor<4x8xf32>, %w2: tensor<4x8xf32>) -> (tensor<8x8xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %w:2 = stablehlo.while(%i = %zero, %h = %x) : tensor<i32>, tensor<8x8xf32>
  cond {
    %c = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
  %g0 = "stablehlo.all_gather"(%w0) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %y0 = stablehlo.dot_general %h, %g0, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %g1 = "stablehlo.all_gather"(%w1) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %y1 = stablehlo.dot_general %y0, %g1, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %g2 = "stablehlo.all_gather"(%w2) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %y2 = stablehlo.dot_general %y1, %g2, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %y2 : tensor<i32>, tensor<8x8xf32>
  }
  return %w#1 : tensor<8x8xf32>
}
}

// -----

// Behind a reduction to a number a barrier holds the number, which nothing is fused with; what the
// reduction itself reads does not go through that barrier.
// CHECK-LABEL: module @reduction
// CHECK: %[[G0:.+]] = "stablehlo.all_gather"(%arg1)
// CHECK-NEXT: %[[S:.+]] = stablehlo.reduce(%[[G0]]
// CHECK-NEXT: %[[F:.+]]:3 = stablehlo.optimization_barrier %[[S]], %arg2, %[[G0]]
// CHECK-NEXT: "stablehlo.all_gather"(%[[F]]#1)
// CHECK-NEXT: stablehlo.broadcast_in_dim %[[F]]#0
module @reduction attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8x8xf32>, %w0: tensor<4x8xf32>, %w1: tensor<4x8xf32>, %w2: tensor<4x8xf32>) -> (tensor<8x8xf32>) {
  %g0 = "stablehlo.all_gather"(%w0) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %s = stablehlo.reduce(%g0 init: %zero) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x8xf32>, tensor<f32>) -> tensor<f32>
  %b = stablehlo.broadcast_in_dim %s, dims = [] : (tensor<f32>) -> tensor<8x8xf32>
  %d = stablehlo.subtract %x, %b : tensor<8x8xf32>
  %y0 = stablehlo.dot_general %d, %g0, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %g1 = "stablehlo.all_gather"(%w1) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %y1 = stablehlo.dot_general %y0, %g1, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %g2 = "stablehlo.all_gather"(%w2) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %y2 = stablehlo.dot_general %y1, %g2, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  return %y2 : tensor<8x8xf32>
}
}

// -----

// An op without results that reads what goes through two barriers stays in front of the second.
// CHECK-LABEL: module @effect
// CHECK: %[[F:.+]]:2 = stablehlo.optimization_barrier
// CHECK-NEXT: %[[G1:.+]] = "stablehlo.all_gather"(%[[F]]#1)
// CHECK: stablehlo.custom_call @print(%[[F]]#0, %[[G1]])
// CHECK-NEXT: stablehlo.optimization_barrier
module @effect attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8x8xf32>, %w0: tensor<4x8xf32>, %w1: tensor<4x8xf32>, %w2: tensor<4x8xf32>) -> (tensor<8x8xf32>) {
  %g0 = "stablehlo.all_gather"(%w0) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %y0 = stablehlo.dot_general %x, %g0, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %g1 = "stablehlo.all_gather"(%w1) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  stablehlo.custom_call @print(%g0, %g1) {has_side_effect = true} : (tensor<8x8xf32>, tensor<8x8xf32>) -> ()
  %y1 = stablehlo.dot_general %y0, %g1, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %g2 = "stablehlo.all_gather"(%w2) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %y2 = stablehlo.dot_general %y1, %g2, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %y3 = stablehlo.dot_general %y2, %g0, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %y4 = stablehlo.dot_general %y3, %g1, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  return %y4 : tensor<8x8xf32>
}
}

// -----

// All gathers stand before all compute: each is put where it has something to hide behind.
// CHECK-LABEL: module @far
// CHECK: "stablehlo.all_gather"(%arg1)
// CHECK: stablehlo.optimization_barrier
// CHECK-NEXT: "stablehlo.all_gather"
// CHECK-NEXT: stablehlo.dot_general
// CHECK: stablehlo.optimization_barrier
// CHECK-NEXT: "stablehlo.all_gather"
// CHECK-NEXT: stablehlo.dot_general
module @far attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8x8xf32>, %w0: tensor<4x8xf32>, %w1: tensor<4x8xf32>, %w2: tensor<4x8xf32>) -> (tensor<8x8xf32>) {
  %g1 = "stablehlo.all_gather"(%w1) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %g2 = "stablehlo.all_gather"(%w2) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %g0 = "stablehlo.all_gather"(%w0) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %y0 = stablehlo.dot_general %x, %g0, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %y1 = stablehlo.dot_general %y0, %g1, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %y2 = stablehlo.dot_general %y1, %g2, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  return %y2 : tensor<8x8xf32>
}
}

// -----

// What XLA:GPU does by itself is left to it: it puts independent compute where it hides the gathers.
// CHECK-LABEL: module @reorder
// CHECK-NOT: optimization_barrier
// CHECK: stablehlo.dot_general %arg0, %arg0
// IN-ORDER-LABEL: module @reorder
// IN-ORDER-NOT: optimization_barrier
// IN-ORDER: stablehlo.dot_general %arg0, %arg0
module @reorder attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8x8xf32>, %w0: tensor<4x8xf32>, %w1: tensor<4x8xf32>, %w2: tensor<4x8xf32>) -> (tensor<8x8xf32>, tensor<8x8xf32>) {
  %g0 = "stablehlo.all_gather"(%w0) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %y0 = stablehlo.dot_general %x, %g0, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %g1 = "stablehlo.all_gather"(%w1) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %y1 = stablehlo.dot_general %y0, %g1, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %g2 = "stablehlo.all_gather"(%w2) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %y2 = stablehlo.dot_general %y1, %g2, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %z = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %z1 = stablehlo.dot_general %z, %x, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  return %y2, %z1 : tensor<8x8xf32>, tensor<8x8xf32>
}
}
