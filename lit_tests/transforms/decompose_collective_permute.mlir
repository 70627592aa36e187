// RUN: stablehlo-tools opt %s -p decompose-collective-permute --split-input-file | tee %t.once.mlir | filecheck %s --enable-var-scope
// RUN: stablehlo-tools opt %s -p 'decompose-collective-permute{explain}' --split-input-file 2>&1 >%t.explained.mlir | filecheck %s --check-prefix=EXPLAINED
// RUN: diff %t.once.mlir %t.explained.mlir

// A second run changes nothing, and the tokens are the program's own.
// RUN: stablehlo-tools opt %s -p decompose-collective-permute,decompose-collective-permute,strip-tokens --split-input-file | diff %t.once.mlir -

// EXPLAINED: note: collective_permute became send and recv on channel 4
// EXPLAINED: note: collective_permute became send and recv on channel 5
// EXPLAINED: note: collective_permute became send and recv on channel 2
// EXPLAINED: note: all_reduce is ordered with the sends: it has devices in common with them

// Both halves of a permute begin after both of the one before; neither waits for the other. Channels
// are new ones, frontend attributes are kept.
// CHECK-LABEL: module @two
// CHECK: (%[[X:.+]]: tensor<4xf32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all : !stablehlo.token
// CHECK-NEXT: %[[A:.+]]:2 = "stablehlo.recv"(%[[ROOT]]) <{channel_handle = #stablehlo.channel_handle<handle = 4, type = 1>, is_host_transfer = false, source_target_pairs = dense<{{\[\[}}0, 1], [1, 2], [2, 3]]> : tensor<3x2xi64>}> {mhlo.frontend_attributes = {kept = "yes"}}
// CHECK-NEXT: %[[SENT:.+]] = "stablehlo.send"(%[[X]], %[[ROOT]]) <{channel_handle = #stablehlo.channel_handle<handle = 4, type = 1>, is_host_transfer = false, source_target_pairs = dense<{{\[\[}}0, 1], [1, 2], [2, 3]]> : tensor<3x2xi64>}> {mhlo.frontend_attributes = {kept = "yes"}}
// CHECK-NEXT: %[[BOTH:.+]] = stablehlo.after_all %[[A]]#1, %[[SENT]]
// CHECK-NEXT: %[[B:.+]]:2 = "stablehlo.recv"(%[[BOTH]]) <{channel_handle = #stablehlo.channel_handle<handle = 5, type = 1>, is_host_transfer = false, source_target_pairs = dense<{{\[\[}}3, 0]]> : tensor<1x2xi64>}> :
// CHECK-NEXT: "stablehlo.send"(%[[X]], %[[BOTH]]) <{channel_handle = #stablehlo.channel_handle<handle = 5, type = 1>
// CHECK-NEXT: stablehlo.after_all
// CHECK-NEXT: return %[[A]]#0, %[[B]]#0
module @two attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %a = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2], [2, 3]]> : tensor<3x2xi64>, mhlo.frontend_attributes = {kept = "yes"}} : (tensor<4xf32>) -> tensor<4xf32>
  %b = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 3, type = 0>, source_target_pairs = dense<[[3, 0]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  return %a, %b : tensor<4xf32>, tensor<4xf32>
}
}

// -----

// The chain goes through a loop, a branch and a called function.
// CHECK-LABEL: module @nested
// CHECK: func.func private @called(%[[DATA:.+]]: tensor<4xf32>, %[[TAKEN:.+]]: !stablehlo.token) -> (tensor<4xf32>, !stablehlo.token)
// CHECK: "stablehlo.recv"(%[[TAKEN]])
// CHECK: func.func @main(%{{.+}}: tensor<4xf32>, %{{.+}}: tensor<i1>) -> tensor<4xf32>
// CHECK: %[[ROOT:.+]] = stablehlo.after_all
// CHECK: "stablehlo.recv"(%[[ROOT]])
// CHECK: %[[BEFORE:.+]] = stablehlo.after_all %{{.+}}, %{{.+}}
// CHECK-NEXT: %[[LOOP:.+]]:2 = stablehlo.while({{.+}}, %[[CARRIED:.+]] = %[[BEFORE]])
// CHECK: do
// CHECK: "stablehlo.if"
// CHECK: call @called(%{{.+}}, %[[CARRIED]])
// CHECK: stablehlo.return %{{.+}}, %[[CARRIED]]
// CHECK: "stablehlo.recv"(%[[LOOP]]#1)
module @nested attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func private @called(%x: tensor<4xf32>) -> tensor<4xf32> {
  %y = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2], [2, 3]]> : tensor<3x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}
func.func @main(%x: tensor<4xf32>, %p: tensor<i1>) -> tensor<4xf32> {
  %a = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2], [2, 3]]> : tensor<3x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  %w = stablehlo.while(%i = %a) : tensor<4xf32>
  cond {
    stablehlo.return %p : tensor<i1>
  } do {
    %r = "stablehlo.if"(%p) ({
      %y = func.call @called(%i) : (tensor<4xf32>) -> tensor<4xf32>
      stablehlo.return %y : tensor<4xf32>
    }, {
      stablehlo.return %i : tensor<4xf32>
    }) : (tensor<i1>) -> tensor<4xf32>
    stablehlo.return %r : tensor<4xf32>
  }
  %b = "stablehlo.collective_permute"(%w) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[3, 2], [2, 1], [1, 0]]> : tensor<3x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  return %b : tensor<4xf32>
}
}

// -----

// What has two devices in common with a permute keeps its place in the chain, between barriers.
// CHECK-LABEL: module @conflict
// CHECK: (%[[X:.+]]: tensor<4xf32>)
// CHECK: %[[BOTH:.+]] = stablehlo.after_all %{{.+}}, %{{.+}}
// CHECK-NEXT: %[[TIED:.+]]:2 = stablehlo.optimization_barrier %[[X]], %[[BOTH]]
// CHECK-NEXT: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[TIED]]#0)
// CHECK: %[[AFTER:.+]]:2 = stablehlo.optimization_barrier %[[SUM]], %[[TIED]]#1
// CHECK-NEXT: return %{{.+}}, %[[AFTER]]#0
module @conflict attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %a = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2], [2, 3]]> : tensor<3x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  %b = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4xf32>) -> tensor<4xf32>
  return %a, %b : tensor<4xf32>, tensor<4xf32>
}
}

// -----

// What stands along another mesh axis has not.
// CHECK-LABEL: module @no_conflict
// CHECK-NOT: stablehlo.optimization_barrier
// CHECK: "stablehlo.all_reduce"(%arg0)
// CHECK-NOT: stablehlo.optimization_barrier
// CHECK-LABEL: module @indirect_conflict
module @no_conflict attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %a = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  %b = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4xf32>) -> tensor<4xf32>
  return %a, %b : tensor<4xf32>, tensor<4xf32>
}
}

// -----

// But it has where a third one links them: here an all_reduce over all, and so the one over rows.
// CHECK: stablehlo.optimization_barrier
// CHECK-NEXT: "stablehlo.all_reduce"
// CHECK: stablehlo.optimization_barrier
// CHECK-NEXT: stablehlo.optimization_barrier
// CHECK-NEXT: "stablehlo.all_reduce"
module @indirect_conflict attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) {
  %a = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  %b = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4xf32>) -> tensor<4xf32>
  %c = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4xf32>) -> tensor<4xf32>
  return %a, %b, %c : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
}
}

// -----

// A ring that was broken, in a manual computation: the edge that closed it goes first.
// CHECK-LABEL: module @manual
// CHECK: sdy.manual_computation(%{{.+}}, %{{.+}}) in_shardings=[<@mesh, [{"x"}]>, <@mesh, []>]
// CHECK: %[[BACK:.+]]:2 = "stablehlo.recv"(%{{.+}}) <{{.+}} source_target_pairs = dense<{{\[\[}}3, 0]]>
// CHECK: %[[FORWARD:.+]]:2 = "stablehlo.recv"(%{{.+}}) <{{.+}} source_target_pairs = dense<{{\[\[}}0, 1], [1, 2], [2, 3]]>
// CHECK: stablehlo.select %{{.+}}, %[[BACK]]#0, %[[FORWARD]]#0
module @manual attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["x"=4]>
func.func @main(%x: tensor<16xf32>) -> tensor<16xf32> {
  %r = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}]>] manual_axes={"x"} (%a: tensor<4xf32>) {
    %b = "stablehlo.collective_permute"(%a) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[3, 0]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
    %f = "stablehlo.collective_permute"(%a) {channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2], [2, 3]]> : tensor<3x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
    %id = stablehlo.partition_id : tensor<ui32>
    %first = stablehlo.constant dense<0> : tensor<ui32>
    %p = stablehlo.compare EQ, %id, %first : (tensor<ui32>, tensor<ui32>) -> tensor<i1>
    %y = stablehlo.select %p, %b, %f : tensor<i1>, tensor<4xf32>
    sdy.return %y : tensor<4xf32>
  } : (tensor<16xf32>) -> tensor<16xf32>
  return %r : tensor<16xf32>
}
}
