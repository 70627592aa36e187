module attributes {mhlo.num_replicas = 2 : i32, mhlo.num_partitions = 1 : i32} {
  func.func @main(%x: tensor<2xf32>, %y: tensor<4xf32>) -> (tensor<4xf32>, tensor<2xf32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %w:3 = stablehlo.while(%i = %zero, %v = %x, %u = %y)
        : tensor<i32>, tensor<2xf32>, tensor<4xf32> cond {
      %n = stablehlo.constant dense<3> : tensor<i32>
      %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %one = stablehlo.constant dense<1> : tensor<i32>
      %next = stablehlo.add %i, %one : tensor<i32>
      %g = "stablehlo.all_gather"(%v) {
        all_gather_dim = 0 : i64,
        replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
      } : (tensor<2xf32>) -> tensor<4xf32>
      %half = stablehlo.slice %g [1:3] : (tensor<4xf32>) -> tensor<2xf32>
      stablehlo.return %next, %half, %g : tensor<i32>, tensor<2xf32>, tensor<4xf32>
    }
    %kept = stablehlo.negate %w#2 : tensor<4xf32>
    return %y, %x : tensor<4xf32>, tensor<2xf32>
  }
}
