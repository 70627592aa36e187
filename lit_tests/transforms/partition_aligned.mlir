// RUN: stablehlo-tools opt %s -p partition --split-input-file | filecheck %s --enable-var-scope

// One-sided differences at both ends, and central ones between: two permutes of one row.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @ends
// CHECK: sdy.manual_computation{{.*}} (%[[X:.+]]: tensor<16x8xf32>)
// CHECK: "stablehlo.collective_permute"({{.*}}) <{{.*}}> : (tensor<1x8xf32>) -> tensor<1x8xf32>
// CHECK: "stablehlo.collective_permute"({{.*}}) <{{.*}}> : (tensor<1x8xf32>) -> tensor<1x8xf32>
// CHECK-NOT: stablehlo.collective_permute
// CHECK-COUNT-2: stablehlo.select {{.*}} : tensor<16x8xi1>, tensor<16x8xf32>
// CHECK-NOT: stablehlo.all
func.func @ends(%x: tensor<64x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> tensor<64x8xf32> {
  %half = stablehlo.constant dense<0.5> : tensor<62x8xf32>
  %0 = stablehlo.slice %x [0:1, 0:8] : (tensor<64x8xf32>) -> tensor<1x8xf32>
  %1 = stablehlo.slice %x [1:2, 0:8] : (tensor<64x8xf32>) -> tensor<1x8xf32>
  %first = stablehlo.subtract %1, %0 : tensor<1x8xf32>
  %2 = stablehlo.slice %x [0:62, 0:8] : (tensor<64x8xf32>) -> tensor<62x8xf32>
  %3 = stablehlo.slice %x [2:64, 0:8] : (tensor<64x8xf32>) -> tensor<62x8xf32>
  %4 = stablehlo.subtract %3, %2 : tensor<62x8xf32>
  %main = stablehlo.multiply %4, %half : tensor<62x8xf32>
  %5 = stablehlo.slice %x [62:63, 0:8] : (tensor<64x8xf32>) -> tensor<1x8xf32>
  %6 = stablehlo.slice %x [63:64, 0:8] : (tensor<64x8xf32>) -> tensor<1x8xf32>
  %last = stablehlo.subtract %6, %5 : tensor<1x8xf32>
  %7 = stablehlo.concatenate %first, %main, %last, dim = 0 : (tensor<1x8xf32>, tensor<62x8xf32>, tensor<1x8xf32>) -> tensor<64x8xf32>
  return %7 : tensor<64x8xf32>
}

// -----

// An update of the interior by a five-point stencil, divided along both dimensions: a row or a
// column to each of four neighbours. The coefficients of the rows are cut, too.
sdy.mesh @mesh = <["x"=2, "y"=2]>
// CHECK-LABEL: func.func @interior
// CHECK-COUNT-2: "stablehlo.collective_permute"({{.*}}) <{{.*}}> : (tensor<1x16xf32>) -> tensor<1x16xf32>
// CHECK-COUNT-2: "stablehlo.collective_permute"({{.*}}) <{{.*}}> : (tensor<16x1xf32>) -> tensor<16x1xf32>
// CHECK-NOT: stablehlo.collective_permute
func.func @interior(%x: tensor<32x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}, %k: tensor<32xf32>) -> tensor<32x32xf32> {
  %one = stablehlo.constant dense<1> : tensor<i32>
  %n = stablehlo.slice %x [0:30, 1:31] : (tensor<32x32xf32>) -> tensor<30x30xf32>
  %s = stablehlo.slice %x [2:32, 1:31] : (tensor<32x32xf32>) -> tensor<30x30xf32>
  %w = stablehlo.slice %x [1:31, 0:30] : (tensor<32x32xf32>) -> tensor<30x30xf32>
  %e = stablehlo.slice %x [1:31, 2:32] : (tensor<32x32xf32>) -> tensor<30x30xf32>
  %0 = stablehlo.add %n, %s : tensor<30x30xf32>
  %1 = stablehlo.add %w, %e : tensor<30x30xf32>
  %2 = stablehlo.add %0, %1 : tensor<30x30xf32>
  %cut = stablehlo.slice %k [1:31] : (tensor<32xf32>) -> tensor<30xf32>
  %wide = stablehlo.broadcast_in_dim %cut, dims = [0] : (tensor<30xf32>) -> tensor<30x30xf32>
  %3 = stablehlo.multiply %2, %wide : tensor<30x30xf32>
  %4 = stablehlo.dynamic_update_slice %x, %3, %one, %one : (tensor<32x32xf32>, tensor<30x30xf32>, tensor<i32>, tensor<i32>) -> tensor<32x32xf32>
  return %4 : tensor<32x32xf32>
}

// -----

// Not aligned: bare slices (a roll), an end of half the rows, and a reversed piece. A gather of one
// window at a constant place is a slice.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @other_pieces
// CHECK-NOT: stablehlo.gather
// CHECK: %[[FIRST:.+]] = "stablehlo.collective_permute"({{.*}}) <{{.*}}> : (tensor<1xf32>) -> tensor<1xf32>
// CHECK-NEXT: %[[REST:.+]] = stablehlo.slice %{{.+}} [1:8]
// CHECK-NEXT: stablehlo.concatenate %[[REST]], %[[FIRST]]
// CHECK-NOT: stablehlo.gather
// CHECK: stablehlo.negate %{{.+}} : tensor<4xf32>
func.func @other_pieces(%x: tensor<32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> (tensor<32xf32>, tensor<32xf32>) {
  %start = stablehlo.constant dense<1> : tensor<1xi32>
  %0 = "stablehlo.gather"(%x, %start) <{dimension_numbers = #stablehlo.gather<offset_dims = [0], start_index_map = [0]>, slice_sizes = array<i64: 31>}> : (tensor<32xf32>, tensor<1xi32>) -> tensor<31xf32>
  %1 = stablehlo.slice %x [0:1] : (tensor<32xf32>) -> tensor<1xf32>
  %roll = stablehlo.concatenate %0, %1, dim = 0 : (tensor<31xf32>, tensor<1xf32>) -> tensor<32xf32>
  %2 = stablehlo.slice %x [0:16] : (tensor<32xf32>) -> tensor<16xf32>
  %3 = stablehlo.slice %x [16:32] : (tensor<32xf32>) -> tensor<16xf32>
  %4 = stablehlo.negate %3 : tensor<16xf32>
  %halves = stablehlo.concatenate %2, %4, dim = 0 : (tensor<16xf32>, tensor<16xf32>) -> tensor<32xf32>
  return %roll, %halves : tensor<32xf32>, tensor<32xf32>
}
