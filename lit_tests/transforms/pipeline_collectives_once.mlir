// RUN: stablehlo-tools opt %s -p 'pipeline-collectives{direction=once explain}' --split-input-file >%t.mlir 2>%t.notes
// RUN: filecheck %s --enable-var-scope --input-file %t.mlir
// RUN: filecheck %s --check-prefix=EXPLAINED --input-file %t.notes
// RUN: stablehlo-tools opt %t.mlir -p 'pipeline-collectives{direction=once}' --split-input-file | diff %t.mlir -

// Weights of layers are gathered once for all microbatches, and gradients, added to their rows, are
// reduced once behind them.
// EXPLAINED: note: all_gather runs once, before the loop that repeats it, on all rows at once
// EXPLAINED: note: all_reduce runs once, after the loop that repeats it, on all rows at once
// CHECK-LABEL: module @rows attributes
// CHECK: %[[ALL:.+]] = "stablehlo.all_gather"(%{{.+}}) <{all_gather_dim = 1 : i64
// CHECK-SAME: (tensor<5x2x4xf32>) -> tensor<5x4x4xf32>
// CHECK: %[[ZEROS:.+]] = stablehlo.constant dense<-0.000000e+00> : tensor<5x4x4xf32>
// CHECK: %[[W:.+]]:3 = stablehlo.while({{.+}} = %[[ZEROS]])
// CHECK: stablehlo.while(%[[I:.+]] = %{{.+}}, %[[H:.+]] = %{{.+}}, %[[SUMS:.+]] = %{{.+}}) : tensor<i32>, tensor<8x4xf32>, tensor<5x4x4xf32>
// CHECK: } do {
// CHECK: %[[ROW:.+]] = stablehlo.dynamic_slice %[[ALL]], %[[I]],
// CHECK-NEXT: %[[WEIGHT:.+]] = stablehlo.reshape %[[ROW]]
// CHECK-NEXT: %[[D:.+]] = stablehlo.dot_general %[[H]], %[[WEIGHT]]
// CHECK-NOT: all_reduce
// CHECK: %[[OLD:.+]] = stablehlo.dynamic_slice %[[SUMS]], %[[I]],
// CHECK: %[[NEW:.+]] = stablehlo.add %[[OLD]]
// CHECK-NEXT: stablehlo.dynamic_update_slice %[[SUMS]], %[[NEW]], %[[I]]
// CHECK: %[[ONCE:.+]] = "stablehlo.all_reduce"(%[[W]]#2)
module @rows attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8x4xf32>, %w: tensor<5x2x4xf32>) -> (tensor<8x4xf32>, tensor<5x4x4xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %two = stablehlo.constant dense<2> : tensor<i32>
  %five = stablehlo.constant dense<5> : tensor<i32>
  %none = stablehlo.constant dense<0.0> : tensor<5x4x4xf32>
  %z:3 = stablehlo.while(%m = %zero, %hidden = %x, %sums = %none) : tensor<i32>, tensor<8x4xf32>, tensor<5x4x4xf32>
  cond {
    %more = stablehlo.compare LT, %m, %two : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %y:3 = stablehlo.while(%i = %zero, %h = %hidden, %g = %sums) : tensor<i32>, tensor<8x4xf32>, tensor<5x4x4xf32>
    cond {
      %more = stablehlo.compare LT, %i, %five : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    } do {
      %row = stablehlo.dynamic_slice %w, %i, %zero, %zero, sizes = [1, 2, 4] : (tensor<5x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
      %part = stablehlo.reshape %row : (tensor<1x2x4xf32>) -> tensor<2x4xf32>
      %weight = "stablehlo.all_gather"(%part) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x4xf32>) -> tensor<4x4xf32>
      %d = stablehlo.dot_general %h, %weight, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
      %next = stablehlo.tanh %d : tensor<8x4xf32>
      %local = stablehlo.dot_general %h, %next, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
      %all = "stablehlo.all_reduce"(%local) ({
      ^bb0(%l: tensor<f32>, %q: tensor<f32>):
        %s = stablehlo.add %l, %q : tensor<f32>
        stablehlo.return %s : tensor<f32>
      }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x4xf32>) -> tensor<4x4xf32>
      %term = stablehlo.reshape %all : (tensor<4x4xf32>) -> tensor<1x4x4xf32>
      %old = stablehlo.dynamic_slice %g, %i, %zero, %zero, sizes = [1, 4, 4] : (tensor<5x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
      %new = stablehlo.add %old, %term : tensor<1x4x4xf32>
      %added = stablehlo.dynamic_update_slice %g, %new, %i, %zero, %zero : (tensor<5x4x4xf32>, tensor<1x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<5x4x4xf32>
      %n = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %n, %next, %added : tensor<i32>, tensor<8x4xf32>, tensor<5x4x4xf32>
    }
    %n = stablehlo.add %m, %one : tensor<i32>
    stablehlo.return %n, %y#1, %y#2 : tensor<i32>, tensor<8x4xf32>, tensor<5x4x4xf32>
  }
  return %z#1, %z#2 : tensor<8x4xf32>, tensor<5x4x4xf32>
}
}

// A pipeline's rank takes the chunk of a table: two are gathered, not one in each of five ticks. What
// a chunk adds where it is its turn is the same on both devices of a group.
// CHECK-LABEL: module @table attributes
// CHECK: %[[ALL:.+]] = "stablehlo.all_gather"({{.+}}) -> tensor<2x4x4xf32>
// CHECK: %[[W:.+]]:4 = stablehlo.while
// CHECK-NOT: all_gather
// CHECK: stablehlo.select
// CHECK: %[[ONCE:.+]] = "stablehlo.reduce_scatter"(%[[W]]#3)
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 1]]>{{.*}} scatter_dimension = 1
// -----
module @table attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8x4xf32>, %w: tensor<2x2x4xf32>, %given: tensor<2x2x4xf32>) -> (tensor<8x4xf32>, tensor<2x2x4xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %five = stablehlo.constant dense<5> : tensor<i32>
  %chunks = stablehlo.constant dense<[1, 0, 1, 1, 0]> : tensor<5xi32>
  %turns = stablehlo.constant dense<[1, 0, 1, 1, 1]> : tensor<5xi32>
  %z:3 = stablehlo.while(%i = %zero, %h = %x, %g = %given) : tensor<i32>, tensor<8x4xf32>, tensor<2x2x4xf32>
  cond {
    %more = stablehlo.compare LT, %i, %five : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %cell = stablehlo.dynamic_slice %chunks, %i, sizes = [1] : (tensor<5xi32>, tensor<i32>) -> tensor<1xi32>
    %chunk = stablehlo.reshape %cell : (tensor<1xi32>) -> tensor<i32>
    %turn = stablehlo.dynamic_slice %turns, %i, sizes = [1] : (tensor<5xi32>, tensor<i32>) -> tensor<1xi32>
    %mine = stablehlo.reshape %turn : (tensor<1xi32>) -> tensor<i32>
    %valid = stablehlo.compare EQ, %mine, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %row = stablehlo.dynamic_slice %w, %chunk, %zero, %zero, sizes = [1, 2, 4] : (tensor<2x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
    %part = stablehlo.reshape %row : (tensor<1x2x4xf32>) -> tensor<2x4xf32>
    %weight = "stablehlo.all_gather"(%part) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x4xf32>) -> tensor<4x4xf32>
    %d = stablehlo.dot_general %h, %weight, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    %next = stablehlo.tanh %d : tensor<8x4xf32>
    %local = stablehlo.dot_general %h, %next, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %sum = "stablehlo.reduce_scatter"(%local) ({
    ^bb0(%l: tensor<f32>, %q: tensor<f32>):
      %s = stablehlo.add %l, %q : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {scatter_dimension = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x4xf32>) -> tensor<2x4xf32>
    %term = stablehlo.reshape %sum : (tensor<2x4xf32>) -> tensor<1x2x4xf32>
    %old = stablehlo.dynamic_slice %g, %chunk, %zero, %zero, sizes = [1, 2, 4] : (tensor<2x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
    %new = stablehlo.add %old, %term : tensor<1x2x4xf32>
    %put = stablehlo.select %valid, %new, %old : tensor<i1>, tensor<1x2x4xf32>
    %added = stablehlo.dynamic_update_slice %g, %put, %chunk, %zero, %zero : (tensor<2x2x4xf32>, tensor<1x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<2x2x4xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %next, %added : tensor<i32>, tensor<8x4xf32>, tensor<2x2x4xf32>
  }
  return %z#1, %z#2 : tensor<8x4xf32>, tensor<2x2x4xf32>
}
}

// Sums go on from the first device's carry: the carry stays local, and is reduced once.
// EXPLAINED: note: all_reduce runs once, after the loop that repeats it
// CHECK-LABEL: module @from_the_first_device attributes
// CHECK: func.func @main({{.+}}, %[[GIVEN:.+]]: tensor<16x4xf32>, %{{.+}}: tensor<i32>)
// CHECK: %[[START:.+]] = stablehlo.select %{{.+}}, %[[GIVEN]], %{{.+}} : tensor<i1>, tensor<16x4xf32>
// CHECK-NEXT: %[[W:.+]]:2 = stablehlo.while(%{{.+}}, %[[LOCAL:.+]] = %[[START]])
// CHECK: } do {
// CHECK-NOT: select
// CHECK: %[[ADDED:.+]] = "stablehlo.scatter"(%[[LOCAL]],
// CHECK: stablehlo.return %{{.+}}, %[[ADDED]] : tensor<i32>, tensor<16x4xf32>
// CHECK-NEXT: }
// CHECK-NEXT: %[[ONCE:.+]] = "stablehlo.all_reduce"(%[[W]]#1)
// -----
module @from_the_first_device attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%ids: tensor<3x2x1xi32>, %rows: tensor<3x2x4xf32>, %given: tensor<16x4xf32>, %times: tensor<i32>) -> tensor<16x4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %zeros = stablehlo.constant dense<0.0> : tensor<16x4xf32>
  %z:2 = stablehlo.while(%i = %zero, %sum = %given) : tensor<i32>, tensor<16x4xf32>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %d = stablehlo.partition_id : tensor<ui32>
    %device = stablehlo.convert %d : (tensor<ui32>) -> tensor<i32>
    %first = stablehlo.compare EQ, %device, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %own = stablehlo.select %first, %sum, %zeros : tensor<i1>, tensor<16x4xf32>
    %id = stablehlo.dynamic_slice %ids, %i, %zero, %zero, sizes = [1, 2, 1] : (tensor<3x2x1xi32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x1xi32>
    %places = stablehlo.reshape %id : (tensor<1x2x1xi32>) -> tensor<2x1xi32>
    %row = stablehlo.dynamic_slice %rows, %i, %zero, %zero, sizes = [1, 2, 4] : (tensor<3x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
    %updates = stablehlo.reshape %row : (tensor<1x2x4xf32>) -> tensor<2x4xf32>
    %added = "stablehlo.scatter"(%own, %places, %updates) ({
    ^bb0(%l: tensor<f32>, %r: tensor<f32>):
      %s = stablehlo.add %l, %r : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>} : (tensor<16x4xf32>, tensor<2x1xi32>, tensor<2x4xf32>) -> tensor<16x4xf32>
    %next = "stablehlo.all_reduce"(%added) ({
    ^bb0(%l: tensor<f32>, %r: tensor<f32>):
      %s = stablehlo.add %l, %r : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<16x4xf32>) -> tensor<16x4xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %next : tensor<i32>, tensor<16x4xf32>
  }
  return %z#1 : tensor<16x4xf32>
}
}

// XLA's partitioner asks for the other devices instead.
// CHECK-LABEL: module @of_the_other_devices attributes
// CHECK: func.func @main({{.+}}, %[[GIVEN:.+]]: tensor<16x4xf32>, %{{.+}}: tensor<i32>)
// CHECK: %[[START:.+]] = stablehlo.select %{{.+}}, %{{.+}}, %[[GIVEN]] : tensor<i1>, tensor<16x4xf32>
// CHECK-NEXT: %[[W:.+]]:2 = stablehlo.while(%{{.+}}, %[[LOCAL:.+]] = %[[START]])
// CHECK: } do {
// CHECK-NOT: select
// CHECK: %[[ADDED:.+]] = "stablehlo.scatter"(%[[LOCAL]],
// CHECK: stablehlo.return %{{.+}}, %[[ADDED]] : tensor<i32>, tensor<16x4xf32>
// CHECK-NEXT: }
// CHECK-NEXT: %[[ONCE:.+]] = "stablehlo.all_reduce"(%[[W]]#1)
// -----
module @of_the_other_devices attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%ids: tensor<3x2x1xi32>, %rows: tensor<3x2x4xf32>, %given: tensor<16x4xf32>, %times: tensor<i32>) -> tensor<16x4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %zeros = stablehlo.constant dense<0.0> : tensor<16x4xf32>
  %z:2 = stablehlo.while(%i = %zero, %sum = %given) : tensor<i32>, tensor<16x4xf32>
  cond {
    %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %d = stablehlo.partition_id : tensor<ui32>
    %device = stablehlo.convert %d : (tensor<ui32>) -> tensor<i32>
    %first = stablehlo.compare NE, %device, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %own = stablehlo.select %first, %zeros, %sum : tensor<i1>, tensor<16x4xf32>
    %id = stablehlo.dynamic_slice %ids, %i, %zero, %zero, sizes = [1, 2, 1] : (tensor<3x2x1xi32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x1xi32>
    %places = stablehlo.reshape %id : (tensor<1x2x1xi32>) -> tensor<2x1xi32>
    %row = stablehlo.dynamic_slice %rows, %i, %zero, %zero, sizes = [1, 2, 4] : (tensor<3x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
    %updates = stablehlo.reshape %row : (tensor<1x2x4xf32>) -> tensor<2x4xf32>
    %added = "stablehlo.scatter"(%own, %places, %updates) ({
    ^bb0(%l: tensor<f32>, %r: tensor<f32>):
      %s = stablehlo.add %l, %r : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>} : (tensor<16x4xf32>, tensor<2x1xi32>, tensor<2x4xf32>) -> tensor<16x4xf32>
    %next = "stablehlo.all_reduce"(%added) ({
    ^bb0(%l: tensor<f32>, %r: tensor<f32>):
      %s = stablehlo.add %l, %r : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<16x4xf32>) -> tensor<16x4xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %next : tensor<i32>, tensor<16x4xf32>
  }
  return %z#1 : tensor<16x4xf32>
}
}
