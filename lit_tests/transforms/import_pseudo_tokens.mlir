// RUN: stablehlo-tools opt %s -p import-pseudo-tokens --split-input-file 2>/dev/null \
// RUN:   | filecheck %s --enable-var-scope
// RUN: stablehlo-tools opt %s -p import-pseudo-tokens --split-input-file --verify-diagnostics > /dev/null
// RUN: stablehlo-tools opt %s -p 'import-pseudo-tokens{fork=preserve}' --split-input-file 2>/dev/null \
// RUN:   | filecheck %s --enable-var-scope

// A sum leads into a collective, a product out of it: both go, and a token goes the same way. The
// last token was nobody's.
// CHECK-LABEL: module @IrToHlo.1
// CHECK-NEXT: func.func @sums_and_products(%[[TOKEN:.+]]: tensor<f32>, %[[X:.+]]: tensor<2x3xf32>, %[[Y:.+]]: tensor<4xbf16>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[GATHER]], %[[IN]]#1 :
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[Y]], %[[OUT]]#1 :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
// CHECK: return %[[OUT]]#0, %
module @IrToHlo.1 {
  // expected-warning@+1 {{argument 0 of @sums_and_products is taken as torch-xla's token, which is always zero}}
  func.func @sums_and_products(%token: tensor<f32>, %x: tensor<2x3xf32>, %y: tensor<4xbf16>) -> (tensor<4x3xf32>, tensor<4xbf16>) {
    %0 = stablehlo.broadcast_in_dim %token, dims = [] : (tensor<f32>) -> tensor<2x3xf32>
    %1 = stablehlo.add %x, %0 : tensor<2x3xf32>
    %gathered = "stablehlo.all_gather"(%1) {
      all_gather_dim = 0 : i64,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2x3xf32>) -> tensor<4x3xf32>
    %2 = stablehlo.slice %gathered [0:1, 0:1] : (tensor<4x3xf32>) -> tensor<1x1xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x1xf32>) -> tensor<f32>
    %4 = stablehlo.multiply %token, %3 : tensor<f32>
    %5 = stablehlo.convert %4 : (tensor<f32>) -> tensor<bf16>
    %6 = stablehlo.broadcast_in_dim %5, dims = [] : (tensor<bf16>) -> tensor<4xbf16>
    %7 = stablehlo.add %6, %y : tensor<4xbf16>
    %permuted = "stablehlo.collective_permute"(%7) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<4xbf16>) -> tensor<4xbf16>
    %8 = stablehlo.slice %permuted [0:1] : (tensor<4xbf16>) -> tensor<1xbf16>
    %9 = stablehlo.reshape %8 : (tensor<1xbf16>) -> tensor<bf16>
    %10 = stablehlo.convert %9 : (tensor<bf16>) -> tensor<f32>
    %11 = stablehlo.multiply %4, %10 : tensor<f32>
    return %gathered, %permuted : tensor<4x3xf32>, tensor<4xbf16>
  }
}

// -----

// An all_reduce loses one operand and one result. Nothing depends on the number that only goes
// through all_reduces, so that it need not be zero: no warning, whatever the module is called.
// CHECK-LABEL: func.func @all_reduces
// CHECK-SAME: (%[[TOKEN:.+]]: tensor<f32>, %[[X:.+]]: tensor<4xf32>, %[[Y:.+]]: tensor<2xbf16>)
// CHECK: %[[IN:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[X]], %
// CHECK-NEXT: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[IN]]#0) <{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}>
// CHECK: }) {mhlo.frontend_attributes = {mine = "yes"}} : (tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[SUM]], %[[IN]]#1 :
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[Y]], %[[OUT]]#1 :
// CHECK-NEXT: %[[MAX:.+]] = "stablehlo.all_reduce"(%[[IN2]]#0)
// CHECK: }) : (tensor<2xbf16>) -> tensor<2xbf16>
func.func @all_reduces(%token: tensor<f32>, %x: tensor<4xf32>, %y: tensor<2xbf16>) -> (tensor<4xf32>, tensor<2xbf16>) {
  %0:2 = "stablehlo.all_reduce"(%x, %token) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %sum = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %sum : tensor<f32>
  }) {
    mhlo.frontend_attributes = {mine = "yes"},
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<4xf32>, tensor<f32>) -> (tensor<4xf32>, tensor<f32>)
  %1 = stablehlo.convert %0#1 : (tensor<f32>) -> tensor<bf16>
  %2:2 = "stablehlo.all_reduce"(%y, %1) ({
  ^bb0(%a: tensor<bf16>, %b: tensor<bf16>):
    %max = stablehlo.maximum %a, %b : tensor<bf16>
    stablehlo.return %max : tensor<bf16>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xbf16>, tensor<bf16>) -> (tensor<2xbf16>, tensor<bf16>)
  return %0#0, %2#0 : tensor<4xf32>, tensor<2xbf16>
}

// -----

// With DISABLE_NUMERIC_CC_TOKEN=1 only all_reduces have a token: the others stay out of the chain.
// CHECK-LABEL: func.func @all_reduce_alone
// CHECK-SAME: (%[[TOKEN:.+]]: tensor<f32>, %[[X:.+]]: tensor<2xf32>)
// CHECK: "stablehlo.all_reduce"(%{{.+}}) <
// CHECK: }) : (tensor<2xf32>) -> tensor<2xf32>
// CHECK: "stablehlo.all_gather"(%[[X]])
// CHECK-NEXT: return
module @IrToHlo.2 {
  func.func @all_reduce_alone(%token: tensor<f32>, %x: tensor<2xf32>) -> (tensor<2xf32>, tensor<4xf32>) {
    %0:2 = "stablehlo.all_reduce"(%x, %token) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %min = stablehlo.minimum %a, %b : tensor<f32>
      stablehlo.return %min : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>, tensor<f32>) -> (tensor<2xf32>, tensor<f32>)
    %1 = "stablehlo.all_gather"(%x) {
      all_gather_dim = 0 : i64,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<4xf32>
    return %0#0, %1 : tensor<2xf32>, tensor<4xf32>
  }
}

// -----

// A constant zero is zero under any name. The user's own sum with it stays, and so does the
// constant, although both are the same value as the token; so does a user's inner sum.
// CHECK-LABEL: func.func @constant_root
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>)
// CHECK-NEXT: %[[ZEROS:.+]] = stablehlo.constant dense<0.000000e+00> : tensor<2xf32>
// CHECK-NEXT: %[[ZERO:.+]] = stablehlo.constant dense<0.000000e+00> : tensor<f32>
// CHECK-NEXT: stablehlo.broadcast_in_dim %[[ZERO]], dims = [] : (tensor<f32>) -> tensor<3xf32>
// CHECK-NEXT: %[[INNER:.+]] = stablehlo.add %[[X]], %[[ZEROS]] :
// CHECK: %[[IN:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[INNER]], %
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[X]], %
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
// CHECK: %[[OWN:.+]] = stablehlo.add %[[X]], %[[ZEROS]] :
// CHECK-NEXT: %[[ALONE:.+]] = "stablehlo.collective_permute"(%[[OWN]])
// CHECK-NEXT: return
func.func @constant_root(%x: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>, tensor<2xf32>) {
  %zeros = stablehlo.constant dense<0.0> : tensor<2xf32>
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %dead_code_of_the_users = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<f32>) -> tensor<3xf32>
  %inner = stablehlo.add %x, %zeros : tensor<2xf32>
  %0 = stablehlo.add %inner, %zeros : tensor<2xf32>
  %1 = "stablehlo.collective_permute"(%0) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %2 = stablehlo.slice %1 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
  %3 = stablehlo.reshape %2 : (tensor<1xf32>) -> tensor<f32>
  %4 = stablehlo.multiply %3, %zero : tensor<f32>
  %5 = stablehlo.broadcast_in_dim %4, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %6 = stablehlo.add %x, %5 : tensor<2xf32>
  %7 = "stablehlo.collective_permute"(%6) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  %own = stablehlo.add %x, %zeros : tensor<2xf32>
  %8 = "stablehlo.collective_permute"(%own) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %1, %7, %8 : tensor<2xf32>, tensor<2xf32>, tensor<2xf32>
}

// -----

// Of two scalar arguments the one that is added last is the token; the user's bias stays. So does
// the user's product of the first element with another number.
// CHECK-LABEL: func.func @outermost_sum
// CHECK-SAME: (%[[BIAS:.+]]: tensor<f32>, %[[TOKEN:.+]]: tensor<f32>, %[[X:.+]]: tensor<2xf32>)
// CHECK: %[[WIDE:.+]] = stablehlo.broadcast_in_dim %[[BIAS]]
// CHECK-NEXT: %[[BIASED:.+]] = stablehlo.add %[[X]], %[[WIDE]]
// CHECK: stablehlo.optimization_barrier {{.*}} %[[BIASED]], %
// CHECK: %[[PRODUCT:.+]] = stablehlo.multiply %[[BIAS]], %
// CHECK: return %{{.+}}, %{{.+}}, %[[PRODUCT]] :
module @SyncTensorsGraph.3 {
  // expected-warning@+1 {{argument 1 of @outermost_sum is taken as torch-xla's token, which is always zero}}
  func.func @outermost_sum(%bias: tensor<f32>, %token: tensor<f32>, %x: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>, tensor<f32>) {
    %0 = stablehlo.broadcast_in_dim %bias, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %1 = stablehlo.add %x, %0 : tensor<2xf32>
    %2 = stablehlo.broadcast_in_dim %token, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %3 = stablehlo.add %1, %2 : tensor<2xf32>
    %4 = "stablehlo.collective_permute"(%3) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    %5 = stablehlo.slice %4 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
    %6 = stablehlo.reshape %5 : (tensor<1xf32>) -> tensor<f32>
    %7 = stablehlo.multiply %token, %6 : tensor<f32>
    %product = stablehlo.multiply %bias, %6 : tensor<f32>
    %8 = stablehlo.broadcast_in_dim %7, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %9 = stablehlo.add %x, %8 : tensor<2xf32>
    %10 = "stablehlo.collective_permute"(%9) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    return %4, %10, %product : tensor<2xf32>, tensor<2xf32>, tensor<f32>
  }
}

// -----

// Only the second permute reads the first one, and only its token does: it stays a number, made
// from the root anew, into that one operand, so that no compiler deletes the permute.
// CHECK-LABEL: func.func @unused_result
// CHECK-SAME: (%[[TOKEN:.+]]: tensor<f32>, %[[X:.+]]: tensor<2xf32>)
// CHECK: %[[IN:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[X]], %
// CHECK-NEXT: %[[FIRST:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[FIRST]], %[[IN]]#1
// CHECK-NEXT: %[[SLICE:.+]] = stablehlo.slice %[[OUT]]#0 [0:1]
// CHECK-NEXT: %[[SCALAR:.+]] = stablehlo.reshape %[[SLICE]]
// CHECK-NEXT: %[[NUMBER:.+]] = stablehlo.multiply %[[TOKEN]], %[[SCALAR]]
// CHECK-NEXT: %[[WIDE:.+]] = stablehlo.broadcast_in_dim %[[NUMBER]]
// CHECK-NEXT: %[[SUM:.+]] = stablehlo.add %[[X]], %[[WIDE]]
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {{.*}} %[[SUM]], %[[OUT]]#1
// CHECK-NEXT: %[[SECOND:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
module @IrToHlo.4 {
  // expected-warning@+1 {{argument 0 of @unused_result is taken as torch-xla's token, which is always zero}}
  func.func @unused_result(%token: tensor<f32>, %x: tensor<2xf32>) -> tensor<2xf32> {
    %0 = stablehlo.broadcast_in_dim %token, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %1 = stablehlo.add %x, %0 : tensor<2xf32>
    // expected-warning@+1 {{stablehlo.collective_permute: only its pseudo-token keeps it alive}}
    %2 = "stablehlo.collective_permute"(%1) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    %3 = stablehlo.slice %2 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
    %4 = stablehlo.reshape %3 : (tensor<1xf32>) -> tensor<f32>
    %5 = stablehlo.multiply %token, %4 : tensor<f32>
    %6 = stablehlo.broadcast_in_dim %5, dims = [] : (tensor<f32>) -> tensor<2xf32>
    %7 = stablehlo.add %x, %6 : tensor<2xf32>
    %8 = "stablehlo.collective_permute"(%7) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2xf32>) -> tensor<2xf32>
    return %8 : tensor<2xf32>
  }
}
