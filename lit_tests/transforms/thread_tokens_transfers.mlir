// RUN: stablehlo-tools opt %s -p thread-tokens --split-input-file | tee %t.once | filecheck %s --enable-var-scope

// The chain is exact here too: taken out again it leaves what there was, put in twice it is one.
// RUN: stablehlo-tools opt %s --split-input-file > %t.before
// RUN: stablehlo-tools opt %t.once -p thread-tokens --split-input-file | diff -u %t.once -
// RUN: stablehlo-tools opt %t.once -p strip-tokens --split-input-file | diff -u %t.before -
// RUN: stablehlo-tools opt %s -p 'thread-tokens{scope=group minimal},strip-tokens' --split-input-file \
// RUN:   | diff -u %t.before -

// The recv and the send of one acyclic transfer are one step: the chain's token enters both, and
// what comes next comes after both.
// CHECK-LABEL: func.func @one_transfer
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>)
// CHECK-NEXT: %[[TOKEN:.+]] = stablehlo.after_all : !stablehlo.token
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[JOIN:.+]] = stablehlo.after_all %[[TOKEN]], %[[ROOT]] {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[RECV:.+]]:2 = "stablehlo.recv"(%[[JOIN]])
// CHECK-NEXT: %[[JOIN2:.+]] = stablehlo.after_all %[[TOKEN]], %[[ROOT]] {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[SEND:.+]] = "stablehlo.send"(%[[X]], %[[JOIN2]])
// CHECK-NEXT: %[[AFTER:.+]] = stablehlo.after_all %[[RECV]]#1, %[[SEND]], %[[ROOT]] {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[OUT:.+]] = stablehlo.after_all %[[RECV]]#1, %[[SEND]] :
// CHECK-NEXT: %[[JOIN3:.+]] = stablehlo.after_all %[[OUT]], %[[AFTER]] {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[SEND2:.+]] = "stablehlo.send"(%[[RECV]]#0, %[[JOIN3]])
// CHECK-NEXT: %[[JOIN4:.+]] = stablehlo.after_all %[[OUT]], %[[AFTER]] {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[RECV2:.+]]:2 = "stablehlo.recv"(%[[JOIN4]])
// CHECK-NEXT: %[[AFTER2:.+]] = stablehlo.after_all %[[SEND2]], %[[RECV2]]#1, %[[AFTER]] {stablehlo_tools.token_link} :
// CHECK-NEXT: return %[[RECV2]]#0 :
func.func @one_transfer(%x: tensor<2xf32>) -> tensor<2xf32> {
  %t = stablehlo.after_all : !stablehlo.token
  %0:2 = "stablehlo.recv"(%t) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>}> : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  %1 = "stablehlo.send"(%x, %t) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>}> : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token
  %2 = stablehlo.after_all %0#1, %1 : !stablehlo.token
  %3 = "stablehlo.send"(%0#0, %2) <{channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, source_target_pairs = dense<[[2, 0]]> : tensor<1x2xi64>}> : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token
  %4:2 = "stablehlo.recv"(%2) <{channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, source_target_pairs = dense<[[2, 0]]> : tensor<1x2xi64>}> : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  return %4#0 : tensor<2xf32>
}

// -----

// Round a ring they would wait for each other in either order; the program's is kept.
// CHECK-LABEL: func.func @a_ring
// CHECK: %[[RECV:.+]]:2 = "stablehlo.recv"
// CHECK-NEXT: %[[AFTER:.+]] = stablehlo.after_all %[[RECV]]#1 {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[JOIN:.+]] = stablehlo.after_all %{{.+}}, %[[AFTER]] {stablehlo_tools.token_link} :
// CHECK-NEXT: "stablehlo.send"(%{{.+}}, %[[JOIN]])
func.func @a_ring(%x: tensor<2xf32>) -> tensor<2xf32> {
  %t = stablehlo.after_all : !stablehlo.token
  %0:2 = "stablehlo.recv"(%t) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>}> : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  %1 = "stablehlo.send"(%x, %t) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>}> : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token
  return %0#0 : tensor<2xf32>
}

// -----

// The devices that meet are others.
// CHECK-LABEL: func.func @other_pairs
// CHECK: %[[RECV:.+]]:2 = "stablehlo.recv"
// CHECK-NEXT: %[[AFTER:.+]] = stablehlo.after_all %[[RECV]]#1 {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[JOIN:.+]] = stablehlo.after_all %{{.+}}, %[[AFTER]] {stablehlo_tools.token_link} :
// CHECK-NEXT: "stablehlo.send"(%{{.+}}, %[[JOIN]])
func.func @other_pairs(%x: tensor<2xf32>) -> tensor<2xf32> {
  %t = stablehlo.after_all : !stablehlo.token
  %0:2 = "stablehlo.recv"(%t) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>}> : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  %1 = "stablehlo.send"(%x, %t) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[1, 2], [2, 0]]> : tensor<2x2xi64>}> : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token
  return %0#0 : tensor<2xf32>
}

// -----

// Two channels are two transfers.
// CHECK-LABEL: func.func @other_channel
// CHECK: %[[RECV:.+]]:2 = "stablehlo.recv"
// CHECK-NEXT: %[[AFTER:.+]] = stablehlo.after_all %[[RECV]]#1 {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[JOIN:.+]] = stablehlo.after_all %{{.+}}, %[[AFTER]] {stablehlo_tools.token_link} :
// CHECK-NEXT: "stablehlo.send"(%{{.+}}, %[[JOIN]])
func.func @other_channel(%x: tensor<2xf32>) -> tensor<2xf32> {
  %t = stablehlo.after_all : !stablehlo.token
  %0:2 = "stablehlo.recv"(%t) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>}> : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  %1 = "stablehlo.send"(%x, %t) <{channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>}> : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token
  return %0#0 : tensor<2xf32>
}

// -----

// What the program has ordered stays ordered.
// CHECK-LABEL: func.func @ordered_by_the_program
// CHECK: %[[RECV:.+]]:2 = "stablehlo.recv"
// CHECK-NEXT: %[[AFTER:.+]] = stablehlo.after_all %[[RECV]]#1 {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[JOIN:.+]] = stablehlo.after_all %{{.+}}, %[[AFTER]] {stablehlo_tools.token_link} :
// CHECK-NEXT: "stablehlo.send"(%{{.+}}, %[[JOIN]])
func.func @ordered_by_the_program(%x: tensor<2xf32>) -> tensor<2xf32> {
  %t = stablehlo.after_all : !stablehlo.token
  %0:2 = "stablehlo.recv"(%t) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>}> : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  %1 = "stablehlo.send"(%x, %0#1) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>}> : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token
  return %0#0 : tensor<2xf32>
}

// -----

// A token of its own may come after anything.
// CHECK-LABEL: func.func @other_token
// CHECK: %[[RECV:.+]]:2 = "stablehlo.recv"
// CHECK-NEXT: %[[AFTER:.+]] = stablehlo.after_all %[[RECV]]#1 {stablehlo_tools.token_link} :
// CHECK-NEXT: %[[JOIN:.+]] = stablehlo.after_all %{{.+}}, %[[AFTER]] {stablehlo_tools.token_link} :
// CHECK-NEXT: "stablehlo.send"(%{{.+}}, %[[JOIN]])
func.func @other_token(%x: tensor<2xf32>) -> tensor<2xf32> {
  %t = stablehlo.after_all : !stablehlo.token
  %u = stablehlo.after_all %t : !stablehlo.token
  %0:2 = "stablehlo.recv"(%t) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>}> : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  %1 = "stablehlo.send"(%x, %u) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>}> : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token
  return %0#0 : tensor<2xf32>
}

// -----

// What stands between the two comes after the one and before the other.
// CHECK-LABEL: func.func @between
// CHECK: %[[RECV:.+]]:2 = "stablehlo.recv"
// CHECK-NEXT: %[[AFTER:.+]] = stablehlo.after_all %[[RECV]]#1 {stablehlo_tools.token_link} :
// CHECK-NEXT: stablehlo.optimization_barrier {stablehlo_tools.token_link} %{{.+}}, %[[AFTER]] :
func.func @between(%x: tensor<2xf32>) -> tensor<2xf32> {
  %t = stablehlo.after_all : !stablehlo.token
  %0:2 = "stablehlo.recv"(%t) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>}> : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  %1 = "stablehlo.collective_permute"(%x) <{source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}> : (tensor<2xf32>) -> tensor<2xf32>
  %2 = "stablehlo.send"(%x, %t) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>}> : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token
  return %1 : tensor<2xf32>
}
