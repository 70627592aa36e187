// RUN: stablehlo-tools opt %s -p constrain-batch --split-input-file --verify-diagnostics

// P1: something is left to a partitioner, and Shardy's shardings say what.
// expected-error@+1 {{constrain-batch: the program leaves no collectives to a partitioner: constraints come before partition (P1)}}
func.func @nothing_left_p1(%x: tensor<8xf32>) -> tensor<8xf32> {
  return %x : tensor<8xf32>
}

// -----

module attributes {mhlo.num_partitions = 2 : i32} {
  // expected-error@+1 {{constrain-batch: the program is divided by}}
  func.func @gspmd_p1(%x: tensor<8x4xf32> {mhlo.sharding = "{devices=[2,1]0,1}"}) -> tensor<8x4xf32> {
    return %x : tensor<8x4xf32>
  }
}
