// RUN: stablehlo-tools opt %s -p 'bucket-collectives{memory-limit=0.00001}' --split-input-file --verify-diagnostics

// P3: some order of the program needs no more than the limit.
// expected-error@unknown {{found no order that fits in 1e-05 GiB: 4.57764e-05 GiB is enough, and less than 4.57764e-05 GiB is not}}
module attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
func.func @main(%x: tensor<64x64xf32>) -> tensor<128x64xf32> {
  %0 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<64x64xf32>) -> tensor<128x64xf32>
  return %0 : tensor<128x64xf32>
}
}
