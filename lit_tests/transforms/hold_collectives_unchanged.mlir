// RUN: stablehlo-tools opt %s --split-input-file > %t.before.mlir
// RUN: stablehlo-tools opt %s -p hold-collectives --split-input-file | diff %t.before.mlir -

// Outside of loops, tokens beside or not.
module @straight attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>, !stablehlo.token) {
  %t = stablehlo.create_token : !stablehlo.token
  %b = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  return %b, %t : tensor<4xf32>, !stablehlo.token
}
}

// -----

// A sum of the condition, a gather, a sum that only a barrier uses, and one in a branch.
module @others attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
func.func @main(%x: tensor<4xi32>, %p: tensor<i1>) -> (tensor<4xi32>) {
  %out = stablehlo.while(%y = %x) : tensor<4xi32>
  cond {
    %b = "stablehlo.all_reduce"(%y) ({
    ^bb0(%l: tensor<i32>, %r: tensor<i32>):
      %s = stablehlo.add %l, %r : tensor<i32>
      stablehlo.return %s : tensor<i32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xi32>) -> tensor<4xi32>
    %first = stablehlo.slice %b [0:1] : (tensor<4xi32>) -> tensor<1xi32>
    %f = stablehlo.reshape %first : (tensor<1xi32>) -> tensor<i32>
    %most = stablehlo.constant dense<100> : tensor<i32>
    %more = stablehlo.compare LT, %f, %most : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %g = "stablehlo.all_gather"(%y) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xi32>) -> tensor<8xi32>
    %h = stablehlo.slice %g [2:6] : (tensor<8xi32>) -> tensor<4xi32>
    %b = "stablehlo.all_reduce"(%h) ({
    ^bb0(%l: tensor<i32>, %r: tensor<i32>):
      %s = stablehlo.add %l, %r : tensor<i32>
      stablehlo.return %s : tensor<i32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xi32>) -> tensor<4xi32>
    %held = stablehlo.optimization_barrier %b : tensor<4xi32>
    %c = "stablehlo.if"(%p) ({
      %d = "stablehlo.all_reduce"(%held) ({
      ^bb0(%l: tensor<i32>, %r: tensor<i32>):
        %s = stablehlo.add %l, %r : tensor<i32>
        stablehlo.return %s : tensor<i32>
      }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xi32>) -> tensor<4xi32>
      stablehlo.return %d : tensor<4xi32>
    }, {
      stablehlo.return %held : tensor<4xi32>
    }) : (tensor<i1>) -> tensor<4xi32>
    stablehlo.return %c : tensor<4xi32>
  }
  return %out : tensor<4xi32>
}
}
