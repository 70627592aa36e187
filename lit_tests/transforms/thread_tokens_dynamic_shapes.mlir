// RUN: stablehlo-tools opt %s -p thread-tokens | tee %t.threaded | filecheck %s --enable-var-scope
// RUN: stablehlo-tools opt %t.threaded -p thread-tokens | diff -u %t.threaded -
// RUN: stablehlo-tools opt %s > %t.before
// RUN: stablehlo-tools opt %t.threaded -p strip-tokens | diff -u %t.before -

// Dynamic and bounded dimensions go through a barrier as they are.
// CHECK-LABEL: func.func @dynamic_shapes
// CHECK-SAME: (%[[X:.+]]: tensor<?x4xf32>, %[[Y:.+]]: tensor<?xf32, #stablehlo.bounds<8>>)
// CHECK-SAME: -> (tensor<?x4xf32>, tensor<?xf32, #stablehlo.bounds<8>>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[Y]], %[[OUT]]#1 :
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
// CHECK-NEXT: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE2]], %[[IN2]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT2]]#0 :
func.func @dynamic_shapes(
    %x: tensor<?x4xf32>, %y: tensor<?xf32, #stablehlo.bounds<8>>
) -> (tensor<?x4xf32>, tensor<?xf32, #stablehlo.bounds<8>>) {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<?x4xf32>) -> tensor<?x4xf32>
  %1 = "stablehlo.collective_permute"(%y) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<?xf32, #stablehlo.bounds<8>>) -> tensor<?xf32, #stablehlo.bounds<8>>
  return %0, %1 : tensor<?x4xf32>, tensor<?xf32, #stablehlo.bounds<8>>
}
