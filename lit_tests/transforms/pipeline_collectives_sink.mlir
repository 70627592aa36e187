// RUN: stablehlo-tools opt %s -p 'pipeline-collectives{direction=sink explain}' --split-input-file >%t.mlir 2>%t.notes
// RUN: filecheck %s --enable-var-scope --input-file %t.mlir
// RUN: filecheck %s --check-prefix=EXPLAINED --input-file %t.notes
// RUN: stablehlo-tools opt %t.mlir -p 'pipeline-collectives{direction=sink}' --split-input-file | diff %t.mlir -

// What is added up is summed on each device, from -0, and reduced once.
// EXPLAINED: note: all_reduce runs once, after the loop: on the sum of its operands
// CHECK-LABEL: module @sum attributes
// CHECK: %[[ZEROS:.+]] = stablehlo.constant dense<-0.000000e+00> : tensor<8x8xf32>
// CHECK-NEXT: %[[W:.+]]:2 = stablehlo.while(%{{.+}} = %{{.+}}, %[[OWN:.+]] = %[[ZEROS]])
// CHECK: } do {
// CHECK: %[[TERM:.+]] = stablehlo.dot_general
// CHECK-NOT: "stablehlo.all_reduce"
// CHECK: stablehlo.add %[[OWN]], %[[TERM]]
// CHECK-NEXT: stablehlo.return
// CHECK-NEXT: }
// CHECK-NEXT: %[[ONCE:.+]] = "stablehlo.all_reduce"(%[[W]]#1)
// CHECK: %[[TOTAL:.+]] = stablehlo.add %arg0, %[[ONCE]]
// CHECK-NEXT: return %[[TOTAL]]
module @sum attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
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
    %next = stablehlo.add %total, %sum : tensor<8x8xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %next : tensor<i32>, tensor<8x8xf32>
  }
  return %r#1 : tensor<8x8xf32>
}
}

// -----

// A sum needs no known trip count: where nothing is added, nothing is what is reduced.
// EXPLAINED: note: all_reduce runs once, after the loop: on the sum of its operands
// CHECK-LABEL: module @any_number_of_times attributes
// CHECK: %[[W:.+]]:2 = stablehlo.while
// CHECK: stablehlo.compare LT, %{{.+}}, %arg2
// CHECK-NOT: "stablehlo.all_reduce"
// CHECK: stablehlo.return %{{.+}}, %{{.+}} : tensor<i32>, tensor<8x8xf32>
// CHECK-NEXT: }
// CHECK-NEXT: "stablehlo.all_reduce"(%[[W]]#1)
module @any_number_of_times attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%total0: tensor<8x8xf32>, %xs: tensor<4x8x8xf32>, %bound: tensor<i32>) -> (tensor<8x8xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
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
    %next = stablehlo.add %total, %sum : tensor<8x8xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %next : tensor<i32>, tensor<8x8xf32>
  }
  return %r#1 : tensor<8x8xf32>
}
}

// -----

// What every iteration overwrites is reduced for the last one alone.
// EXPLAINED: note: all_reduce runs once, after the loop: on the operand of the last iteration; the others are overwritten
// CHECK-LABEL: module @last attributes
// CHECK: %[[W:.+]]:2 = stablehlo.while
// CHECK: } do {
// CHECK: %[[SENT:.+]] = stablehlo.dot_general
// CHECK-NOT: "stablehlo.all_reduce"
// CHECK: stablehlo.return %{{.+}}, %[[SENT]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[ONCE:.+]] = "stablehlo.all_reduce"(%[[W]]#1)
// CHECK: return %[[ONCE]]
module @last attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%kept0: tensor<8x8xf32>, %xs: tensor<4x8x8xf32>) -> (tensor<8x8xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %bound = stablehlo.constant dense<4> : tensor<i32>
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

// Rows of a buffer are stored as they are sent, and reduced together.
// EXPLAINED: note: all_reduce runs once, after the loop: on the operands of all iterations
// CHECK-LABEL: module @batch attributes
// CHECK: %[[W:.+]]:2 = stablehlo.while(%[[I:.+]] = %{{.+}}, %[[ROWS:.+]] = %{{.+}})
// CHECK: } do {
// CHECK: %[[SENT:.+]] = stablehlo.dot_general
// CHECK-NOT: "stablehlo.all_reduce"
// CHECK: %[[ROW:.+]] = stablehlo.reshape %[[SENT]]
// CHECK: stablehlo.dynamic_update_slice %[[ROWS]], %[[ROW]], %[[I]]
// CHECK-NEXT: stablehlo.return
// CHECK-NEXT: }
// CHECK-NEXT: "stablehlo.all_reduce"(%[[W]]#1)
// CHECK: }) : (tensor<4x8x8xf32>) -> tensor<4x8x8xf32>
module @batch attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
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
    %next = stablehlo.dynamic_update_slice %rows, %row, %i, %zero, %zero : (tensor<4x8x8xf32>, tensor<1x8x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x8x8xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %next : tensor<i32>, tensor<4x8x8xf32>
  }
  return %r#1 : tensor<4x8x8xf32>
}
}

// -----

// A row of the buffer is never written: those that are go into it behind the collective.
// EXPLAINED: note: all_reduce runs once, after the loop: on the operands of all iterations
// CHECK-LABEL: module @rows_left
// CHECK: stablehlo.while
// CHECK-NOT: stablehlo.all_reduce
// CHECK: stablehlo.dynamic_update_slice %{{.+}} : (tensor<4x8x8xf32>, tensor<1x8x8xf32>
// CHECK: "stablehlo.all_reduce"
// CHECK: (tensor<4x8x8xf32>) -> tensor<4x8x8xf32>
// CHECK: stablehlo.dynamic_update_slice %arg0, %{{.+}} : (tensor<5x8x8xf32>, tensor<4x8x8xf32>
module @rows_left attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%rows0: tensor<5x8x8xf32>, %xs: tensor<4x8x8xf32>) -> (tensor<5x8x8xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %bound = stablehlo.constant dense<4> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %rows = %rows0) : tensor<i32>, tensor<5x8x8xf32>
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
    %next = stablehlo.dynamic_update_slice %rows, %row, %i, %zero, %zero : (tensor<5x8x8xf32>, tensor<1x8x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<5x8x8xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %next : tensor<i32>, tensor<5x8x8xf32>
  }
  return %r#1 : tensor<5x8x8xf32>
}
}

// -----

// The gradients of sixteen parameters, in a loop over microbatches: one all_reduce, instead of 64.
// EXPLAINED: note: all_reduce runs once, after the loop: on the sum of its operands
// EXPLAINED-NOT: note:
// CHECK-LABEL: module @sixteen attributes
// CHECK: %[[W:.+]]:17 = stablehlo.while
// CHECK: } do {
// CHECK-NOT: "stablehlo.all_reduce"
// CHECK: %[[ALL:.+]] = stablehlo.concatenate %[[W]]#1, %[[W]]#2, {{.*}}%[[W]]#16, dim = 0
// CHECK-NEXT: %[[ONCE:.+]] = "stablehlo.all_reduce"(%[[ALL]])
// CHECK: }) : (tensor<128x8xf32>) -> tensor<128x8xf32>
// CHECK-NOT: "stablehlo.all_reduce"
// CHECK: %[[FIRST:.+]] = stablehlo.slice %[[ONCE]] [0:8, 0:8]
// CHECK-COUNT-15: = stablehlo.slice %[[ONCE]]
// CHECK: stablehlo.add %arg0, %[[FIRST]]
module @sixteen attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%a_0: tensor<8x8xf32>, %b_0: tensor<8x8xf32>, %c_0: tensor<8x8xf32>, %d_0: tensor<8x8xf32>, %e_0: tensor<8x8xf32>, %f_0: tensor<8x8xf32>, %g_0: tensor<8x8xf32>, %h_0: tensor<8x8xf32>, %i_0: tensor<8x8xf32>, %j_0: tensor<8x8xf32>, %k_0: tensor<8x8xf32>, %l_0: tensor<8x8xf32>, %m_0: tensor<8x8xf32>, %n_0: tensor<8x8xf32>, %o_0: tensor<8x8xf32>, %p_0: tensor<8x8xf32>, %xs: tensor<4x8x8xf32>) -> (tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %bound = stablehlo.constant dense<4> : tensor<i32>
  %r:17 = stablehlo.while(%i = %zero, %a_ = %a_0, %b_ = %b_0, %c_ = %c_0, %d_ = %d_0, %e_ = %e_0, %f_ = %f_0, %g_ = %g_0, %h_ = %h_0, %i_ = %i_0, %j_ = %j_0, %k_ = %k_0, %l_ = %l_0, %m_ = %m_0, %n_ = %n_0, %o_ = %o_0, %p_ = %p_0) : tensor<i32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>
  cond {
    %more = stablehlo.compare LT, %i, %bound : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %cut = stablehlo.dynamic_slice %xs, %i, %zero, %zero, sizes = [1, 8, 8] : (tensor<4x8x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x8xf32>
    %x = stablehlo.reshape %cut : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
    %g = stablehlo.dot_general %x, %x, contracting_dims = [0] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    %g1 = stablehlo.multiply %g, %x : tensor<8x8xf32>
    %s0 = func.call @reduced(%g1) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %n0 = stablehlo.add %a_, %s0 : tensor<8x8xf32>
    %g2 = stablehlo.multiply %g1, %x : tensor<8x8xf32>
    %s1 = func.call @reduced(%g2) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %n1 = stablehlo.add %b_, %s1 : tensor<8x8xf32>
    %g3 = stablehlo.multiply %g2, %x : tensor<8x8xf32>
    %s2 = func.call @reduced(%g3) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %n2 = stablehlo.add %c_, %s2 : tensor<8x8xf32>
    %g4 = stablehlo.multiply %g3, %x : tensor<8x8xf32>
    %s3 = func.call @reduced(%g4) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %n3 = stablehlo.add %d_, %s3 : tensor<8x8xf32>
    %g5 = stablehlo.multiply %g4, %x : tensor<8x8xf32>
    %s4 = func.call @reduced(%g5) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %n4 = stablehlo.add %e_, %s4 : tensor<8x8xf32>
    %g6 = stablehlo.multiply %g5, %x : tensor<8x8xf32>
    %s5 = func.call @reduced(%g6) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %n5 = stablehlo.add %f_, %s5 : tensor<8x8xf32>
    %g7 = stablehlo.multiply %g6, %x : tensor<8x8xf32>
    %s6 = func.call @reduced(%g7) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %n6 = stablehlo.add %g_, %s6 : tensor<8x8xf32>
    %g8 = stablehlo.multiply %g7, %x : tensor<8x8xf32>
    %s7 = func.call @reduced(%g8) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %n7 = stablehlo.add %h_, %s7 : tensor<8x8xf32>
    %g9 = stablehlo.multiply %g8, %x : tensor<8x8xf32>
    %s8 = func.call @reduced(%g9) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %n8 = stablehlo.add %i_, %s8 : tensor<8x8xf32>
    %g10 = stablehlo.multiply %g9, %x : tensor<8x8xf32>
    %s9 = func.call @reduced(%g10) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %n9 = stablehlo.add %j_, %s9 : tensor<8x8xf32>
    %g11 = stablehlo.multiply %g10, %x : tensor<8x8xf32>
    %s10 = func.call @reduced(%g11) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %n10 = stablehlo.add %k_, %s10 : tensor<8x8xf32>
    %g12 = stablehlo.multiply %g11, %x : tensor<8x8xf32>
    %s11 = func.call @reduced(%g12) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %n11 = stablehlo.add %l_, %s11 : tensor<8x8xf32>
    %g13 = stablehlo.multiply %g12, %x : tensor<8x8xf32>
    %s12 = func.call @reduced(%g13) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %n12 = stablehlo.add %m_, %s12 : tensor<8x8xf32>
    %g14 = stablehlo.multiply %g13, %x : tensor<8x8xf32>
    %s13 = func.call @reduced(%g14) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %n13 = stablehlo.add %n_, %s13 : tensor<8x8xf32>
    %g15 = stablehlo.multiply %g14, %x : tensor<8x8xf32>
    %s14 = func.call @reduced(%g15) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %n14 = stablehlo.add %o_, %s14 : tensor<8x8xf32>
    %g16 = stablehlo.multiply %g15, %x : tensor<8x8xf32>
    %s15 = func.call @reduced(%g16) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %n15 = stablehlo.add %p_, %s15 : tensor<8x8xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %n0, %n1, %n2, %n3, %n4, %n5, %n6, %n7, %n8, %n9, %n10, %n11, %n12, %n13, %n14, %n15 : tensor<i32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>
  }
  return %r#1, %r#2, %r#3, %r#4, %r#5, %r#6, %r#7, %r#8, %r#9, %r#10, %r#11, %r#12, %r#13, %r#14, %r#15, %r#16 : tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>
}
func.func private @reduced(%g: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %sum = "stablehlo.all_reduce"(%g) ({
  ^bb0(%l: tensor<f32>, %q: tensor<f32>):
    %s = stablehlo.add %l, %q : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<8x8xf32>) -> tensor<8x8xf32>
  return %sum : tensor<8x8xf32>
}
}
