// If each device needs only its own part of a sum, it gets the part by a reduce_scatter.
// RUN: stablehlo-tools opt %s -p 'partition{choices=shardy}' --split-input-file | filecheck %s

sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @rows
// CHECK: %[[DOT:.+]] = stablehlo.dot_general
// CHECK-NEXT: "stablehlo.reduce_scatter"(%[[DOT]]) {{.*}}replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>{{.*}}scatter_dimension = 0
// CHECK: -> tensor<2x8xf32>
// CHECK-NEXT: sdy.return
func.func @rows(
    %x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>},
    %w: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  return %0 : tensor<8x8xf32>
}

// -----

// The reducer of a maximum is kept.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @maximum
// CHECK: "stablehlo.reduce_scatter"
// CHECK: stablehlo.maximum
// CHECK: }) : (tensor<8xf32>) -> tensor<2xf32>
// CHECK-NEXT: sdy.return
func.func @maximum(
    %x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}
) -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) {
  %least = stablehlo.constant dense<0xFF800000> : tensor<f32>
  %0 = stablehlo.reduce(%x init: %least) applies stablehlo.maximum across dimensions = [1] : (tensor<8x8xf32>, tensor<f32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}

// -----

// A large sum over both axes, divided over one of them, is scattered over it and then summed over
// the other one.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @large_over_two_axes
// CHECK: "stablehlo.reduce_scatter"{{.*}}replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>{{.*}}scatter_dimension = 0
// CHECK: -> tensor<4096x16384xf32>
// CHECK-NEXT: "stablehlo.all_reduce"{{.*}}replica_groups = dense<{{\[\[}}0, 1], [2, 3], [4, 5], [6, 7]]>
// CHECK: sdy.return
func.func @large_over_two_axes(
    %x: tensor<16384x16384xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x", "y"}]>},
    %w: tensor<16384x16384xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x", "y"}, {}]>}
) -> (tensor<16384x16384xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<16384x16384xf32>, tensor<16384x16384xf32>) -> tensor<16384x16384xf32>
  return %0 : tensor<16384x16384xf32>
}

// -----

// One all_reduce of a small sum is faster than two collectives.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @small_over_two_axes
// CHECK-NOT: reduce_scatter
// CHECK: "stablehlo.all_reduce"
// CHECK-NOT: reduce_scatter
// CHECK: stablehlo.dynamic_slice {{.*}} -> tensor<4x8xf32>
func.func @small_over_two_axes(
    %x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x", "y"}]>},
    %w: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x", "y"}, {}]>}
) -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}) {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  return %0 : tensor<8x8xf32>
}

// -----

// Unchanged: XLA:TPU cannot scatter complex sums.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @complex_sum
// CHECK-NOT: reduce_scatter
// CHECK: "stablehlo.all_reduce"
// CHECK-NOT: reduce_scatter
// CHECK: stablehlo.dynamic_slice {{.*}} -> tensor<2x8xcomplex<f32>>
func.func @complex_sum(
    %x: tensor<8x8xcomplex<f32>> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>},
    %w: tensor<8x8xcomplex<f32>> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> (tensor<8x8xcomplex<f32>> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<8x8xcomplex<f32>>, tensor<8x8xcomplex<f32>>) -> tensor<8x8xcomplex<f32>>
  return %0 : tensor<8x8xcomplex<f32>>
}

// -----

// Unchanged: both the whole sum and parts of it are used.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @whole_is_used
// CHECK-NOT: reduce_scatter
// CHECK: "stablehlo.all_reduce"
// CHECK-NOT: reduce_scatter
// CHECK: sdy.return
func.func @whole_is_used(
    %x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>},
    %w: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
      tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  return %0, %0 : tensor<8x8xf32>, tensor<8x8xf32>
}
