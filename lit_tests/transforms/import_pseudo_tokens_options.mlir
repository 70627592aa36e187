// RUN: stablehlo-tools opt %s -p 'import-pseudo-tokens{assume-zero-argument=1}' --split-input-file 2>/dev/null \
// RUN:   | filecheck %s --enable-var-scope --check-prefixes=CHECK,STRENGTHEN
// RUN: stablehlo-tools opt %s -p 'import-pseudo-tokens{assume-zero-argument=1 fork=preserve}' --split-input-file 2>/dev/null \
// RUN:   | filecheck %s --enable-var-scope --check-prefixes=CHECK,PRESERVE
// RUN: stablehlo-tools opt %s -p 'import-pseudo-tokens{assume-zero-argument=1},strip-tokens' --split-input-file 2>/dev/null \
// RUN:   | filecheck %s --check-prefix=STRIPPED
// STRIPPED-NOT: token_link

// Two buckets take the same old token, and only the first makes a new one. By default the second
// is put between the first and what follows; fork=preserve lets it stand beside them.
// CHECK-LABEL: func.func @fork
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[TOKEN:.+]]: tensor<f32>, %[[Y:.+]]: tensor<2xbf16>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[X]], %[[ROOT]]
// CHECK-NEXT: %[[FIRST:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[FIRST]], %[[IN]]#1
// STRENGTHEN-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[Y]], %[[OUT]]#1
// PRESERVE-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[Y]], %[[ROOT]]
// CHECK-NEXT: %[[SECOND:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
// STRENGTHEN-NEXT: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[SECOND]], %[[IN2]]#1
// STRENGTHEN-NEXT: %[[IN3:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[X]], %[[OUT2]]#1
// PRESERVE-NEXT: %[[IN3:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[X]], %[[OUT]]#1
// CHECK-NEXT: "stablehlo.collective_permute"(%[[IN3]]#0)
func.func @fork(%x: tensor<2xf32>, %token: tensor<f32>, %y: tensor<2xbf16>) -> (tensor<2xf32>, tensor<2xbf16>, tensor<2xf32>) {
  %0 = stablehlo.broadcast_in_dim %token, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %1 = stablehlo.add %x, %0 : tensor<2xf32>
  %2 = "stablehlo.collective_permute"(%1) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %3 = stablehlo.convert %token : (tensor<f32>) -> tensor<bf16>
  %4 = stablehlo.broadcast_in_dim %3, dims = [] : (tensor<bf16>) -> tensor<2xbf16>
  %5 = stablehlo.add %y, %4 : tensor<2xbf16>
  %6 = "stablehlo.collective_permute"(%5) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xbf16>) -> tensor<2xbf16>
  %7 = stablehlo.slice %2 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
  %8 = stablehlo.reshape %7 : (tensor<1xf32>) -> tensor<f32>
  %9 = stablehlo.multiply %token, %8 : tensor<f32>
  %10 = stablehlo.broadcast_in_dim %9, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %11 = stablehlo.add %x, %10 : tensor<2xf32>
  %12 = "stablehlo.collective_permute"(%11) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %2, %6, %12 : tensor<2xf32>, tensor<2xbf16>, tensor<2xf32>
}

// -----

// A collective that takes two tokens comes after both of their makers.
// CHECK-LABEL: func.func @join
// PRESERVE: %[[FIRST:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %{{[0-9]+}}, %{{.+}}#1 : tensor<2xf32>, !stablehlo.token
// PRESERVE: "stablehlo.collective_permute"
// PRESERVE-NEXT: %[[SECOND:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %{{[0-9]+}}, %{{.+}}#1 : tensor<2xf32>, !stablehlo.token
// PRESERVE-NEXT: %[[JOIN:.+]] = stablehlo.after_all %[[FIRST]]#1, %[[SECOND]]#1 {stablehlo_tools.token_link}
// PRESERVE-NEXT: %[[IN:.+]]:3 = stablehlo.optimization_barrier {{.*}} %{{.+}}, %{{.+}}, %[[JOIN]] :
// STRENGTHEN-COUNT-1: stablehlo.after_all
// CHECK: "stablehlo.all_gather"(
func.func @join(%x: tensor<2xf32>, %token: tensor<f32>) -> (tensor<2xf32>, tensor<2xf32>, tensor<4xf32>, tensor<4xf32>) {
  %0 = stablehlo.broadcast_in_dim %token, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %1 = stablehlo.add %x, %0 : tensor<2xf32>
  %2 = "stablehlo.collective_permute"(%1) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %3 = stablehlo.slice %2 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
  %4 = stablehlo.reshape %3 : (tensor<1xf32>) -> tensor<f32>
  %5 = stablehlo.multiply %token, %4 : tensor<f32>
  %6 = "stablehlo.collective_permute"(%1) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %7 = stablehlo.slice %6 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
  %8 = stablehlo.reshape %7 : (tensor<1xf32>) -> tensor<f32>
  %9 = stablehlo.multiply %token, %8 : tensor<f32>
  %10 = stablehlo.broadcast_in_dim %5, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %11 = stablehlo.add %x, %10 : tensor<2xf32>
  %12 = stablehlo.broadcast_in_dim %9, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %13 = stablehlo.add %x, %12 : tensor<2xf32>
  %14:2 = "stablehlo.all_gather"(%11, %13) {
    all_gather_dim = 0 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>, tensor<2xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  return %2, %6, %14#0, %14#1 : tensor<2xf32>, tensor<2xf32>, tensor<4xf32>, tensor<4xf32>
}

// -----

// The user's word allows what the user's code does with the number: that stays exactly as it is,
// the sum with it included, while the collective reads the plain operand.
// CHECK-LABEL: func.func @number_is_used
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[TOKEN:.+]]: tensor<f32>)
// CHECK: %[[WIDE:.+]] = stablehlo.broadcast_in_dim %[[TOKEN]]
// CHECK-NEXT: %[[SUM:.+]] = stablehlo.add %[[X]], %[[WIDE]]
// CHECK: stablehlo.optimization_barrier {{.*}} %[[X]], %
// CHECK: %[[COSINE:.+]] = stablehlo.cosine %[[TOKEN]]
// CHECK-NEXT: return %{{.+}}, %[[SUM]], %[[COSINE]]
func.func @number_is_used(%x: tensor<2xf32>, %token: tensor<f32>) -> (tensor<2xf32>, tensor<2xf32>, tensor<f32>) {
  %0 = stablehlo.broadcast_in_dim %token, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %1 = stablehlo.add %x, %0 : tensor<2xf32>
  %2 = "stablehlo.collective_permute"(%1) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %3 = stablehlo.cosine %token : tensor<f32>
  return %2, %1, %3 : tensor<2xf32>, tensor<2xf32>, tensor<f32>
}

// -----

// A token that is returned is computed as before; the links go all the same.
// CHECK-LABEL: func.func @token_returned
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[TOKEN:.+]]: tensor<f32>)
// CHECK: %[[IN:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[X]], %
// CHECK: %[[SLICE:.+]] = stablehlo.slice %
// CHECK-NEXT: %[[SCALAR:.+]] = stablehlo.reshape %[[SLICE]]
// CHECK-NEXT: %[[PRODUCT:.+]] = stablehlo.multiply %[[TOKEN]], %[[SCALAR]]
// CHECK-NEXT: return %{{.+}}, %[[PRODUCT]]
func.func @token_returned(%x: tensor<2xf32>, %token: tensor<f32>) -> (tensor<2xf32>, tensor<f32>) {
  %0 = stablehlo.broadcast_in_dim %token, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %1 = stablehlo.add %x, %0 : tensor<2xf32>
  %2 = "stablehlo.collective_permute"(%1) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %3 = stablehlo.slice %2 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
  %4 = stablehlo.reshape %3 : (tensor<1xf32>) -> tensor<f32>
  %5 = stablehlo.multiply %token, %4 : tensor<f32>
  return %2, %5 : tensor<2xf32>, tensor<f32>
}
