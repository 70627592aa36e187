// Values in parts of sums over the same devices are added before one sum.
// RUN: stablehlo-tools opt %s -p 'partition{choices=shardy}' --split-input-file | filecheck %s

// The gradients of two gathers of one table, which every device keeps a part of.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @two_gathers
// CHECK: %[[SENT:.+]] = "stablehlo.scatter"
// CHECK: %[[RECEIVED:.+]] = "stablehlo.scatter"
// CHECK-NOT: stablehlo.all_reduce
// CHECK: %[[BOTH:.+]] = stablehlo.add %[[SENT]], %[[RECEIVED]] : tensor<16x8xf32>
// CHECK-NEXT: %[[PART:.+]] = "stablehlo.reduce_scatter"(%[[BOTH]])
// CHECK: -> tensor<4x8xf32>
// CHECK-NEXT: sdy.return %[[PART]]
func.func @two_gathers(
    %sender: tensor<32x1xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %receiver: tensor<32x1xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %rows: tensor<32x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> (tensor<16x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %table = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<f32>) -> tensor<16x8xf32>
  %0 = "stablehlo.scatter"(%table, %sender, %rows) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %3 = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %3 : tensor<f32>
  }) : (tensor<16x8xf32>, tensor<32x1xi32>, tensor<32x8xf32>) -> tensor<16x8xf32>
  %1 = "stablehlo.scatter"(%table, %receiver, %rows) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %3 = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %3 : tensor<f32>
  }) : (tensor<16x8xf32>, tensor<32x1xi32>, tensor<32x8xf32>) -> tensor<16x8xf32>
  %2 = stablehlo.add %0, %1 : tensor<16x8xf32>
  return %2 : tensor<16x8xf32>
}

// -----

// Another term is among them.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @among_others
// CHECK: %[[ONE:.+]] = stablehlo.dot_general
// CHECK: %[[TWO:.+]] = stablehlo.dot_general
// CHECK: %[[PARTS:.+]] = stablehlo.add %[[ONE]], %[[TWO]]
// CHECK-NEXT: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[PARTS]])
// CHECK-NOT: all_reduce
// CHECK: stablehlo.add %{{.+}}, %[[SUM]]
// CHECK-NEXT: sdy.return
func.func @among_others(
    %x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>},
    %y: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>},
    %w: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %other: tensor<8x8xf32>
) -> tensor<8x8xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %1 = stablehlo.dot_general %y, %w, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %2 = stablehlo.add %0, %other : tensor<8x8xf32>
  %3 = stablehlo.add %2, %1 : tensor<8x8xf32>
  return %3 : tensor<8x8xf32>
}

// -----

// Unchanged: a product runs between the terms, and the parts of the first one would stay in memory.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @product_between
// CHECK: %[[ONE:.+]] = stablehlo.dot_general
// CHECK-NEXT: "stablehlo.all_reduce"(%[[ONE]])
// CHECK: "stablehlo.all_reduce"
// CHECK-NOT: all_reduce
func.func @product_between(
    %x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>},
    %w: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %v: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}
) -> tensor<8x8xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %1 = stablehlo.dot_general %w, %v, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %2 = stablehlo.dot_general %x, %1, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %3 = stablehlo.add %0, %2 : tensor<8x8xf32>
  return %3 : tensor<8x8xf32>
}

// -----

// Unchanged: the terms are maxima.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @maxima
// CHECK: "stablehlo.all_reduce"
// CHECK: stablehlo.maximum
// CHECK: "stablehlo.all_reduce"
// CHECK: stablehlo.maximum
// CHECK: stablehlo.add
func.func @maxima(
    %x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>},
    %y: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}
) -> tensor<8xf32> {
  %least = stablehlo.constant dense<0xFF800000> : tensor<f32>
  %0 = stablehlo.reduce(%x init: %least) applies stablehlo.maximum across dimensions = [1] : (tensor<8x8xf32>, tensor<f32>) -> tensor<8xf32>
  %1 = stablehlo.reduce(%y init: %least) applies stablehlo.maximum across dimensions = [1] : (tensor<8x8xf32>, tensor<f32>) -> tensor<8xf32>
  %2 = stablehlo.add %0, %1 : tensor<8xf32>
  return %2 : tensor<8xf32>
}

// -----

// Unchanged: a term has another user, which needs its sum.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @used_elsewhere
// CHECK-COUNT-2: "stablehlo.all_reduce"
// CHECK-NOT: all_reduce
func.func @used_elsewhere(
    %x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>},
    %y: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}
) -> (tensor<8xf32>, tensor<8xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<8x8xf32>, tensor<f32>) -> tensor<8xf32>
  %1 = stablehlo.reduce(%y init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<8x8xf32>, tensor<f32>) -> tensor<8xf32>
  %2 = stablehlo.add %0, %1 : tensor<8xf32>
  return %0, %2 : tensor<8xf32>, tensor<8xf32>
}
