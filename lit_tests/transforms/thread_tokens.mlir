// RUN: stablehlo-tools opt %s -p thread-tokens --split-input-file | filecheck %s --enable-var-scope

// A token enters beside the operand and leaves beside the result.
// CHECK-LABEL: func.func @all_gather
// CHECK-SAME: (%[[X:.+]]: tensor<2x4xf32>) -> tensor<4x4xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[GATHER]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0 :
func.func @all_gather(%x: tensor<2x4xf32>) -> tensor<4x4xf32> {
  %0 = "stablehlo.all_gather"(%x) {
    all_gather_dim = 0 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2x4xf32>) -> tensor<4x4xf32>
  return %0 : tensor<4x4xf32>
}

// -----

// The region of a reduction stays as it is.
// CHECK-LABEL: func.func @all_reduce
// CHECK-SAME: (%[[X:.+]]: tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[REDUCE:.+]] = "stablehlo.all_reduce"(%[[IN]]#0)
// CHECK: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[REDUCE]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0 :
func.func @all_reduce(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %sum = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %sum : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// reduce_scatter takes one operand; the barrier, not the op, takes the token.
// CHECK-LABEL: func.func @reduce_scatter
// CHECK-SAME: (%[[X:.+]]: tensor<4xf32>) -> tensor<2xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[SCATTER:.+]] = "stablehlo.reduce_scatter"(%[[IN]]#0)
// CHECK: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[SCATTER]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0 :
func.func @reduce_scatter(%x: tensor<4xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.reduce_scatter"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %sum = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %sum : tensor<f32>
  }) {
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
    scatter_dimension = 0 : i64
  } : (tensor<4xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

// Operand and result differ in shape: each goes through a barrier of its own type.
// CHECK-LABEL: func.func @all_to_all
// CHECK-SAME: (%[[X:.+]]: tensor<4x2xf32>) -> tensor<2x4xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[EXCHANGE:.+]] = "stablehlo.all_to_all"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[EXCHANGE]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0 :
func.func @all_to_all(%x: tensor<4x2xf32>) -> tensor<2x4xf32> {
  %0 = "stablehlo.all_to_all"(%x) {
    concat_dimension = 1 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
    split_count = 2 : i64,
    split_dimension = 0 : i64
  } : (tensor<4x2xf32>) -> tensor<2x4xf32>
  return %0 : tensor<2x4xf32>
}

// -----

// A permute has pairs where others have groups.
// CHECK-LABEL: func.func @collective_permute
// CHECK-SAME: (%[[X:.+]]: tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0 :
func.func @collective_permute(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// A broadcast sends one way only, and takes its place in the order all the same.
// CHECK-LABEL: func.func @collective_broadcast
// CHECK-SAME: (%[[X:.+]]: tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[BROADCAST:.+]] = "stablehlo.collective_broadcast"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[BROADCAST]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0 :
func.func @collective_broadcast(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = "stablehlo.collective_broadcast"(%x) {
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// All operands of a variadic collective pass one barrier, all results another.
// CHECK-LABEL: func.func @all_reduce_variadic
// CHECK-SAME: (%[[X:.+]]: tensor<4xf32>, %[[Y:.+]]: tensor<2x2xf32>) -> (tensor<2x2xf32>, tensor<4xf32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:3 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[Y]], %[[ROOT]] :
// CHECK-NEXT: %[[REDUCE:.+]]:2 = "stablehlo.all_reduce"(%[[IN]]#0, %[[IN]]#1)
// CHECK: %[[OUT:.+]]:3 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[REDUCE]]#0, %[[REDUCE]]#1, %[[IN]]#2 :
// CHECK-NEXT: return %[[OUT]]#1, %[[OUT]]#0 :
func.func @all_reduce_variadic(
    %x: tensor<4xf32>, %y: tensor<2x2xf32>) -> (tensor<2x2xf32>, tensor<4xf32>) {
  %0:2 = "stablehlo.all_reduce"(%x, %y) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %sum = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %sum : tensor<f32>
  }) {
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<4xf32>, tensor<2x2xf32>) -> (tensor<4xf32>, tensor<2x2xf32>)
  return %0#1, %0#0 : tensor<2x2xf32>, tensor<4xf32>
}

// -----

// The operands of one barrier may differ in element type.
// CHECK-LABEL: func.func @all_gather_variadic
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[Y:.+]]: tensor<2xi8>) -> (tensor<4xf32>, tensor<4xi8>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:3 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[Y]], %[[ROOT]] :
// CHECK-NEXT: %[[GATHER:.+]]:2 = "stablehlo.all_gather"(%[[IN]]#0, %[[IN]]#1)
// CHECK-NEXT: %[[OUT:.+]]:3 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[GATHER]]#0, %[[GATHER]]#1, %[[IN]]#2 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT]]#1 :
func.func @all_gather_variadic(
    %x: tensor<2xf32>, %y: tensor<2xi8>) -> (tensor<4xf32>, tensor<4xi8>) {
  %0:2 = "stablehlo.all_gather"(%x, %y) {
    all_gather_dim = 0 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>, tensor<2xi8>) -> (tensor<4xf32>, tensor<4xi8>)
  return %0#0, %0#1 : tensor<4xf32>, tensor<4xi8>
}

// -----

// As many results leave together as operands entered together.
// CHECK-LABEL: func.func @all_to_all_variadic
// CHECK-SAME: (%[[X:.+]]: tensor<4x2xf32>, %[[Y:.+]]: tensor<4x2xf32>) -> (tensor<2x4xf32>, tensor<2x4xf32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:3 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[Y]], %[[ROOT]] :
// CHECK-NEXT: %[[EXCHANGE:.+]]:2 = "stablehlo.all_to_all"(%[[IN]]#0, %[[IN]]#1)
// CHECK-NEXT: %[[OUT:.+]]:3 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[EXCHANGE]]#0, %[[EXCHANGE]]#1, %[[IN]]#2 :
// CHECK-NEXT: return %[[OUT]]#0, %[[OUT]]#1 :
func.func @all_to_all_variadic(
    %x: tensor<4x2xf32>, %y: tensor<4x2xf32>) -> (tensor<2x4xf32>, tensor<2x4xf32>) {
  %0:2 = "stablehlo.all_to_all"(%x, %y) {
    concat_dimension = 1 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
    split_count = 2 : i64,
    split_dimension = 0 : i64
  } : (tensor<4x2xf32>, tensor<4x2xf32>) -> (tensor<2x4xf32>, tensor<2x4xf32>)
  return %0#0, %0#1 : tensor<2x4xf32>, tensor<2x4xf32>
}

// -----

// Independent collectives: the second waits for the first, whatever the order of their uses.
// CHECK-LABEL: func.func @two_in_program_order
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[Y:.+]]: tensor<4xf32>) -> (tensor<2xf32>, tensor<4xf32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[GATHER]], %[[IN]]#1 :
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[Y]], %[[OUT]]#1 :
// CHECK-NEXT: %[[SCATTER:.+]] = "stablehlo.reduce_scatter"(%[[IN2]]#0)
// CHECK: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[SCATTER]], %[[IN2]]#1 :
// CHECK-NEXT: return %[[OUT2]]#0, %[[OUT]]#0 :
func.func @two_in_program_order(
    %x: tensor<2xf32>, %y: tensor<4xf32>) -> (tensor<2xf32>, tensor<4xf32>) {
  %0 = "stablehlo.all_gather"(%x) {
    all_gather_dim = 0 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<4xf32>
  %1 = "stablehlo.reduce_scatter"(%y) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %sum = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %sum : tensor<f32>
  }) {
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
    scatter_dimension = 0 : i64
  } : (tensor<4xf32>) -> tensor<2xf32>
  return %1, %0 : tensor<2xf32>, tensor<4xf32>
}

// -----

// A result that is used several times is used behind the barrier everywhere, nested regions too.
// CHECK-LABEL: func.func @every_use_behind_the_barrier
// CHECK-SAME: (%[[X:.+]]: tensor<f32>, %[[P:.+]]: tensor<i1>) -> (tensor<f32>, tensor<f32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: %[[IF:.+]] = "stablehlo.if"(%[[P]]) ({
// CHECK-NEXT: stablehlo.return %[[OUT]]#0 :
// CHECK-NEXT: }, {
// CHECK-NEXT: stablehlo.return %[[X]] :
// CHECK-NEXT: })
// CHECK-NEXT: return %[[OUT]]#0, %[[IF]] :
func.func @every_use_behind_the_barrier(
    %x: tensor<f32>, %p: tensor<i1>) -> (tensor<f32>, tensor<f32>) {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  %1 = "stablehlo.if"(%p) ({
    stablehlo.return %0 : tensor<f32>
  }, {
    stablehlo.return %x : tensor<f32>
  }) : (tensor<i1>) -> tensor<f32>
  return %0, %1 : tensor<f32>, tensor<f32>
}

// -----

// Each public function has a chain of its own, and keeps its signature.
// CHECK-LABEL: func.func @first_public
// CHECK-SAME: (%[[X:.+]]: tensor<f32>) -> tensor<f32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0 :
func.func @first_public(%x: tensor<f32>) -> tensor<f32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}

// `public` in words is the same as no visibility at all.
// CHECK-LABEL: func.func public @second_public
// CHECK-SAME: (%[[X:.+]]: tensor<f32>) -> tensor<f32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0 :
func.func public @second_public(%x: tensor<f32>) -> tensor<f32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[1, 0]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}

// -----

// Replica groups by mesh axes are not looked into.
sdy.mesh @mesh = <["x"=2, "y"=2]>
// CHECK-LABEL: func.func @mesh_axes
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>) -> tensor<4xf32>
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[GATHER]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0 :
func.func @mesh_axes(%x: tensor<2xf32>) -> tensor<4xf32> {
  %0 = "stablehlo.all_gather"(%x) {
    all_gather_dim = 0 : i64,
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
    replica_groups = #stablehlo.replica_group_mesh_axes<
      mesh = @mesh, axes = [#stablehlo.axis_ref<name = "y">]>,
    use_global_device_ids
  } : (tensor<2xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// The order of ops that communicate is that of the text, not that of the values between them; ops
// that do not communicate stay free.
// CHECK-LABEL: func.func @silent_ops_stay_free
// CHECK-SAME: (%[[X:.+]]: tensor<f32>, %[[Y:.+]]: tensor<f32>) -> (tensor<f32>, tensor<f32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[PERMUTE:.+]] = "stablehlo.collective_permute"(%[[IN]]#0)
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE]], %[[IN]]#1 :
// CHECK-NEXT: %[[EXPONENTIAL:.+]] = stablehlo.exponential %[[Y]] :
// CHECK-NEXT: %[[IN2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[Y]], %[[OUT]]#1 :
// CHECK-NEXT: %[[PERMUTE2:.+]] = "stablehlo.collective_permute"(%[[IN2]]#0)
// CHECK-NEXT: %[[OUT2:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[PERMUTE2]], %[[IN2]]#1 :
// CHECK-NEXT: %[[ADD:.+]] = stablehlo.add %[[EXPONENTIAL]], %[[OUT2]]#0 :
// CHECK-NEXT: return %[[OUT]]#0, %[[ADD]] :
func.func @silent_ops_stay_free(%x: tensor<f32>, %y: tensor<f32>) -> (tensor<f32>, tensor<f32>) {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  %1 = stablehlo.exponential %y : tensor<f32>
  %2 = "stablehlo.collective_permute"(%y) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<f32>) -> tensor<f32>
  %3 = stablehlo.add %1, %2 : tensor<f32>
  return %0, %3 : tensor<f32>, tensor<f32>
}

// -----

// A token enters before the start of an async pair and leaves behind its done.
// CHECK-LABEL: func.func @async_pair
// CHECK-SAME: (%[[X:.+]]: tensor<2xf32>, %[[Y:.+]]: tensor<f32>) -> (tensor<4xf32>, tensor<f32>)
// CHECK-NEXT: %[[ROOT:.+]] = stablehlo.after_all {stablehlo_tools.token_link}
// CHECK-NEXT: %[[IN:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[X]], %[[ROOT]] :
// CHECK-NEXT: %[[START:.+]] = "stablehlo.async_start"(%[[IN]]#0) ({
// CHECK-NEXT: ^bb0(%[[ARG:.+]]: tensor<2xf32>):
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[ARG]])
// CHECK-NEXT: stablehlo.return %[[GATHER]] :
// CHECK-NEXT: })
// CHECK-NEXT: %[[ADD:.+]] = stablehlo.add %[[Y]], %[[Y]] :
// CHECK-NEXT: %[[DONE:.+]] = "stablehlo.async_done"(%[[START]])
// CHECK-NEXT: %[[OUT:.+]]:2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %[[DONE]], %[[IN]]#1 :
// CHECK-NEXT: return %[[OUT]]#0, %[[ADD]] :
func.func @async_pair(%x: tensor<2xf32>, %y: tensor<f32>) -> (tensor<4xf32>, tensor<f32>) {
  %0 = "stablehlo.async_start"(%x) ({
  ^bb0(%a: tensor<2xf32>):
    %g = "stablehlo.all_gather"(%a) {
      all_gather_dim = 0 : i64,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<4xf32>
    stablehlo.return %g : tensor<4xf32>
  }) : (tensor<2xf32>) -> !stablehlo.future<tensor<4xf32>>
  %between = stablehlo.add %y, %y : tensor<f32>
  %1 = "stablehlo.async_done"(%0) : (!stablehlo.future<tensor<4xf32>>) -> tensor<4xf32>
  return %1, %between : tensor<4xf32>, tensor<f32>
}
