// RUN: stablehlo-tools inspect %s | filecheck %s
// RUN: stablehlo-tools inspect %s --json | python -m json.tool --compact | sed 's/},{/},\n{/g' \
// RUN:   | filecheck %s --check-prefix=JSON

// Bytes of a dimension that has no number are not guessed.
module attributes {mhlo.num_replicas = 2 : i32} {
  // CHECK: all_gather {0,1} f32 symbolic symbolic
  // JSON: "bytes_in":null,"bytes_out":null
  func.func @symbolic(%x: tensor<?x4xf32>) -> tensor<?x4xf32> {
    %0 = "stablehlo.all_gather"(%x) {
      all_gather_dim = 0 : i64,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<?x4xf32>) -> tensor<?x4xf32>
    return %0 : tensor<?x4xf32>
  }

  // One symbolic operand makes the sum symbolic.
  // CHECK: all_gather {0,1} f32 symbolic symbolic
  func.func @one_of_two(%x: tensor<?xf32>, %y: tensor<2xf32>) -> (tensor<?xf32>, tensor<4xf32>) {
    %0:2 = "stablehlo.all_gather"(%x, %y) {
      all_gather_dim = 0 : i64,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<?xf32>, tensor<2xf32>) -> (tensor<?xf32>, tensor<4xf32>)
    return %0#0, %0#1 : tensor<?xf32>, tensor<4xf32>
  }
}
