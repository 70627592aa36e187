// RUN: stablehlo-tools opt %s -p "pipeline-collectives{direction=sink}" | filecheck %s
// RUN: stablehlo-tools opt %s -p "pipeline-collectives{direction=sink}" -o %t.mlir && stablehlo-tools verify %s %t.mlir

// AR(g) * F, added up: one sum after the loop, if F is the same on all devices of a group.

module attributes {mhlo.num_partitions = 4 : i32} {
func.func public @main(%x: tensor<4x4x8xf32>, %s: tensor<4xf32>) -> (tensor<4x8xf32>, tensor<4x8xf32>, tensor<4x8xf32>, tensor<4x8xf32>, tensor<4x8xf32>, tensor<4x8xf32>, tensor<4x8xf32>, tensor<4x8xf32>) {
  %0 = func.call @sum_times_sum(%x, %s) : (tensor<4x4x8xf32>, tensor<4xf32>) -> tensor<4x8xf32>
  %1 = func.call @over_sum(%x, %s) : (tensor<4x4x8xf32>, tensor<4xf32>) -> tensor<4x8xf32>
  %2 = func.call @wider_group(%x, %s) : (tensor<4x4x8xf32>, tensor<4xf32>) -> tensor<4x8xf32>
  %3 = func.call @counted_factor(%x, %s) : (tensor<4x4x8xf32>, tensor<4xf32>) -> tensor<4x8xf32>
  %4 = func.call @own_factor(%x, %s) : (tensor<4x4x8xf32>, tensor<4xf32>) -> tensor<4x8xf32>
  %5 = func.call @smaller_group(%x, %s) : (tensor<4x4x8xf32>, tensor<4xf32>) -> tensor<4x8xf32>
  %6 = func.call @running_factor(%x, %s) : (tensor<4x4x8xf32>, tensor<4xf32>) -> tensor<4x8xf32>
  %7 = func.call @mask_of_rank(%x, %s) : (tensor<4x4x8xf32>, tensor<4xf32>) -> tensor<4x8xf32>
  return %0, %1, %2, %3, %4, %5, %6, %7 : tensor<4x8xf32>, tensor<4x8xf32>, tensor<4x8xf32>, tensor<4x8xf32>, tensor<4x8xf32>, tensor<4x8xf32>, tensor<4x8xf32>, tensor<4x8xf32>
}

// CHECK-LABEL: func @sum_times_sum
// CHECK: stablehlo.while
// CHECK: %[[F:.*]] = stablehlo.broadcast_in_dim
// CHECK: %[[OWN:.*]] = stablehlo.multiply %{{.*}}, %[[F]]
// CHECK: stablehlo.add %{{.*}}, %[[OWN]]
// CHECK: stablehlo.return
// CHECK: "stablehlo.all_reduce"{{.*}}
// CHECK: (tensor<4x8xf32>) -> tensor<4x8xf32>
// CHECK: return
func.func @sum_times_sum(%x: tensor<4x4x8xf32>, %s: tensor<4xf32>) -> tensor<4x8xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %start = stablehlo.constant dense<0.0> : tensor<4x8xf32>
  %unit = stablehlo.constant dense<1.0> : tensor<f32>
  %r:3 = stablehlo.while(%i = %zero, %acc = %start, %run = %unit) : tensor<i32>, tensor<4x8xf32>, tensor<f32>
   cond {
    %below = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %below : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %x, %i, %zero, %zero, sizes = [1, 4, 8] : (tensor<4x4x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x8xf32>
    %v = stablehlo.reshape %row : (tensor<1x4x8xf32>) -> tensor<4x8xf32>
    %cell = stablehlo.dynamic_slice %s, %i, sizes = [1] : (tensor<4xf32>, tensor<i32>) -> tensor<1xf32>
    %own = stablehlo.reshape %cell : (tensor<1xf32>) -> tensor<f32>
      %g = "stablehlo.all_reduce"(%v) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> ({
      ^bb0(%p1: tensor<f32>, %q1: tensor<f32>):
        %pq1 = stablehlo.add %p1, %q1 : tensor<f32>
        stablehlo.return %pq1 : tensor<f32>
      }) : (tensor<4x8xf32>) -> tensor<4x8xf32>
      %t = "stablehlo.all_reduce"(%own) <{channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> ({
      ^bb0(%p2: tensor<f32>, %q2: tensor<f32>):
        %pq2 = stablehlo.add %p2, %q2 : tensor<f32>
        stablehlo.return %pq2 : tensor<f32>
      }) : (tensor<f32>) -> tensor<f32>
    %f = stablehlo.broadcast_in_dim %t, dims = [] : (tensor<f32>) -> tensor<4x8xf32>
    %m = stablehlo.multiply %g, %f : tensor<4x8xf32>
    %sum = stablehlo.add %acc, %m : tensor<4x8xf32>
    %last = stablehlo.multiply %run, %unit : tensor<f32>
    %next = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %next, %sum, %last : tensor<i32>, tensor<4x8xf32>, tensor<f32>
  }
  return %r#1 : tensor<4x8xf32>
}

// CHECK-LABEL: func @over_sum
// CHECK: stablehlo.while
// CHECK: %[[F:.*]] = stablehlo.broadcast_in_dim
// CHECK: %[[OWN:.*]] = stablehlo.divide %{{.*}}, %[[F]]
// CHECK: stablehlo.add %{{.*}}, %[[OWN]]
// CHECK: stablehlo.return
// CHECK: "stablehlo.all_reduce"{{.*}}
// CHECK: (tensor<4x8xf32>) -> tensor<4x8xf32>
// CHECK: return
func.func @over_sum(%x: tensor<4x4x8xf32>, %s: tensor<4xf32>) -> tensor<4x8xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %start = stablehlo.constant dense<0.0> : tensor<4x8xf32>
  %unit = stablehlo.constant dense<1.0> : tensor<f32>
  %r:3 = stablehlo.while(%i = %zero, %acc = %start, %run = %unit) : tensor<i32>, tensor<4x8xf32>, tensor<f32>
   cond {
    %below = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %below : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %x, %i, %zero, %zero, sizes = [1, 4, 8] : (tensor<4x4x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x8xf32>
    %v = stablehlo.reshape %row : (tensor<1x4x8xf32>) -> tensor<4x8xf32>
    %cell = stablehlo.dynamic_slice %s, %i, sizes = [1] : (tensor<4xf32>, tensor<i32>) -> tensor<1xf32>
    %own = stablehlo.reshape %cell : (tensor<1xf32>) -> tensor<f32>
      %g = "stablehlo.all_reduce"(%v) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> ({
      ^bb0(%p1: tensor<f32>, %q1: tensor<f32>):
        %pq1 = stablehlo.add %p1, %q1 : tensor<f32>
        stablehlo.return %pq1 : tensor<f32>
      }) : (tensor<4x8xf32>) -> tensor<4x8xf32>
      %t = "stablehlo.all_reduce"(%own) <{channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> ({
      ^bb0(%p2: tensor<f32>, %q2: tensor<f32>):
        %pq2 = stablehlo.add %p2, %q2 : tensor<f32>
        stablehlo.return %pq2 : tensor<f32>
      }) : (tensor<f32>) -> tensor<f32>
    %f = stablehlo.broadcast_in_dim %t, dims = [] : (tensor<f32>) -> tensor<4x8xf32>
    %m = stablehlo.divide %g, %f : tensor<4x8xf32>
    %sum = stablehlo.add %acc, %m : tensor<4x8xf32>
    %last = stablehlo.multiply %run, %unit : tensor<f32>
    %next = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %next, %sum, %last : tensor<i32>, tensor<4x8xf32>, tensor<f32>
  }
  return %r#1 : tensor<4x8xf32>
}

// CHECK-LABEL: func @wider_group
// CHECK: stablehlo.while
// CHECK: %[[F:.*]] = stablehlo.broadcast_in_dim
// CHECK: %[[OWN:.*]] = stablehlo.multiply %{{.*}}, %[[F]]
// CHECK: stablehlo.add %{{.*}}, %[[OWN]]
// CHECK: stablehlo.return
// CHECK: "stablehlo.all_reduce"{{.*}}
// CHECK: (tensor<4x8xf32>) -> tensor<4x8xf32>
// CHECK: return
func.func @wider_group(%x: tensor<4x4x8xf32>, %s: tensor<4xf32>) -> tensor<4x8xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %start = stablehlo.constant dense<0.0> : tensor<4x8xf32>
  %unit = stablehlo.constant dense<1.0> : tensor<f32>
  %r:3 = stablehlo.while(%i = %zero, %acc = %start, %run = %unit) : tensor<i32>, tensor<4x8xf32>, tensor<f32>
   cond {
    %below = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %below : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %x, %i, %zero, %zero, sizes = [1, 4, 8] : (tensor<4x4x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x8xf32>
    %v = stablehlo.reshape %row : (tensor<1x4x8xf32>) -> tensor<4x8xf32>
    %cell = stablehlo.dynamic_slice %s, %i, sizes = [1] : (tensor<4xf32>, tensor<i32>) -> tensor<1xf32>
    %own = stablehlo.reshape %cell : (tensor<1xf32>) -> tensor<f32>
      %g = "stablehlo.all_reduce"(%v) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, use_global_device_ids}> ({
      ^bb0(%p1: tensor<f32>, %q1: tensor<f32>):
        %pq1 = stablehlo.add %p1, %q1 : tensor<f32>
        stablehlo.return %pq1 : tensor<f32>
      }) : (tensor<4x8xf32>) -> tensor<4x8xf32>
      %t = "stablehlo.all_reduce"(%own) <{channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> ({
      ^bb0(%p2: tensor<f32>, %q2: tensor<f32>):
        %pq2 = stablehlo.add %p2, %q2 : tensor<f32>
        stablehlo.return %pq2 : tensor<f32>
      }) : (tensor<f32>) -> tensor<f32>
    %f = stablehlo.broadcast_in_dim %t, dims = [] : (tensor<f32>) -> tensor<4x8xf32>
    %m = stablehlo.multiply %g, %f : tensor<4x8xf32>
    %sum = stablehlo.add %acc, %m : tensor<4x8xf32>
    %last = stablehlo.multiply %run, %unit : tensor<f32>
    %next = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %next, %sum, %last : tensor<i32>, tensor<4x8xf32>, tensor<f32>
  }
  return %r#1 : tensor<4x8xf32>
}

// CHECK-LABEL: func @counted_factor
// CHECK: stablehlo.while
// CHECK: %[[F:.*]] = stablehlo.broadcast_in_dim
// CHECK: %[[OWN:.*]] = stablehlo.multiply %{{.*}}, %[[F]]
// CHECK: stablehlo.add %{{.*}}, %[[OWN]]
// CHECK: stablehlo.return
// CHECK: "stablehlo.all_reduce"{{.*}}
// CHECK: (tensor<4x8xf32>) -> tensor<4x8xf32>
// CHECK: return
func.func @counted_factor(%x: tensor<4x4x8xf32>, %s: tensor<4xf32>) -> tensor<4x8xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %start = stablehlo.constant dense<0.0> : tensor<4x8xf32>
  %unit = stablehlo.constant dense<1.0> : tensor<f32>
  %r:3 = stablehlo.while(%i = %zero, %acc = %start, %run = %unit) : tensor<i32>, tensor<4x8xf32>, tensor<f32>
   cond {
    %below = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %below : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %x, %i, %zero, %zero, sizes = [1, 4, 8] : (tensor<4x4x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x8xf32>
    %v = stablehlo.reshape %row : (tensor<1x4x8xf32>) -> tensor<4x8xf32>
    %cell = stablehlo.dynamic_slice %s, %i, sizes = [1] : (tensor<4xf32>, tensor<i32>) -> tensor<1xf32>
    %own = stablehlo.reshape %cell : (tensor<1xf32>) -> tensor<f32>
      %g = "stablehlo.all_reduce"(%v) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> ({
      ^bb0(%p1: tensor<f32>, %q1: tensor<f32>):
        %pq1 = stablehlo.add %p1, %q1 : tensor<f32>
        stablehlo.return %pq1 : tensor<f32>
      }) : (tensor<4x8xf32>) -> tensor<4x8xf32>
    %t = stablehlo.convert %i : (tensor<i32>) -> tensor<f32>
    %f = stablehlo.broadcast_in_dim %t, dims = [] : (tensor<f32>) -> tensor<4x8xf32>
    %m = stablehlo.multiply %g, %f : tensor<4x8xf32>
    %sum = stablehlo.add %acc, %m : tensor<4x8xf32>
    %last = stablehlo.multiply %run, %unit : tensor<f32>
    %next = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %next, %sum, %last : tensor<i32>, tensor<4x8xf32>, tensor<f32>
  }
  return %r#1 : tensor<4x8xf32>
}

// CHECK-LABEL: func @own_factor
// CHECK: stablehlo.while
// CHECK: "stablehlo.all_reduce"
// CHECK: %[[G:.*]] = stablehlo.multiply
// CHECK: stablehlo.return
// CHECK-NOT: all_reduce
// CHECK: return
func.func @own_factor(%x: tensor<4x4x8xf32>, %s: tensor<4xf32>) -> tensor<4x8xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %start = stablehlo.constant dense<0.0> : tensor<4x8xf32>
  %unit = stablehlo.constant dense<1.0> : tensor<f32>
  %r:3 = stablehlo.while(%i = %zero, %acc = %start, %run = %unit) : tensor<i32>, tensor<4x8xf32>, tensor<f32>
   cond {
    %below = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %below : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %x, %i, %zero, %zero, sizes = [1, 4, 8] : (tensor<4x4x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x8xf32>
    %v = stablehlo.reshape %row : (tensor<1x4x8xf32>) -> tensor<4x8xf32>
    %cell = stablehlo.dynamic_slice %s, %i, sizes = [1] : (tensor<4xf32>, tensor<i32>) -> tensor<1xf32>
    %own = stablehlo.reshape %cell : (tensor<1xf32>) -> tensor<f32>
      %g = "stablehlo.all_reduce"(%v) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> ({
      ^bb0(%p1: tensor<f32>, %q1: tensor<f32>):
        %pq1 = stablehlo.add %p1, %q1 : tensor<f32>
        stablehlo.return %pq1 : tensor<f32>
      }) : (tensor<4x8xf32>) -> tensor<4x8xf32>
    %f = stablehlo.broadcast_in_dim %own, dims = [] : (tensor<f32>) -> tensor<4x8xf32>
    %m = stablehlo.multiply %g, %f : tensor<4x8xf32>
    %sum = stablehlo.add %acc, %m : tensor<4x8xf32>
    %last = stablehlo.multiply %run, %unit : tensor<f32>
    %next = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %next, %sum, %last : tensor<i32>, tensor<4x8xf32>, tensor<f32>
  }
  return %r#1 : tensor<4x8xf32>
}

// CHECK-LABEL: func @smaller_group
// CHECK: stablehlo.while
// CHECK: "stablehlo.all_reduce"
// CHECK: %[[G:.*]] = stablehlo.multiply
// CHECK: stablehlo.return
// CHECK-NOT: all_reduce
// CHECK: return
func.func @smaller_group(%x: tensor<4x4x8xf32>, %s: tensor<4xf32>) -> tensor<4x8xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %start = stablehlo.constant dense<0.0> : tensor<4x8xf32>
  %unit = stablehlo.constant dense<1.0> : tensor<f32>
  %r:3 = stablehlo.while(%i = %zero, %acc = %start, %run = %unit) : tensor<i32>, tensor<4x8xf32>, tensor<f32>
   cond {
    %below = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %below : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %x, %i, %zero, %zero, sizes = [1, 4, 8] : (tensor<4x4x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x8xf32>
    %v = stablehlo.reshape %row : (tensor<1x4x8xf32>) -> tensor<4x8xf32>
    %cell = stablehlo.dynamic_slice %s, %i, sizes = [1] : (tensor<4xf32>, tensor<i32>) -> tensor<1xf32>
    %own = stablehlo.reshape %cell : (tensor<1xf32>) -> tensor<f32>
      %g = "stablehlo.all_reduce"(%v) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> ({
      ^bb0(%p1: tensor<f32>, %q1: tensor<f32>):
        %pq1 = stablehlo.add %p1, %q1 : tensor<f32>
        stablehlo.return %pq1 : tensor<f32>
      }) : (tensor<4x8xf32>) -> tensor<4x8xf32>
      %t = "stablehlo.all_reduce"(%own) <{channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, use_global_device_ids}> ({
      ^bb0(%p2: tensor<f32>, %q2: tensor<f32>):
        %pq2 = stablehlo.add %p2, %q2 : tensor<f32>
        stablehlo.return %pq2 : tensor<f32>
      }) : (tensor<f32>) -> tensor<f32>
    %f = stablehlo.broadcast_in_dim %t, dims = [] : (tensor<f32>) -> tensor<4x8xf32>
    %m = stablehlo.multiply %g, %f : tensor<4x8xf32>
    %sum = stablehlo.add %acc, %m : tensor<4x8xf32>
    %last = stablehlo.multiply %run, %unit : tensor<f32>
    %next = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %next, %sum, %last : tensor<i32>, tensor<4x8xf32>, tensor<f32>
  }
  return %r#1 : tensor<4x8xf32>
}

// CHECK-LABEL: func @running_factor
// CHECK: stablehlo.while
// CHECK: "stablehlo.all_reduce"
// CHECK: %[[G:.*]] = stablehlo.multiply
// CHECK: stablehlo.return
// CHECK-NOT: all_reduce
// CHECK: return
func.func @running_factor(%x: tensor<4x4x8xf32>, %s: tensor<4xf32>) -> tensor<4x8xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %start = stablehlo.constant dense<0.0> : tensor<4x8xf32>
  %unit = stablehlo.constant dense<1.0> : tensor<f32>
  %r:3 = stablehlo.while(%i = %zero, %acc = %start, %run = %unit) : tensor<i32>, tensor<4x8xf32>, tensor<f32>
   cond {
    %below = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %below : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %x, %i, %zero, %zero, sizes = [1, 4, 8] : (tensor<4x4x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x8xf32>
    %v = stablehlo.reshape %row : (tensor<1x4x8xf32>) -> tensor<4x8xf32>
    %cell = stablehlo.dynamic_slice %s, %i, sizes = [1] : (tensor<4xf32>, tensor<i32>) -> tensor<1xf32>
    %own = stablehlo.reshape %cell : (tensor<1xf32>) -> tensor<f32>
      %g = "stablehlo.all_reduce"(%v) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> ({
      ^bb0(%p1: tensor<f32>, %q1: tensor<f32>):
        %pq1 = stablehlo.add %p1, %q1 : tensor<f32>
        stablehlo.return %pq1 : tensor<f32>
      }) : (tensor<4x8xf32>) -> tensor<4x8xf32>
    %f = stablehlo.broadcast_in_dim %run, dims = [] : (tensor<f32>) -> tensor<4x8xf32>
    %m = stablehlo.multiply %g, %f : tensor<4x8xf32>
    %sum = stablehlo.add %acc, %m : tensor<4x8xf32>
    %half = stablehlo.constant dense<5.000000e-01> : tensor<f32>
    %last = stablehlo.multiply %run, %half : tensor<f32>
    %next = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %next, %sum, %last : tensor<i32>, tensor<4x8xf32>, tensor<f32>
  }
  return %r#1 : tensor<4x8xf32>
}

// CHECK-LABEL: func @mask_of_rank
// CHECK: stablehlo.while
// CHECK: "stablehlo.all_reduce"
// CHECK: %[[G:.*]] = stablehlo.multiply
// CHECK: stablehlo.return
// CHECK-NOT: all_reduce
// CHECK: return
func.func @mask_of_rank(%x: tensor<4x4x8xf32>, %s: tensor<4xf32>) -> tensor<4x8xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %start = stablehlo.constant dense<0.0> : tensor<4x8xf32>
  %unit = stablehlo.constant dense<1.0> : tensor<f32>
  %r:3 = stablehlo.while(%i = %zero, %acc = %start, %run = %unit) : tensor<i32>, tensor<4x8xf32>, tensor<f32>
   cond {
    %below = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %below : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %x, %i, %zero, %zero, sizes = [1, 4, 8] : (tensor<4x4x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x8xf32>
    %v = stablehlo.reshape %row : (tensor<1x4x8xf32>) -> tensor<4x8xf32>
    %cell = stablehlo.dynamic_slice %s, %i, sizes = [1] : (tensor<4xf32>, tensor<i32>) -> tensor<1xf32>
    %own = stablehlo.reshape %cell : (tensor<1xf32>) -> tensor<f32>
      %g = "stablehlo.all_reduce"(%v) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> ({
      ^bb0(%p1: tensor<f32>, %q1: tensor<f32>):
        %pq1 = stablehlo.add %p1, %q1 : tensor<f32>
        stablehlo.return %pq1 : tensor<f32>
      }) : (tensor<4x8xf32>) -> tensor<4x8xf32>
    %id = stablehlo.partition_id : tensor<ui32>
    %n = stablehlo.convert %id : (tensor<ui32>) -> tensor<i32>
    %is = stablehlo.compare EQ, %n, %i : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %t = stablehlo.convert %is : (tensor<i1>) -> tensor<f32>
    %f = stablehlo.broadcast_in_dim %t, dims = [] : (tensor<f32>) -> tensor<4x8xf32>
    %m = stablehlo.multiply %g, %f : tensor<4x8xf32>
    %sum = stablehlo.add %acc, %m : tensor<4x8xf32>
    %last = stablehlo.multiply %run, %unit : tensor<f32>
    %next = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %next, %sum, %last : tensor<i32>, tensor<4x8xf32>, tensor<f32>
  }
  return %r#1 : tensor<4x8xf32>
}
}
