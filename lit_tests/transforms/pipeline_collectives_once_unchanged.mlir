// RUN: stablehlo-tools opt %s -p 'pipeline-collectives{direction=once explain}' --split-input-file >%t.mlir 2>%t.notes
// RUN: stablehlo-tools opt %s --split-input-file | diff - %t.mlir
// RUN: filecheck %s --input-file %t.notes

// As many rows as iterations: to gather all of them ahead would save nothing, and the gradients are
// read in between.
// CHECK: note: all_gather stays in its iteration: no loop around it is known to repeat its operand, or to use its result only in a sum
// CHECK: note: reduce_scatter stays in its iteration: no loop around it is known to repeat its operand
module @as_many attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<8x4xf32>, %w: tensor<2x2x4xf32>, %given: tensor<2x2x4xf32>) -> (tensor<8x4xf32>, tensor<2x2x4xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %five = stablehlo.constant dense<2> : tensor<i32>
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
    %row = stablehlo.dynamic_slice %w, %i, %zero, %zero, sizes = [1, 2, 4] : (tensor<2x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
    %part = stablehlo.reshape %row : (tensor<1x2x4xf32>) -> tensor<2x4xf32>
    %weight = "stablehlo.all_gather"(%part) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<2x4xf32>) -> tensor<4x4xf32>
    %d = stablehlo.dot_general %h, %weight, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    %next = stablehlo.tanh %d : tensor<8x4xf32>
    %seen = stablehlo.dynamic_slice %g, %zero, %zero, %zero, sizes = [1, 2, 4] : (tensor<2x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
    %local = stablehlo.dot_general %h, %next, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %sum = "stablehlo.reduce_scatter"(%local) ({
    ^bb0(%l: tensor<f32>, %q: tensor<f32>):
      %s = stablehlo.add %l, %q : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {scatter_dimension = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x4xf32>) -> tensor<2x4xf32>
    %term = stablehlo.reshape %sum : (tensor<2x4xf32>) -> tensor<1x2x4xf32>
    %old = stablehlo.dynamic_slice %g, %chunk, %zero, %zero, sizes = [1, 2, 4] : (tensor<2x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x4xf32>
    %more_of_it = stablehlo.add %term, %seen : tensor<1x2x4xf32>
    %new = stablehlo.add %old, %more_of_it : tensor<1x2x4xf32>
    %put = stablehlo.select %valid, %new, %old : tensor<i1>, tensor<1x2x4xf32>
    %added = stablehlo.dynamic_update_slice %g, %put, %chunk, %zero, %zero : (tensor<2x2x4xf32>, tensor<1x2x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<2x2x4xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %next, %added : tensor<i32>, tensor<8x4xf32>, tensor<2x2x4xf32>
  }
  return %z#1, %z#2 : tensor<8x4xf32>, tensor<2x2x4xf32>
}
}

// Which row is taken and added to follows from the device: what one of a group adds to row 1, the other
// adds to row 0.
// CHECK: note: all_gather stays in its iteration
// CHECK: note: reduce_scatter stays in its iteration
// -----
module @by_device attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
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
    %id = stablehlo.partition_id : tensor<ui32>
    %device = stablehlo.convert %id : (tensor<ui32>) -> tensor<i32>
    %cell = stablehlo.dynamic_slice %chunks, %i, sizes = [1] : (tensor<5xi32>, tensor<i32>) -> tensor<1xi32>
    %entry = stablehlo.reshape %cell : (tensor<1xi32>) -> tensor<i32>
    %chunk = stablehlo.subtract %entry, %device : tensor<i32>
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

// -----

// No device keeps the sum, or all do.
// CHECK: note: all_reduce stays in its iteration: no loop around it is known to repeat its operand
module @on_no_device attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
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
    %first = stablehlo.compare LT, %device, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
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

// -----

// The other devices begin with ones.
// CHECK: note: all_reduce stays in its iteration: no loop around it is known to repeat its operand
module @with_ones attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%ids: tensor<3x2x1xi32>, %rows: tensor<3x2x4xf32>, %given: tensor<16x4xf32>, %times: tensor<i32>) -> tensor<16x4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %zeros = stablehlo.constant dense<1.0> : tensor<16x4xf32>
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

// -----

// The loop may never run: the result is then what each device was given.
// CHECK: note: all_reduce stays in its iteration: no loop around it is known to repeat its operand
module @may_never_run attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%ids: tensor<3x2x1xi32>, %rows: tensor<3x2x4xf32>, %given: tensor<16x4xf32>, %times: tensor<i32>) -> tensor<16x4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %zeros = stablehlo.constant dense<0.0> : tensor<16x4xf32>
  %z:2 = stablehlo.while(%i = %zero, %sum = %given) : tensor<i32>, tensor<16x4xf32>
  cond {
    %more = stablehlo.compare LT, %i, %times : (tensor<i32>, tensor<i32>) -> tensor<i1>
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

// -----

// The sum is also read by itself.
// CHECK: note: all_reduce stays in its iteration: no loop around it is known to repeat its operand
module @read_otherwise attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
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
    %half = stablehlo.add %sum, %zeros : tensor<16x4xf32>
    %own = stablehlo.select %first, %sum, %half : tensor<i1>, tensor<16x4xf32>
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
