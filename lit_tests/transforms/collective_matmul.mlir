// RUN: stablehlo-tools opt %s -p 'collective-matmul{rings=all directions=one hardware=tpu-v5e}' --split-input-file | filecheck %s --enable-var-scope --check-prefixes=CHECK,ONE
// RUN: stablehlo-tools opt %s -p 'collective-matmul{rings=all directions=both hardware=h100}' --split-input-file | filecheck %s --enable-var-scope --check-prefixes=CHECK,BOTH
// RUN: stablehlo-tools opt %s -p 'collective-matmul{rings=all directions=both hardware=tpu-v5e}' --split-input-file | filecheck %s --enable-var-scope --check-prefixes=CHECK,TORUS
// RUN: stablehlo-tools opt %s -p 'collective-matmul{rings=all directions=one explain}' --split-input-file -o /dev/null 2>&1 | filecheck %s --check-prefix=SAID

// What is gathered is multiplied block by block: the device's own rows first, while those of the
// device before are on their way. Four chips of a v5e stand in a square: 0, 1, 3, 2 is the way round.
// SAID: note: collective-matmul: all_gather became a ring of 4, in one direction, beside 1 product
// CHECK-LABEL: func.func @gathered
// ONE-SAME: (%[[X:.+]]: tensor<2x3xf32>, %[[W:.+]]: tensor<3x5xf32>)
// ONE-NEXT: %[[B1:.+]] = "stablehlo.collective_permute"(%[[X]])
// ONE-SAME: source_target_pairs = dense<{{\[\[}}0, 1], [1, 3], [3, 2], [2, 0]]>
// ONE-NEXT: %[[Y0:.+]] = stablehlo.dot_general %[[X]], %[[W]]
// ONE-SAME: -> tensor<2x5xf32>
// ONE-NEXT: %[[B2:.+]] = "stablehlo.collective_permute"(%[[B1]])
// ONE-NEXT: %[[Y1:.+]] = stablehlo.dot_general %[[B1]], %[[W]]
// ONE-NEXT: %[[B3:.+]] = "stablehlo.collective_permute"(%[[B2]])
// ONE-NEXT: %[[Y2:.+]] = stablehlo.dot_general %[[B2]], %[[W]]
// ONE-NEXT: %[[Y3:.+]] = stablehlo.dot_general %[[B3]], %[[W]]
// ONE: %[[NOTHING:.+]] = stablehlo.constant dense<0.000000e+00> : tensor<8x5xf32>
// ONE: stablehlo.constant dense<[0, 2, 4, 6]>
// ONE: %[[WITH0:.+]] = stablehlo.dynamic_update_slice %[[NOTHING]], %[[Y0]]
// ONE: stablehlo.constant dense<[4, 0, 6, 2]>
// ONE: %[[WITH1:.+]] = stablehlo.dynamic_update_slice %[[WITH0]], %[[Y1]]
// ONE: %[[WITH2:.+]] = stablehlo.dynamic_update_slice %[[WITH1]], %[[Y2]]
// ONE: %[[ALL:.+]] = stablehlo.dynamic_update_slice %[[WITH2]], %[[Y3]]
// ONE-NEXT: return %[[ALL]]

// For XLA:GPU barriers keep one hop beside each product, and products apart that share an operand.
// BOTH-SAME: (%[[X:.+]]: tensor<2x3xf32>, %[[W:.+]]: tensor<3x5xf32>)
// BOTH-NEXT: %[[OWN:.+]] = stablehlo.optimization_barrier %[[X]]
// BOTH-NEXT: %[[AHEAD:.+]] = "stablehlo.collective_permute"(%[[OWN]])
// BOTH-SAME: source_target_pairs = dense<{{\[\[}}0, 1], [1, 2], [2, 3], [3, 0]]>
// BOTH-NEXT: %[[SAME:.+]] = stablehlo.optimization_barrier %[[X]]
// BOTH-NEXT: %[[BACK:.+]] = "stablehlo.collective_permute"(%[[SAME]])
// BOTH-SAME: source_target_pairs = dense<{{\[\[}}0, 3], [1, 0], [2, 1], [3, 2]]>
// BOTH-NEXT: %[[TAKEN:.+]]:2 = stablehlo.optimization_barrier %[[X]], %[[W]]
// BOTH-NEXT: %[[Y0:.+]] = stablehlo.dot_general %[[TAKEN]]#0, %[[TAKEN]]#1
// BOTH-NEXT: %[[THEN:.+]]:2 = stablehlo.optimization_barrier %[[AHEAD]], %[[Y0]]
// BOTH-NEXT: "stablehlo.collective_permute"(%[[THEN]]#0)
// BOTH-COUNT-3: stablehlo.dot_general
// BOTH-NOT: stablehlo.dot_general
// BOTH: stablehlo.dynamic_update_slice %{{.+}}, %[[THEN]]#1
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @gathered(%x: tensor<2x3xf32>, %w: tensor<3x5xf32>) -> tensor<8x5xf32> {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %y = stablehlo.dot_general %g, %w, contracting_dims = [1] x [0] : (tensor<8x3xf32>, tensor<3x5xf32>) -> tensor<8x5xf32>
  return %y : tensor<8x5xf32>
}
}

// -----

// A sum begins at the device that is furthest behind: it adds its term to what comes in.
// SAID: note: collective-matmul: reduce_scatter became a ring of 4, in one direction, beside 1 product
// CHECK-LABEL: func.func @scattered
// CHECK-SAME: (%[[A:.+]]: tensor<8x3xf32>, %[[W:.+]]: tensor<3x5xf32>)
// ONE: %[[A1:.+]] = stablehlo.dynamic_slice %[[A]], %{{.+}}, %{{.+}}, sizes = [2, 3]
// ONE-NEXT: %[[S1:.+]] = stablehlo.dot_general %[[A1]], %[[W]]
// ONE: %[[A2:.+]] = stablehlo.dynamic_slice %[[A]]
// ONE-NEXT: %[[C1:.+]] = "stablehlo.collective_permute"(%[[S1]])
// ONE-NEXT: %[[P2:.+]] = stablehlo.dot_general %[[A2]], %[[W]]
// ONE-NEXT: %[[S2:.+]] = stablehlo.add %[[C1]], %[[P2]]
// ONE: %[[C2:.+]] = "stablehlo.collective_permute"(%[[S2]])
// ONE-NEXT: %[[P3:.+]] = stablehlo.dot_general
// ONE-NEXT: %[[S3:.+]] = stablehlo.add %[[C2]], %[[P3]]
// ONE: %[[C3:.+]] = "stablehlo.collective_permute"(%[[S3]])
// ONE-NEXT: %[[OWN:.+]] = stablehlo.dot_general
// ONE-NEXT: %[[SUM:.+]] = stablehlo.add %[[C3]], %[[OWN]]
// ONE-NEXT: return %[[SUM]] : tensor<2x5xf32>

// Two sums from either side, one term between two hops of each.
// TORUS: %[[AHEAD:.+]] = stablehlo.dot_general
// TORUS: "stablehlo.collective_permute"(%[[AHEAD]])
// TORUS: %[[BACK:.+]] = stablehlo.dot_general
// TORUS: "stablehlo.collective_permute"(%[[BACK]])
// TORUS: stablehlo.dot_general
// TORUS: stablehlo.dot_general
// TORUS: %[[FIRST:.+]] = stablehlo.add
// TORUS-NEXT: %[[SECOND:.+]] = stablehlo.add %{{.+}}, %[[FIRST]]
// TORUS-NEXT: return %[[SECOND]]
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @scattered(%a: tensor<8x3xf32>, %w: tensor<3x5xf32>) -> tensor<2x5xf32> {
  %p = stablehlo.dot_general %a, %w, contracting_dims = [1] x [0] : (tensor<8x3xf32>, tensor<3x5xf32>) -> tensor<8x5xf32>
  %y = "stablehlo.reduce_scatter"(%p) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {scatter_dimension = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x5xf32>) -> tensor<2x5xf32>
  return %y : tensor<2x5xf32>
}
}

// -----

// Gathered, multiplied, multiplied again and scattered: once round, and nothing is put together. On
// a torus in two halves of each block, one each way.
// SAID: note: collective-matmul: all_gather and reduce_scatter became a ring of 4, in one direction, beside 2 products
// CHECK-LABEL: func.func @both_ends
// CHECK-NOT: stablehlo.dynamic_update_slice
// ONE-COUNT-2: stablehlo.tanh %{{.+}} : tensor<2x6xf32>
// TORUS: stablehlo.slice %{{.+}} [0:1, 0:3]
// TORUS: stablehlo.slice %{{.+}} [1:2, 0:3]
// TORUS-COUNT-8: stablehlo.tanh %{{.+}} : tensor<1x6xf32>
// TORUS: stablehlo.concatenate %{{.+}}, %{{.+}}, dim = 0
// CHECK: return %{{.+}} : tensor<2x3xf32>
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @both_ends(%x: tensor<2x3xf32>, %w: tensor<3x6xf32>, %v: tensor<6x3xf32>) -> tensor<2x3xf32> {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xf32>) -> tensor<8x3xf32>
  %h = stablehlo.dot_general %g, %w, contracting_dims = [1] x [0] : (tensor<8x3xf32>, tensor<3x6xf32>) -> tensor<8x6xf32>
  %t = stablehlo.tanh %h : tensor<8x6xf32>
  %p = stablehlo.dot_general %t, %v, contracting_dims = [1] x [0] : (tensor<8x6xf32>, tensor<6x3xf32>) -> tensor<8x3xf32>
  %y = "stablehlo.reduce_scatter"(%p) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {scatter_dimension = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xf32>) -> tensor<2x3xf32>
  return %y : tensor<2x3xf32>
}
}

// -----

// The dimension that is multiplied over: a sum over the blocks, in f32.
// CHECK-LABEL: func.func @contracted
// ONE: %[[P0:.+]] = stablehlo.dot_general %{{.+}}, %{{.+}}, contracting_dims = [1] x [0] : (tensor<5x2xbf16>, tensor<2x3xbf16>) -> tensor<5x3xf32>
// ONE: %[[P1:.+]] = stablehlo.dot_general
// ONE-NEXT: %[[SUM:.+]] = stablehlo.add %[[P0]], %[[P1]] : tensor<5x3xf32>
// ONE: stablehlo.convert %[[SUM]] : (tensor<5x3xf32>) -> tensor<5x3xbf16>
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @contracted(%a: tensor<5x4xbf16>, %w: tensor<2x3xbf16>) -> tensor<5x3xbf16> {
  %g = "stablehlo.all_gather"(%w) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids} : (tensor<2x3xbf16>) -> tensor<4x3xbf16>
  %y = stablehlo.dot_general %a, %g, contracting_dims = [1] x [0] : (tensor<5x4xbf16>, tensor<4x3xbf16>) -> tensor<5x3xbf16>
  return %y : tensor<5x3xbf16>
}
}

// -----

// Tokens go straight to their experts, and what is made of them straight back: a near device's
// first, the device's own last, when nothing is left on its way.
// SAID: note: collective-matmul: all_to_all and all_to_all became a ring of 4, in one direction, beside 2 products
// CHECK-LABEL: func.func @experts
// CHECK-SAME: (%[[X:.+]]: tensor<4x2x3xf32>, %[[W:.+]]: tensor<1x3x5xf32>, %[[V:.+]]: tensor<1x5x3xf32>)
// CHECK-NOT: stablehlo.all_to_all
// ONE: stablehlo.constant dense<[0, 1, 2, 3]>
// ONE: %[[OWN:.+]] = stablehlo.dynamic_slice %[[X]]
// ONE: stablehlo.constant dense<[1, 2, 3, 0]>
// ONE: %[[X1:.+]] = stablehlo.dynamic_slice %[[X]], %{{.+}}, sizes = [1, 2, 3]
// ONE-NEXT: %[[T1:.+]] = "stablehlo.collective_permute"(%[[X1]])
// ONE-SAME: source_target_pairs = dense<{{\[\[}}0, 1], [1, 2], [2, 3], [3, 0]]>
// ONE: stablehlo.constant dense<[3, 0, 1, 2]>
// ONE: %[[T3:.+]] = "stablehlo.collective_permute"
// ONE-SAME: source_target_pairs = dense<{{\[\[}}0, 3], [1, 0], [2, 1], [3, 2]]>
// ONE-NEXT: %[[H1:.+]] = stablehlo.dot_general %[[T1]], %[[W]]
// ONE-NEXT: %[[A1:.+]] = stablehlo.tanh %[[H1]] : tensor<1x2x5xf32>
// ONE-NEXT: %[[P1:.+]] = stablehlo.dot_general %[[A1]], %[[V]]
// ONE-NEXT: %[[R1:.+]] = "stablehlo.collective_permute"(%[[P1]])
// ONE-SAME: source_target_pairs = dense<{{\[\[}}0, 3], [1, 0], [2, 1], [3, 2]]>
// ONE: stablehlo.dot_general %[[T3]], %[[W]]
// ONE: %[[HOWN:.+]] = stablehlo.dot_general %[[OWN]], %[[W]]
// ONE: %[[POWN:.+]] = stablehlo.dot_general %{{.+}}, %[[V]]
// ONE-COUNT-4: stablehlo.dynamic_update_slice
// BOTH-COUNT-6: stablehlo.collective_permute
// BOTH-COUNT-4: stablehlo.dynamic_update_slice
// CHECK: return %{{.+}} : tensor<4x2x3xf32>
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @experts(%x: tensor<4x2x3xf32>, %w: tensor<1x3x5xf32>, %v: tensor<1x5x3xf32>) -> tensor<4x2x3xf32> {
  %t = "stablehlo.all_to_all"(%x) {split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 4 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<4x2x3xf32>) -> tensor<1x8x3xf32>
  %h = stablehlo.dot_general %t, %w, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<1x8x3xf32>, tensor<1x3x5xf32>) -> tensor<1x8x5xf32>
  %a = stablehlo.tanh %h : tensor<1x8x5xf32>
  %p = stablehlo.dot_general %a, %v, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<1x8x5xf32>, tensor<1x5x3xf32>) -> tensor<1x8x3xf32>
  %y = "stablehlo.all_to_all"(%p) {split_dimension = 1 : i64, concat_dimension = 0 : i64, split_count = 4 : i64, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<1x8x3xf32>) -> tensor<4x2x3xf32>
  return %y : tensor<4x2x3xf32>
}
}
