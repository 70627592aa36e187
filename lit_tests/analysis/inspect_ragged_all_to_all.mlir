// RUN: stablehlo-tools inspect %s | filecheck %s
// RUN: stablehlo-tools inspect %s --json | python -m json.tool --compact | sed 's/},{/},\n{/g' \
// RUN:   | filecheck %s --check-prefix=JSON

// A ragged all-to-all is a custom call with its groups in a dictionary, as jax writes it.
module attributes {mhlo.num_partitions = 4 : i32} {
  func.func @main(%x: tensor<8xf32>, %out: tensor<8xf32>, %i: tensor<2xi64>) -> tensor<8xf32> {
    // With a channel the ids are partitions.
    // CHECK: ragged_all_to_all 2 x 2 {0,2} f32,i64 128 32 -
    // JSON: "kind":"ragged_all_to_all","async":false,"group_mode":"cross_partition","groups":{{\[\[0,2],\[1,3]]}},"channel":3,
    %0 = stablehlo.custom_call @ragged_all_to_all(%x, %out, %i, %i, %i, %i) {
      api_version = 4 : i32,
      backend_config = {channel_id = 3 : i64, replica_groups = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>}
    } : (tensor<8xf32>, tensor<8xf32>, tensor<2xi64>, tensor<2xi64>, tensor<2xi64>, tensor<2xi64>) -> tensor<8xf32>

    // Without groups it is not known who takes part.
    // CHECK: ragged_all_to_all - f32,i64 128 32 -
    %1 = stablehlo.custom_call @ragged_all_to_all(%0, %out, %i, %i, %i, %i)
      : (tensor<8xf32>, tensor<8xf32>, tensor<2xi64>, tensor<2xi64>, tensor<2xi64>, tensor<2xi64>) -> tensor<8xf32>
    return %1 : tensor<8xf32>
  }
}
