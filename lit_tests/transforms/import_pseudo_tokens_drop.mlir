// RUN: stablehlo-tools opt %s -p 'import-pseudo-tokens{drop-token-argument}' --split-input-file 2>/dev/null | filecheck %s --enable-var-scope

// The argument goes, and the attributes of the others stay theirs.
// CHECK-LABEL: func.func @in_the_middle
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32> {mhlo.first}, %[[Y:.+]]: tensor<2xf32> {mhlo.third}) -> (tensor<2xf32>, tensor<2xf32>)
// CHECK: stablehlo.optimization_barrier {{.*}} %[[X]], %
// CHECK: stablehlo.optimization_barrier {{.*}} %[[Y]], %
func.func @in_the_middle(
    %x: tensor<2xf32> {mhlo.first}, %token: tensor<f32> {mhlo.second}, %y: tensor<2xf32> {mhlo.third}) -> (tensor<2xf32>, tensor<2xf32>) {
  %0:2 = "stablehlo.all_reduce"(%x, %token) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %sum = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %sum : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>, tensor<f32>) -> (tensor<2xf32>, tensor<f32>)
  %1:2 = "stablehlo.all_reduce"(%y, %0#1) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %sum = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %sum : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>, tensor<f32>) -> (tensor<2xf32>, tensor<f32>)
  return %0#0, %1#0 : tensor<2xf32>, tensor<2xf32>
}

// -----

// Without a chain there is nothing to drop.
// CHECK-LABEL: func.func @no_chain
// CHECK-SAME: (%{{.+}}: tensor<f32>) -> tensor<f32>
func.func @no_chain(%x: tensor<f32>) -> tensor<f32> {
  return %x : tensor<f32>
}
