// RUN: stablehlo-tools opt %s -p break-permute-cycles --split-input-file | tee %t.once.mlir | filecheck %s --enable-var-scope
// RUN: stablehlo-tools opt %s -p 'break-permute-cycles{explain}' --split-input-file 2>&1 >%t.explained.mlir | filecheck %s --check-prefix=EXPLAINED
// RUN: diff %t.once.mlir %t.explained.mlir

// A second run changes nothing.
// RUN: stablehlo-tools opt %s -p break-permute-cycles,break-permute-cycles --split-input-file | diff %t.once.mlir -

// EXPLAINED: note: collective_permute with the cycle 0>1>2>3>0 is broken: 3>0 in a permute of its own
// EXPLAINED: note: collective_permute with the cycle 0>3>2>1>0 is broken: 0>3 in a permute of its own
// EXPLAINED: note: collective_permute with the cycle 0>1>2>3>0 is broken: 3>0 in a permute of its own
// EXPLAINED: note: collective_permute with the cycles 0>2>4>6>0, 1>3>5>7>1 is broken: 6>0, 7>1 in a permute of its own
// EXPLAINED: note: collective_permute with the cycles 0>1>0, 2>3>2, 4>5>4, 6>7>6 is broken: 1>0, 3>2, 5>4, 7>6 in a permute of its own
// EXPLAINED: note: collective_permute with the cycles 1>6>1, 5>5 is broken: 6>1 in a permute of its own
// EXPLAINED: note: collective_permute with the cycles 2>2, 3>3 is broken: these devices keep their operand
// EXPLAINED: note: collective_permute with the cycles 0>0, 1>1, 2>2, 3>3, 4 more is broken: these devices keep their operand

// A ring: the edge that closes it goes in front, on a channel of its own.
// CHECK-LABEL: module @ring
// CHECK: (%[[X:.+]]: tensor<4xf32>)
// CHECK-NEXT: %[[BACK:.+]] = "stablehlo.collective_permute"(%[[X]]) <{channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, source_target_pairs = dense<{{\[\[}}3, 0]]> : tensor<1x2xi64>}> {mhlo.frontend_attributes = {kept = "yes"}}
// CHECK-NEXT: %[[FORWARD:.+]] = "stablehlo.collective_permute"(%[[X]]) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<{{\[\[}}0, 1], [1, 2], [2, 3]]> : tensor<3x2xi64>}> {mhlo.frontend_attributes = {kept = "yes"}}
// CHECK-NEXT: %[[ID:.+]] = stablehlo.partition_id
// CHECK-NEXT: %[[FIRST:.+]] = stablehlo.constant dense<0> : tensor<ui32>
// CHECK-NEXT: %[[RECEIVES:.+]] = stablehlo.compare EQ, %[[ID]], %[[FIRST]]
// CHECK-NEXT: %[[Y:.+]] = stablehlo.select %[[RECEIVES]], %[[BACK]], %[[FORWARD]]
// CHECK-NEXT: return %[[Y]]
module @ring attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>) {
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2], [2, 3], [3, 0]]> : tensor<4x2xi64>, mhlo.frontend_attributes = {kept = "yes"}} : (tensor<4xf32>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}
}

// -----

// The other way round, it is the edge to the last device.
// CHECK-LABEL: module @backward_ring
// CHECK: source_target_pairs = dense<{{\[\[}}0, 3]]>
// CHECK-NEXT: source_target_pairs = dense<{{\[\[}}1, 0], [2, 1], [3, 2]]>
// CHECK-NEXT: stablehlo.partition_id
// CHECK-NEXT: stablehlo.constant dense<3> : tensor<ui32>
// CHECK-NEXT: stablehlo.compare EQ
module @backward_ring attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>) {
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 3], [1, 0], [2, 1], [3, 2]]> : tensor<4x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}
}

// -----

// Without a channel, pairs count replicas; neither half gets one.
// CHECK-LABEL: module @replicas
// CHECK-NOT: channel_handle
// CHECK: source_target_pairs = dense<{{\[\[}}3, 0]]>
// CHECK-NOT: channel_handle
// CHECK: stablehlo.replica_id
module @replicas attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 4 : i32} {
func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>) {
  %y = "stablehlo.collective_permute"(%x) {source_target_pairs = dense<[[0, 1], [1, 2], [2, 3], [3, 0]]> : tensor<4x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}
}

// -----

// Of several cycles one edge each, in one permute: here to the first devices of all.
// CHECK-LABEL: module @two_rings
// CHECK: source_target_pairs = dense<{{\[\[}}6, 0], [7, 1]]>
// CHECK-NEXT: source_target_pairs = dense<{{\[\[}}0, 2], [2, 4], [4, 6], [1, 3], [3, 5], [5, 7]]>
// CHECK-NEXT: %[[ID:.+]] = stablehlo.partition_id
// CHECK-NEXT: %[[TWO:.+]] = stablehlo.constant dense<2> : tensor<ui32>
// CHECK-NEXT: stablehlo.compare LT, %[[ID]], %[[TWO]]
module @two_rings attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>) {
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 2], [2, 4], [4, 6], [6, 0], [1, 3], [3, 5], [5, 7], [7, 1]]> : tensor<8x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}
}

// -----

// Scattered targets are looked up; all ids behind the table take its last entry.
// CHECK-LABEL: module @neighbours_swap
// CHECK: source_target_pairs = dense<{{\[\[}}1, 0], [3, 2], [5, 4], [7, 6]]>
// CHECK-NEXT: source_target_pairs = dense<{{\[\[}}0, 1], [2, 3], [4, 5], [6, 7]]>
// CHECK-NEXT: %[[ID:.+]] = stablehlo.partition_id
// CHECK-NEXT: %[[TABLE:.+]] = stablehlo.constant dense<[true, false, true, false, true, false, true, false]> : tensor<8xi1>
// CHECK-NEXT: %[[ROW:.+]] = stablehlo.dynamic_slice %[[TABLE]], %[[ID]], sizes = [1]
// CHECK-NEXT: %[[RECEIVES:.+]] = stablehlo.reshape %[[ROW]]
// CHECK-NEXT: stablehlo.select %[[RECEIVES]]
module @neighbours_swap attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>) {
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0], [2, 3], [3, 2], [4, 5], [5, 4], [6, 7], [7, 6]]> : tensor<8x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}
}

// -----

// A chain stays with the forward edges; who sends to itself keeps its operand, by another select.
// CHECK-LABEL: module @chain_cycle_and_own
// CHECK: (%[[X:.+]]: tensor<4xf32>)
// CHECK-NEXT: %[[BACK:.+]] = "stablehlo.collective_permute"{{.+}} source_target_pairs = dense<{{\[\[}}6, 1]]>
// CHECK-NEXT: %[[FORWARD:.+]] = "stablehlo.collective_permute"{{.+}} source_target_pairs = dense<{{\[\[}}2, 0], [1, 6], [0, 4]]>
// CHECK: %[[OTHERS:.+]] = stablehlo.select %{{.+}}, %[[BACK]], %[[FORWARD]]
// CHECK: %[[FIVE:.+]] = stablehlo.constant dense<5> : tensor<ui32>
// CHECK-NEXT: %[[KEEPS:.+]] = stablehlo.compare EQ, %{{.+}}, %[[FIVE]]
// CHECK-NEXT: stablehlo.select %[[KEEPS]], %[[X]], %[[OTHERS]]
module @chain_cycle_and_own attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>) {
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[5, 5], [2, 0], [1, 6], [6, 1], [0, 4]]> : tensor<5x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}
}

// -----

// Where nobody sends to another, the others get zeros; where all send to themselves, nothing is left.
// CHECK-LABEL: module @own
// CHECK-NOT: collective_permute
// CHECK: %[[ZEROS:.+]] = stablehlo.constant dense<(0.000000e+00,0.000000e+00)> : tensor<4xcomplex<f32>>
// CHECK: %[[KEEPS:.+]] = stablehlo.select %{{.+}}, %{{.+}}, %[[ZEROS]]
// CHECK-NEXT: return %[[KEEPS]], %{{.*}}arg0
module @own attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4xcomplex<f32>>) -> (tensor<4xcomplex<f32>>, tensor<4xcomplex<f32>>) {
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[2, 2], [3, 3]]> : tensor<2x2xi64>} : (tensor<4xcomplex<f32>>) -> tensor<4xcomplex<f32>>
  %z = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 0], [1, 1], [2, 2], [3, 3], [4, 4], [5, 5], [6, 6], [7, 7]]> : tensor<8x2xi64>} : (tensor<4xcomplex<f32>>) -> tensor<4xcomplex<f32>>
  return %y, %z : tensor<4xcomplex<f32>>, tensor<4xcomplex<f32>>
}
}

// -----

// In a loop, a branch and a called function, also where a dimension is symbolic.
// CHECK-LABEL: module @nested
// CHECK: func.func private @swap
// CHECK-COUNT-2: "stablehlo.collective_permute"(%{{.+}}) {{.+}} : (tensor<?xf32>) -> tensor<?xf32>
// CHECK: stablehlo.select %{{.+}} : tensor<i1>, tensor<?xf32>
// CHECK: func.func @main
// CHECK: stablehlo.while
// CHECK: "stablehlo.if"
// CHECK-COUNT-2: "stablehlo.collective_permute"
// CHECK: stablehlo.select
// CHECK: stablehlo.return
module @nested attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func private @swap(%x: tensor<?xf32>) -> tensor<?xf32> {
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>} : (tensor<?xf32>) -> tensor<?xf32>
  return %y : tensor<?xf32>
}
func.func @main(%x: tensor<4xf32>, %h: tensor<?xf32>, %p: tensor<i1>) -> (tensor<4xf32>, tensor<?xf32>) {
  %w = stablehlo.while(%i = %x) : tensor<4xf32>
  cond {
    stablehlo.return %p : tensor<i1>
  } do {
    %r = "stablehlo.if"(%p) ({
      %y = "stablehlo.collective_permute"(%i) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
      stablehlo.return %y : tensor<4xf32>
    }, {
      stablehlo.return %i : tensor<4xf32>
    }) : (tensor<i1>) -> tensor<4xf32>
    stablehlo.return %r : tensor<4xf32>
  }
  %g = call @swap(%h) : (tensor<?xf32>) -> tensor<?xf32>
  return %w, %g : tensor<4xf32>, tensor<?xf32>
}
}

// -----

// With a mesh axis left free, as jax exports a shard_map over some axes: the id is a scalar only in
// a manual computation over the others.
// CHECK-LABEL: module @partly_manual
// CHECK: sdy.manual_computation(%{{.+}}) {{.+}} manual_axes={"stage"}
// CHECK: source_target_pairs = dense<{{\[\[}}6, 0], [7, 1]]>
// CHECK: %[[RECEIVES:.+]] = sdy.manual_computation() in_shardings=[] out_shardings=[<@mesh, []>] manual_axes={"data"} () {
// CHECK-NEXT: stablehlo.partition_id
// CHECK: sdy.return %{{.+}} : tensor<i1>
// CHECK: stablehlo.select %[[RECEIVES]]
module @partly_manual attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["stage"=4, "data"=2]>
func.func @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %r = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"stage", ?}, {?}]>] out_shardings=[<@mesh, [{"stage", ?}, {?}]>] manual_axes={"stage"} (%a: tensor<2x4xf32>) {
    %y = "stablehlo.collective_permute"(%a) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 2], [2, 4], [4, 6], [6, 0], [1, 3], [3, 5], [5, 7], [7, 1]]> : tensor<8x2xi64>} : (tensor<2x4xf32>) -> tensor<2x4xf32>
    sdy.return %y : tensor<2x4xf32>
  } : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %r : tensor<8x4xf32>
}
}
