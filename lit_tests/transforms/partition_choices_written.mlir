// What is written is what was chosen, and what ops really take.
// RUN: stablehlo-tools opt %s -p 'partition{hardware=h100}' --split-input-file | filecheck %s --enable-var-scope --check-prefixes=CHECK,GPU
// RUN: stablehlo-tools opt %s -p 'partition{hardware=tpu-v5e}' --split-input-file | filecheck %s --enable-var-scope --check-prefixes=CHECK,TPU
// RUN: stablehlo-tools opt %s -p partition --split-input-file | filecheck %s --enable-var-scope --check-prefixes=CHECK,ANY

// Indices are gathered once, and what is computed of them is computed whole, beside constants that
// propagation had divided.
sdy.mesh @mesh = <["data"=8]>
// CHECK-LABEL: func.func @indices
// CHECK: %[[ALL:.+]] = "stablehlo.all_gather"({{.*}}-> tensor<65536xi32>
// CHECK: stablehlo.compare LT, %[[ALL]], {{.*}} -> tensor<65536xi1>
// CHECK: stablehlo.add %[[ALL]], %{{.+}} : tensor<65536xi32>
// CHECK-NOT: stablehlo.all_gather
// CHECK: sdy.return
func.func @indices(
    %table: tensor<1000000x128xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
    %ids: tensor<65536xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}]>}
) -> (tensor<65536x128xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}, tensor<65536xi32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}) {
  %none = stablehlo.constant dense<0> : tensor<i32>
  %size = stablehlo.constant dense<1000000> : tensor<i32>
  %0 = stablehlo.broadcast_in_dim %none, dims = [] : (tensor<i32>) -> tensor<65536xi32>
  %1 = stablehlo.compare LT, %ids, %0, SIGNED : (tensor<65536xi32>, tensor<65536xi32>) -> tensor<65536xi1>
  %2 = stablehlo.broadcast_in_dim %size, dims = [] : (tensor<i32>) -> tensor<65536xi32>
  %3 = stablehlo.add %ids, %2 : tensor<65536xi32>
  %4 = stablehlo.select %1, %3, %ids : tensor<65536xi1>, tensor<65536xi32>
  %5 = stablehlo.broadcast_in_dim %4, dims = [0] : (tensor<65536xi32>) -> tensor<65536x1xi32>
  %6 = "stablehlo.gather"(%table, %5) <{dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, indices_are_sorted = false, slice_sizes = array<i64: 1, 128>}> : (tensor<1000000x128xf32>, tensor<65536x1xi32>) -> tensor<65536x128xf32>
  return %6, %ids : tensor<65536x128xf32>, tensor<65536xi32>
}

// -----

// A constraint that neither side takes: nothing is gathered for it.
sdy.mesh @mesh = <["data"=4, "model"=2]>
// CHECK-LABEL: func.func @constraint_between
// CHECK: manual_axes={"data", "model"} (%[[X:.+]]: tensor<8x4096xf32>) {
// CHECK-NEXT: %[[TANH:.+]] = stablehlo.tanh %[[X]]
// CHECK-NEXT: %[[ABS:.+]] = stablehlo.abs %[[TANH]]
// CHECK-NEXT: sdy.return %[[ABS]]
func.func @constraint_between(
    %x: tensor<64x4096xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data", "model"}, {}]>}
) -> (tensor<64x4096xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data", "model"}, {}]>}) {
  %0 = stablehlo.tanh %x : tensor<64x4096xf32>
  %1 = sdy.sharding_constraint %0 <@mesh, [{"data"}, {}]> : tensor<64x4096xf32>
  %2 = stablehlo.abs %1 : tensor<64x4096xf32>
  return %2 : tensor<64x4096xf32>
}

// -----

// A product of few rows takes as long as its weights are read. An idle axis could divide them, but to
// copy the part out of the weights takes as long: they stay as they are.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @few_rows
// CHECK: manual_axes={"x", "y"}
// CHECK-NEXT: stablehlo.dot_general {{.*}} (tensor<8x16384xbf16>, tensor<16384x16384xbf16>) -> tensor<8x16384xbf16>
// CHECK-NEXT: sdy.return
func.func @few_rows(
    %x: tensor<8x16384xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>},
    %w: tensor<16384x65536xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}
) -> (tensor<8x65536xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}) {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<8x16384xbf16>, tensor<16384x65536xbf16>) -> tensor<8x65536xbf16>
  return %0 : tensor<8x65536xbf16>
}

// -----

// The rows of a scatter whose windows have an indexed dimension of 2: XLA:TPU runs them one by one, so
// each device takes its own, and the sums are added up. On a GPU the updates are gathered.
sdy.mesh @mesh = <["data"=8]>
// CHECK-LABEL: func.func @rows
// GPU: "stablehlo.scatter"
// GPU: (tensor<8192x1024xf32>, tensor<4096x2xi32>, tensor<4096x2x1024xf32>)
// TPU: "stablehlo.scatter"
// TPU: (tensor<8192x1024xf32>, tensor<512x2xi32>, tensor<512x2x1024xf32>)
// ANY: "stablehlo.scatter"
// ANY: (tensor<8192x1024xf32>, tensor<512x2xi32>, tensor<512x2x1024xf32>)
func.func @rows(
    %table: tensor<8192x1024xf32>,
    %ids: tensor<4096x2xi32>,
    %updates: tensor<4096x2x1024xf32>
) -> tensor<8192x1024xf32> {
  %0 = "stablehlo.scatter"(%table, %ids, %updates) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1, 2], scatter_dims_to_operand_dims = [0, 1], index_vector_dim = 1>}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %1 = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }) : (tensor<8192x1024xf32>, tensor<4096x2xi32>, tensor<4096x2x1024xf32>) -> tensor<8192x1024xf32>
  return %0 : tensor<8192x1024xf32>
}
