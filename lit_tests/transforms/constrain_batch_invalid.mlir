// RUN: stablehlo-tools opt %s -p constrain-batch --split-input-file --verify-diagnostics

// P1: something is left to a partitioner.
// expected-error@+1 {{constrain-batch: the program leaves no collectives to a partitioner: run constrain-batch before partition (P1)}}
func.func @nothing_left_p1(%x: tensor<8xf32>) -> tensor<8xf32> {
  return %x : tensor<8xf32>
}
