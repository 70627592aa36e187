// RUN: stablehlo-tools opt %s -p partition --split-input-file | filecheck %s

// A prefix sum is a window, along rows that are whole on a device; jax's own form of it is a loop over
// the rows.
// CHECK-LABEL: func.func @cumsum
// CHECK: manual_axes={"data"} (%[[X:.+]]: tensor<2x16xi32>)
// CHECK: %[[ZERO:.+]] = stablehlo.constant dense<0> : tensor<i32>
// CHECK: "stablehlo.reduce_window"(%[[X]], %[[ZERO]]) <{padding = dense<{{\[\[}}0, 0], [15, 0]]> : tensor<2x2xi64>, window_dimensions = array<i64: 1, 16>}>
// CHECK: stablehlo.add
// CHECK-NOT: func.func private @scan
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=4]>
  func.func @cumsum(%x: tensor<8x16xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) -> (tensor<8x16xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) {
    %c = stablehlo.constant dense<0> : tensor<i32>
    %0 = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<i32>) -> tensor<8xi32>
    %1:2 = stablehlo.composite "chlo.scan" %x, %0 ({
    ^bb0(%row: tensor<8xi32>, %carry: tensor<8xi32>):
      %2 = stablehlo.add %row, %carry : tensor<8xi32>
      stablehlo.return %2, %2 : tensor<8xi32>, tensor<8xi32>
    }) {composite_attributes = {dimension = 1 : i64, is_associative = true, is_reverse = false}, decomposition = @scan} : (tensor<8x16xi32>, tensor<8xi32>) -> (tensor<8x16xi32>, tensor<8xi32>)
    return %1#0 : tensor<8x16xi32>
  }
  func.func private @scan(%x: tensor<8x16xi32>, %carry: tensor<8xi32>) -> (tensor<8x16xi32>, tensor<8xi32>) {
    return %x, %carry : tensor<8x16xi32>, tensor<8xi32>
  }
}

// -----

// In reverse, the window grows from the end.
// CHECK-LABEL: func.func @reverse
// CHECK: "stablehlo.reduce_window"{{.+}}padding = dense<{{\[\[}}0, 15], [0, 0]]> : tensor<2x2xi64>, window_dimensions = array<i64: 16, 1>
// CHECK: stablehlo.maximum
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=4]>
  func.func @reverse(%x: tensor<16x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}]>}) -> (tensor<16x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}]>}) {
    %c = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %0 = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<f32>) -> tensor<8xf32>
    %1:2 = stablehlo.composite "chlo.scan" %x, %0 ({
    ^bb0(%row: tensor<8xf32>, %carry: tensor<8xf32>):
      %2 = stablehlo.maximum %row, %carry : tensor<8xf32>
      stablehlo.return %2, %2 : tensor<8xf32>, tensor<8xf32>
    }) {composite_attributes = {dimension = 0 : i64, is_associative = true, is_reverse = true}, decomposition = @scan} : (tensor<16x8xf32>, tensor<8xf32>) -> (tensor<16x8xf32>, tensor<8xf32>)
    return %1#0 : tensor<16x8xf32>
  }
  func.func private @scan(%x: tensor<16x8xf32>, %carry: tensor<8xf32>) -> (tensor<16x8xf32>, tensor<8xf32>) {
    return %x, %carry : tensor<16x8xf32>, tensor<8xf32>
  }
}

// -----

// From another start than the reducer's identity, or with the last row asked for, it is what it is
// decomposed to.
// CHECK-LABEL: func.func @start
// CHECK-NOT: reduce_window
// CHECK: stablehlo.negate
// CHECK-NOT: reduce_window
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=4]>
  func.func @start(%x: tensor<8x16xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) -> (tensor<8x16xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) {
    %c = stablehlo.constant dense<1> : tensor<i32>
    %0 = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<i32>) -> tensor<8xi32>
    %1:2 = stablehlo.composite "chlo.scan" %x, %0 ({
    ^bb0(%row: tensor<8xi32>, %carry: tensor<8xi32>):
      %2 = stablehlo.add %row, %carry : tensor<8xi32>
      stablehlo.return %2, %2 : tensor<8xi32>, tensor<8xi32>
    }) {composite_attributes = {dimension = 1 : i64, is_associative = true, is_reverse = false}, decomposition = @scan} : (tensor<8x16xi32>, tensor<8xi32>) -> (tensor<8x16xi32>, tensor<8xi32>)
    return %1#0 : tensor<8x16xi32>
  }
  func.func private @scan(%x: tensor<8x16xi32>, %carry: tensor<8xi32>) -> (tensor<8x16xi32>, tensor<8xi32>) {
    %0 = stablehlo.negate %x : tensor<8x16xi32>
    return %0, %carry : tensor<8x16xi32>, tensor<8xi32>
  }
}
