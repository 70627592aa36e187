// RUN: stablehlo-tools opt %s -p import-pseudo-tokens --split-input-file 2>/dev/null | filecheck %s --enable-var-scope
// RUN: stablehlo-tools opt %s -p import-pseudo-tokens,strip-tokens --split-input-file 2>/dev/null | filecheck %s --check-prefix=STRIPPED
// STRIPPED-NOT: stablehlo_tools

// A loop carries the token. Its slot stays and carries the root; the real token has a slot of its own.
// CHECK-LABEL: func.func @carried_by_a_loop
// CHECK-SAME: (%[[TOKEN:.+]]: tensor<f32>, %[[X:.+]]: tensor<2xf32>, %{{.+}}: tensor<i1>)
// CHECK: %[[LOOP:.+]]:3 = stablehlo.while(%[[V:.+]] = %[[X]], %[[SLOT:.+]] = %[[TOKEN]], %[[T:.+]] = %{{.+}}) : tensor<2xf32>, tensor<f32>, !stablehlo.token
// CHECK: } do {
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[V]], %[[T]]
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[PERMUTE]], %[[IN]]#1
// CHECK-NEXT: stablehlo.return %[[OUT]]#0, %[[SLOT]], %[[OUT]]#1
// CHECK: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[X]], %[[LOOP]]#2
// CHECK-NEXT: "stablehlo.all_gather"(%[[IN2]]#0)
module @IrToHlo.1 {
  func.func @carried_by_a_loop(%token: tensor<f32>, %x: tensor<2xf32>, %p: tensor<i1>) -> (tensor<2xf32>, tensor<4xf32>) {
    %0:2 = stablehlo.while(%v = %x, %t = %token) : tensor<2xf32>, tensor<f32>
      cond {
        stablehlo.return %p : tensor<i1>
      } do {
        %1 = stablehlo.broadcast_in_dim %t, dims = [] : (tensor<f32>) -> tensor<2xf32>
        %2 = stablehlo.add %v, %1 : tensor<2xf32>
        %3 = "stablehlo.collective_permute"(%2) {
          source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
        } : (tensor<2xf32>) -> tensor<2xf32>
        %4 = stablehlo.slice %3 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
        %5 = stablehlo.reshape %4 : (tensor<1xf32>) -> tensor<f32>
        %6 = stablehlo.multiply %t, %5 : tensor<f32>
        stablehlo.return %3, %6 : tensor<2xf32>, tensor<f32>
      }
    %7 = stablehlo.broadcast_in_dim %0#1, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %8 = stablehlo.add %x, %7 : tensor<2xf32>
    %9 = "stablehlo.all_gather"(%8) {
      all_gather_dim = 0 : i64,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<4xf32>
    return %0#0, %9 : tensor<2xf32>, tensor<4xf32>
  }
}

// -----

// A function takes and returns the token, at each of its calls.
// CHECK-LABEL: func.func @main
// CHECK-SAME: (%[[TOKEN:.+]]: tensor<f32>, %[[X:.+]]: tensor<2xf32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all
// CHECK-NEXT: %[[FIRST:.+]]:3 = call @exchange(%[[X]], %[[TOKEN]], %[[ROOT]])
// CHECK-NEXT: %[[SECOND:.+]]:3 = call @exchange(%[[FIRST]]#0, %[[TOKEN]], %[[FIRST]]#2)
// CHECK-NEXT: return %[[SECOND]]#0
// CHECK: func.func private @exchange(%[[X:.+]]: tensor<2xf32>, %[[SLOT:.+]]: tensor<f32>, %[[T:.+]]: !stablehlo.token)
// CHECK-NEXT: stablehlo.optimization_barrier {{.*}} %[[X]], %[[T]]
// CHECK: return %{{.+}}, %[[SLOT]], %
module @IrToHlo.2 {
  func.func @main(%token: tensor<f32>, %x: tensor<2xf32>) -> tensor<2xf32> {
    %0:2 = call @exchange(%x, %token) : (tensor<2xf32>, tensor<f32>) -> (tensor<2xf32>, tensor<f32>)
    %1:2 = call @exchange(%0#0, %0#1) : (tensor<2xf32>, tensor<f32>) -> (tensor<2xf32>, tensor<f32>)
    return %1#0 : tensor<2xf32>
  }
  func.func private @exchange(%x: tensor<2xf32>, %t: tensor<f32>) -> (tensor<2xf32>, tensor<f32>) {
    %0 = stablehlo.broadcast_in_dim %t, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %1 = stablehlo.add %x, %0 : tensor<2xf32>
    %2 = "stablehlo.collective_permute"(%1) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    %3 = stablehlo.slice %2 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
    %4 = stablehlo.reshape %3 : (tensor<1xf32>) -> tensor<f32>
    %5 = stablehlo.multiply %t, %4 : tensor<f32>
    return %2, %5 : tensor<2xf32>, tensor<f32>
  }
}

// -----

// A chain that starts from a constant, in a loop: the loop's other carry that starts at zero, a
// sum of the user's, is no token.
// CHECK-LABEL: func.func @constant_into_a_loop
// CHECK: stablehlo.while(%[[V:.+]] = %{{.+}}, %[[SUM:.+]] = %{{.+}}, %[[SLOT:.+]] = %{{.+}}, %
// CHECK: %[[IN:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[V]], %
// CHECK: %[[NEXT:.+]] = stablehlo.add %[[SUM]], %
// CHECK: stablehlo.return %{{.+}}, %[[NEXT]], %[[SLOT]], %
func.func @constant_into_a_loop(%x: tensor<2xf32>, %p: tensor<i1>) -> (tensor<2xf32>, tensor<2xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %zeros = stablehlo.constant dense<0.0> : tensor<2xf32>
  %0:3 = stablehlo.while(%v = %x, %s = %zeros, %t = %zero) : tensor<2xf32>, tensor<2xf32>, tensor<f32>
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %1 = stablehlo.broadcast_in_dim %t, dims = [] : (tensor<f32>) -> tensor<2xf32>
      %2 = stablehlo.add %v, %1 : tensor<2xf32>
      %3 = "stablehlo.collective_permute"(%2) {
        source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
      } : (tensor<2xf32>) -> tensor<2xf32>
      %4 = stablehlo.slice %3 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
      %5 = stablehlo.reshape %4 : (tensor<1xf32>) -> tensor<f32>
      %6 = stablehlo.multiply %t, %5 : tensor<f32>
      %7 = stablehlo.add %s, %3 : tensor<2xf32>
      stablehlo.return %3, %7, %6 : tensor<2xf32>, tensor<2xf32>, tensor<f32>
    }
  return %0#0, %0#1 : tensor<2xf32>, tensor<2xf32>
}

// -----

// Both branches hand a token on, one of them the one it found.
// CHECK-LABEL: func.func @branches
// CHECK-SAME: (%[[TOKEN:.+]]: tensor<f32>, %[[X:.+]]: tensor<2xf32>, %{{.+}}: tensor<i1>)
// CHECK: %[[IF:.+]]:3 = "stablehlo.if"
// CHECK: %[[IN:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[X]], %
// CHECK: stablehlo.return %{{.+}}, %[[TOKEN]], %
// CHECK: stablehlo.return %[[X]], %[[TOKEN]], %
// CHECK: stablehlo.optimization_barrier {{.*}} %[[X]], %[[IF]]#2
module @IrToHlo.3 {
  func.func @branches(%token: tensor<f32>, %x: tensor<2xf32>, %p: tensor<i1>) -> (tensor<2xf32>, tensor<4xf32>) {
    %0:2 = "stablehlo.if"(%p) ({
      %1 = stablehlo.broadcast_in_dim %token, dims = [] : (tensor<f32>) -> tensor<2xf32>
      %2 = stablehlo.add %x, %1 : tensor<2xf32>
      %3 = "stablehlo.collective_permute"(%2) {
        source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
      } : (tensor<2xf32>) -> tensor<2xf32>
      %4 = stablehlo.slice %3 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
      %5 = stablehlo.reshape %4 : (tensor<1xf32>) -> tensor<f32>
      %6 = stablehlo.multiply %token, %5 : tensor<f32>
      stablehlo.return %3, %6 : tensor<2xf32>, tensor<f32>
    }, {
      stablehlo.return %x, %token : tensor<2xf32>, tensor<f32>
    }) : (tensor<i1>) -> (tensor<2xf32>, tensor<f32>)
    %7 = stablehlo.broadcast_in_dim %0#1, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %8 = stablehlo.add %x, %7 : tensor<2xf32>
    %9 = "stablehlo.all_gather"(%8) {
      all_gather_dim = 0 : i64,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<4xf32>
    return %0#0, %9 : tensor<2xf32>, tensor<4xf32>
  }
}

// -----

// The number stays where it is sure to be read: behind the loop, not in it.
// CHECK-LABEL: func.func @unused_result_before_a_loop
// CHECK-SAME: (%{{.+}}: tensor<f32>, %[[X:.+]]: tensor<2xf32>, %{{.+}}: tensor<i1>)
// CHECK: stablehlo.while(%[[V:.+]] = %[[X]], %[[T:.+]] = %
// CHECK: } do {
// CHECK-NEXT: stablehlo.optimization_barrier {{.*}} %[[V]], %[[T]] :
// CHECK: %[[SUM:.+]] = stablehlo.add %[[X]], %
// CHECK-NEXT: stablehlo.optimization_barrier {{.*}} %[[SUM]], %
func.func @unused_result_before_a_loop(%a: tensor<f32>, %x: tensor<2xf32>, %p: tensor<i1>) -> (tensor<2xf32>, tensor<2xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %zeros = stablehlo.constant dense<0.0> : tensor<2xf32>
  %0 = stablehlo.add %x, %zeros : tensor<2xf32>
  %1 = "stablehlo.collective_permute"(%0) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %2 = stablehlo.slice %1 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
  %3 = stablehlo.reshape %2 : (tensor<1xf32>) -> tensor<f32>
  %4 = stablehlo.multiply %zero, %3 : tensor<f32>
  %5 = stablehlo.broadcast_in_dim %4, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %6 = stablehlo.while(%v = %x) : tensor<2xf32>
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %7 = stablehlo.add %v, %5 : tensor<2xf32>
      %8 = "stablehlo.collective_permute"(%7) {
        source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
      } : (tensor<2xf32>) -> tensor<2xf32>
      stablehlo.return %8 : tensor<2xf32>
    }
  %9 = stablehlo.add %x, %5 : tensor<2xf32>
  %10 = "stablehlo.collective_permute"(%9) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %6, %10 : tensor<2xf32>, tensor<2xf32>
}

// -----

// The loop's last token is returned: what it is made of stays as it is, for it keeps the permute alive.
// CHECK-LABEL: func.func @token_of_a_loop_returned
// CHECK: stablehlo.while(%[[SLOT:.+]] = %{{.+}}, %
// CHECK: %[[IN:.+]]:2 = stablehlo.optimization_barrier
// CHECK: %[[PRODUCT:.+]] = stablehlo.multiply %[[SLOT]], %
// CHECK-NEXT: stablehlo.return %[[PRODUCT]], %
func.func @token_of_a_loop_returned(%x: tensor<2xf32>, %p: tensor<i1>) -> tensor<f32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.while(%t = %zero) : tensor<f32>
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %1 = stablehlo.broadcast_in_dim %t, dims = [] : (tensor<f32>) -> tensor<2xf32>
      %2 = stablehlo.add %x, %1 : tensor<2xf32>
      %3 = "stablehlo.collective_permute"(%2) {
        source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
      } : (tensor<2xf32>) -> tensor<2xf32>
      %4 = stablehlo.slice %3 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
      %5 = stablehlo.reshape %4 : (tensor<1xf32>) -> tensor<f32>
      %6 = stablehlo.multiply %t, %5 : tensor<f32>
      stablehlo.return %6 : tensor<f32>
    }
  return %0 : tensor<f32>
}
