// RUN: stablehlo-tools opt %s -p 'shard-optimizer{axis=data}' --verify-diagnostics --split-input-file

// P1: there is work for a partitioner.
// expected-error@+1 {{shard-optimizer: the program leaves no collectives to a partitioner: run shard-optimizer before partition (P1)}}
func.func @local_p1(%w: tensor<4x4xf32>, %m: tensor<4x4xf32>) -> (tensor<4x4xf32>, tensor<4x4xf32>) {
  %m1 = stablehlo.add %m, %w : tensor<4x4xf32>
  return %w, %m1 : tensor<4x4xf32>, tensor<4x4xf32>
}

// -----

// P2: the axis is one of the mesh.
sdy.mesh @mesh = <["model"=4]>
// expected-error@+1 {{shard-optimizer: no mesh of the program has an axis 'data' of at least two ranks (P2): there are model of 4}}
func.func @axis_p2(%m: tensor<4x4xf32>, %x: tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"model"}, {}]>}) -> tensor<4x4xf32> {
  %m1 = stablehlo.add %m, %x : tensor<4x4xf32>
  return %m1 : tensor<4x4xf32>
}

// -----

// P3: some state is whole along it; here a product depends on the one there is.
sdy.mesh @mesh = <["data"=4]>
// expected-error@+1 {{shard-optimizer: no state of an optimizer is whole along 'data' and has a dimension that the axis divides (P3)}}
func.func @state_p3(%m: tensor<4x4xf32>, %x: tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) -> (tensor<4x4xf32>, tensor<4x4xf32>) {
  %g = stablehlo.dot_general %x, %x, contracting_dims = [0] x [0] : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %m1 = stablehlo.add %m, %g : tensor<4x4xf32>
  %w1 = stablehlo.dot_general %m1, %m1, contracting_dims = [0] x [0] : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  return %w1, %m1 : tensor<4x4xf32>, tensor<4x4xf32>
}
