module attributes {mhlo.num_replicas = 1 : i32, mhlo.num_partitions = 4 : i32} {
  func.func @main(%x: tensor<2xf32>) -> tensor<4xf32> {
    %id = stablehlo.partition_id : tensor<ui32>
    %two = stablehlo.constant dense<2> : tensor<ui32>
    %row = stablehlo.divide %id, %two : tensor<ui32>
    %index = stablehlo.convert %row : (tensor<ui32>) -> tensor<i32>
    %y = "stablehlo.case"(%index) ({
      %c = stablehlo.concatenate %x, %x, dim = 0 : (tensor<2xf32>, tensor<2xf32>) -> tensor<4xf32>
      stablehlo.return %c : tensor<4xf32>
    }, {
      %g = "stablehlo.all_gather"(%x) {
        all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>,
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, use_global_device_ids
      } : (tensor<2xf32>) -> tensor<4xf32>
      stablehlo.return %g : tensor<4xf32>
    }) : (tensor<i32>) -> tensor<4xf32>
    return %y : tensor<4xf32>
  }
}
