// RUN: stablehlo-tools inspect %s --json | python -m json.tool --compact | sed 's/},{/},\n{/g' | filecheck %s
// RUN: stablehlo-tools inspect %s | filecheck %s --check-prefix=TEXT

// Shapes that a dense table of groups can have.

module attributes {mhlo.num_replicas = 6 : i32} {
  func.func @main(%x: tensor<f32>) -> tensor<f32> {
    // No groups: all processes in one.
    // CHECK: "groups":{{\[\[0,1,2,3,4,5]]}}
    // TEXT: all_reduce {0,1,2,3,4,5}
    %0 = "stablehlo.all_reduce"(%x) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %sum = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %sum : tensor<f32>
    }) {replica_groups = dense<> : tensor<0x0xi64>} : (tensor<f32>) -> tensor<f32>

    // Groups of different sizes: -1 fills up the short one.
    // CHECK: "groups":{{\[\[0,2,4,5],\[1,3]]}}
    // TEXT: all_reduce {0,2,4,5} {1,3}
    %1 = "stablehlo.all_reduce"(%0) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %sum = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %sum : tensor<f32>
    }) {replica_groups = dense<[[0, 2, 4, 5], [1, 3, -1, -1]]> : tensor<2x4xi64>} : (tensor<f32>) -> tensor<f32>

    // One group of one.
    // CHECK: "groups":{{\[\[3]]}}
    // TEXT: collective_broadcast {3}
    %2 = "stablehlo.collective_broadcast"(%1) {
      replica_groups = dense<[[3]]> : tensor<1x1xi64>
    } : (tensor<f32>) -> tensor<f32>

    // A splat, as MLIR stores a table of equal ids.
    // CHECK: "groups":{{\[\[0]]}}
    // TEXT: collective_broadcast {0}
    %3 = "stablehlo.collective_broadcast"(%2) {
      replica_groups = dense<0> : tensor<1x1xi64>
    } : (tensor<f32>) -> tensor<f32>

    // No pairs: nobody sends.
    // CHECK: "groups":[]
    // TEXT: collective_permute {}
    %4 = "stablehlo.collective_permute"(%3) {
      source_target_pairs = dense<> : tensor<0x2xi64>
    } : (tensor<f32>) -> tensor<f32>
    return %4 : tensor<f32>
  }
}
