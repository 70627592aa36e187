// RUN: stablehlo-tools opt %s -p reassociate-collectives -o %t.after.mlir
// RUN: filecheck %s --check-prefix=MERGED --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --backend interpreter --rtol 0.05 | filecheck %s

// Nine reductions become five, with the values of before: integers bit for bit, bfloat16s that were
// added in bfloat16 and now are in f32 as near as those are.
// MERGED-COUNT-3: "stablehlo.all_reduce"
// CHECK: same: 5 outputs

module @semantics attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
func.func @main(%x: tensor<4x4xi32>, %y: tensor<4x4xi32>, %u: tensor<8xbf16>, %v: tensor<8xbf16>) -> (tensor<4x4xi32>, tensor<4x4xi32>, tensor<2x4xi32>, tensor<3x4xi32>, tensor<8xbf16>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<i32>, %r: tensor<i32>):
    %s = stablehlo.add %l, %r : tensor<i32>
    stablehlo.return %s : tensor<i32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x4xi32>) -> tensor<4x4xi32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<i32>, %r: tensor<i32>):
    %s = stablehlo.add %l, %r : tensor<i32>
    stablehlo.return %s : tensor<i32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x4xi32>) -> tensor<4x4xi32>
  %c = stablehlo.add %a, %b : tensor<4x4xi32>
  %d = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<i32>, %r: tensor<i32>):
    %s = stablehlo.maximum %l, %r : tensor<i32>
    stablehlo.return %s : tensor<i32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x4xi32>) -> tensor<4x4xi32>
  %d1 = stablehlo.transpose %d, dims = [1, 0] : (tensor<4x4xi32>) -> tensor<4x4xi32>
  %e = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<i32>, %r: tensor<i32>):
    %s = stablehlo.maximum %l, %r : tensor<i32>
    stablehlo.return %s : tensor<i32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x4xi32>) -> tensor<4x4xi32>
  %f = stablehlo.maximum %d1, %e : tensor<4x4xi32>
  %g = "stablehlo.reduce_scatter"(%x) ({
  ^bb0(%l: tensor<i32>, %r: tensor<i32>):
    %s = stablehlo.add %l, %r : tensor<i32>
    stablehlo.return %s : tensor<i32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, scatter_dimension = 0 : i64} : (tensor<4x4xi32>) -> tensor<2x4xi32>
  %h = "stablehlo.reduce_scatter"(%y) ({
  ^bb0(%l: tensor<i32>, %r: tensor<i32>):
    %s = stablehlo.add %l, %r : tensor<i32>
    stablehlo.return %s : tensor<i32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, scatter_dimension = 0 : i64} : (tensor<4x4xi32>) -> tensor<2x4xi32>
  %j = stablehlo.add %g, %h : tensor<2x4xi32>
  %k = stablehlo.add %j, %j : tensor<2x4xi32>
  %id = stablehlo.replica_id : tensor<ui32>
  %0 = stablehlo.constant dense<0> : tensor<ui32>
  %m = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<i32>, %r: tensor<i32>):
    %s = stablehlo.add %l, %r : tensor<i32>
    stablehlo.return %s : tensor<i32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x4xi32>) -> tensor<4x4xi32>
  %m1 = stablehlo.dynamic_slice %m, %id, %0, sizes = [3, 4] : (tensor<4x4xi32>, tensor<ui32>, tensor<ui32>) -> tensor<3x4xi32>
  %n = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<i32>, %r: tensor<i32>):
    %s = stablehlo.add %l, %r : tensor<i32>
    stablehlo.return %s : tensor<i32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x4xi32>) -> tensor<4x4xi32>
  %n1 = stablehlo.dynamic_slice %n, %id, %0, sizes = [3, 4] : (tensor<4x4xi32>, tensor<ui32>, tensor<ui32>) -> tensor<3x4xi32>
  %o = stablehlo.add %m1, %n1 : tensor<3x4xi32>
  %p = "stablehlo.all_reduce"(%u) ({
  ^bb0(%l: tensor<bf16>, %r: tensor<bf16>):
    %s = stablehlo.add %l, %r : tensor<bf16>
    stablehlo.return %s : tensor<bf16>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<8xbf16>) -> tensor<8xbf16>
  %p1 = stablehlo.convert %p : (tensor<8xbf16>) -> tensor<8xf32>
  %q = "stablehlo.all_reduce"(%v) ({
  ^bb0(%l: tensor<bf16>, %r: tensor<bf16>):
    %s = stablehlo.add %l, %r : tensor<bf16>
    stablehlo.return %s : tensor<bf16>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<8xbf16>) -> tensor<8xbf16>
  %q1 = stablehlo.convert %q : (tensor<8xbf16>) -> tensor<8xf32>
  %r0 = stablehlo.add %p1, %q1 : tensor<8xf32>
  %r1 = stablehlo.convert %r0 : (tensor<8xf32>) -> tensor<8xbf16>
  return %c, %f, %k, %o, %r1 : tensor<4x4xi32>, tensor<4x4xi32>, tensor<2x4xi32>, tensor<3x4xi32>, tensor<8xbf16>
}
}
