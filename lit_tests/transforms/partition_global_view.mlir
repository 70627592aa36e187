// RUN: stablehlo-tools opt %s -p partition --split-input-file | filecheck %s --enable-var-scope

// Shardy's own constants.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @constant
// CHECK: manual_axes={{.+}} (%[[X:.+]]: tensor<2xf32>) {
// CHECK-NEXT: %[[C:.+]] = stablehlo.constant dense<2.000000e+00> : tensor<2xf32>
// CHECK-NEXT: stablehlo.add %[[X]], %[[C]] : tensor<2xf32>
func.func @constant(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<8xf32> {
  %c = sdy.constant dense<2.0> : tensor<8xf32>
  %0 = stablehlo.add %x, %c : tensor<8xf32>
  return %0 : tensor<8xf32>
}

// -----

// Notes of the propagation, on an op of a function that is called and on a result.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @propagation_edges
// CHECK: stablehlo.multiply %{{.+}} : tensor<2xf32>
// CHECK-NOT: propagation_edges
func.func @propagation_edges(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x", ?}]>, sdy.sharding_origins = {x = "input: 0"}})
    -> (tensor<8xf32> {sdy.propagation_edges = #sdy.propagation_edges<[{step-2 = [{"x" = operand-0 -> [result-0]}]}]>}) {
  %0 = call @callee(%x) : (tensor<8xf32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}
func.func private @callee(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.multiply %x, %x {
    sdy.propagation_edges = #sdy.propagation_edges<[{step-1 = [{"x" = operand-0 -> [result-0]}]}]>,
    sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x", ?}]>]>
  } : tensor<8xf32>
  return %0 : tensor<8xf32>
}

// -----

// Edges of the data flow, in a named computation, at a call and at a function's argument.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @edges
// CHECK: manual_axes={{.+}} (%[[X:.+]]: tensor<2xf32>) {
// CHECK-NEXT: %[[ONE:.+]] = stablehlo.abs %[[X]] : tensor<2xf32>
// CHECK-NEXT: %[[TWO:.+]] = stablehlo.negate %[[ONE]] : tensor<2xf32>
// CHECK-NEXT: sdy.return %[[TWO]]
func.func @edges(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = sdy.named_computation<"name">(%x) (%a: tensor<8xf32>) {
    %2 = sdy.data_flow_edge %a : tensor<8xf32>
    %3 = stablehlo.abs %2 : tensor<8xf32>
    sdy.return %3 : tensor<8xf32>
  } : (tensor<8xf32>) -> tensor<8xf32>
  %1 = sdy.data_flow_edge %0 sharding=<@mesh, [{"x"}]> : tensor<8xf32>
  %4 = call @callee(%1) : (tensor<8xf32>) -> tensor<8xf32>
  %5 = sdy.func_data_flow_edge %4 : tensor<8xf32>
  return %5 : tensor<8xf32>
}
func.func private @callee(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = sdy.func_data_flow_edge %x {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>]>} : tensor<8xf32>
  %1 = stablehlo.negate %0 : tensor<8xf32>
  return %1 : tensor<8xf32>
}

// -----

// A barrier stops the propagation: the result is whole.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @barrier
// CHECK: out_shardings=[<@mesh, [{}]>]
// CHECK: stablehlo.all_gather
func.func @barrier(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<8xf32> {
  %0 = stablehlo.abs %x : tensor<8xf32>
  %1 = sdy.propagation_barrier %0 allowed_direction=BACKWARD : tensor<8xf32>
  %2 = stablehlo.negate %1 : tensor<8xf32>
  return %2 : tensor<8xf32>
}

// -----

// And lets it pass in the other direction.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @barrier_forward
// CHECK: out_shardings=[<@mesh, [{"x"}]>]
// CHECK: stablehlo.negate %{{.+}} : tensor<2xf32>
// CHECK-NOT: all_gather
func.func @barrier_forward(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<8xf32> {
  %0 = stablehlo.abs %x : tensor<8xf32>
  %1 = sdy.propagation_barrier %0 allowed_direction=FORWARD : tensor<8xf32>
  %2 = stablehlo.negate %1 : tensor<8xf32>
  return %2 : tensor<8xf32>
}

// -----

// Collectives that Shardy has inserted move data; they are made anew, where they still are needed.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @moves
// CHECK: manual_axes={{.+}} (%[[X:.+]]: tensor<2x8xf32>) {
// CHECK-NEXT: %[[ABS:.+]] = stablehlo.abs %[[X]] : tensor<2x8xf32>
// CHECK-NEXT: "stablehlo.all_to_all"(%[[ABS]])
// CHECK-NOT: sdy.all
// CHECK: sdy.return %{{.+}} : tensor<8x2xf32>
func.func @moves(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>})
    -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}) {
  %0 = sdy.all_to_all [{"x"}: 0->1] %x out_sharding=<@mesh, [{}, {"x"}]> : tensor<8x8xf32>
  %1 = sdy.all_slice [{"y"}, {}] %0 out_sharding=<@mesh, [{"y"}, {"x"}]> : tensor<8x8xf32>
  %2 = sdy.collective_permute %1 out_sharding=<@mesh, [{"x":(1)2}, {"x":(2)2, "y"}]> : tensor<8x8xf32>
  %3 = sdy.all_gather [{}, {"y"}] %2 out_sharding=<@mesh, [{"x":(1)2}, {"x":(2)2}]> : tensor<8x8xf32>
  %4 = stablehlo.abs %3 {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x":(1)2}, {"x":(2)2}]>]>} : tensor<8x8xf32>
  %5 = sdy.all_gather [{"x":(1)2}, {"x":(2)2}] %4 out_sharding=<@mesh, [{}, {}]> : tensor<8x8xf32>
  %6 = sdy.all_slice [{}, {"x"}] %5 out_sharding=<@mesh, [{}, {"x"}]> : tensor<8x8xf32>
  return %6 : tensor<8x8xf32>
}

// -----

// An all_reduce that completes a contraction is made anew, once; so are two that do together.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @completes_a_sum
// CHECK: %[[DOT:.+]] = stablehlo.dot_general %{{.+}} : (tensor<8x1xf32>, tensor<1x8xf32>) -> tensor<8x8xf32>
// CHECK-NEXT: "stablehlo.all_reduce"(%[[DOT]])
// CHECK-NOT: stablehlo.all_reduce
// CHECK-NOT: stablehlo.multiply
func.func @completes_a_sum(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x", "y"}]>},
                           %w: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x", "y"}, {}]>}) -> tensor<8x8xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}, {}]>]>} : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %1 = sdy.all_reduce {"x"} %0 out_sharding=<@mesh, [{}, {}]> : tensor<8x8xf32>
  %2 = sdy.all_reduce {"y"} %1 out_sharding=<@mesh, [{}, {}]> : tensor<8x8xf32>
  return %2 : tensor<8x8xf32>
}

// -----

// A reduce_scatter likewise.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @completes_a_sum_in_parts
// CHECK: "stablehlo.reduce_scatter"
// CHECK-NOT: stablehlo.multiply
// CHECK-NOT: stablehlo.dynamic_slice
// CHECK: sdy.return %{{.+}} : tensor<2x8xf32>
func.func @completes_a_sum_in_parts(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>},
                           %w: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>})
    -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}, {}]>]>} : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %1 = sdy.reduce_scatter [{"x"}, {}] %0 out_sharding=<@mesh, [{"x"}, {}]> : tensor<8x8xf32>
  return %1 : tensor<8x8xf32>
}

// -----

// What all devices hold alike, summed over four, is four times that; its maximum is itself.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @sums_equal_values
// CHECK: manual_axes={{.+}} (%[[X:.+]]: tensor<4xf32>) {
// CHECK-NEXT: %[[FOUR:.+]] = stablehlo.constant dense<4.000000e+00> : tensor<4xf32>
// CHECK-NEXT: %[[SUM:.+]] = stablehlo.multiply %[[X]], %[[FOUR]] : tensor<4xf32>
// CHECK-NEXT: sdy.return %[[SUM]], %[[X]]
func.func @sums_equal_values(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}]>})
    -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}]>}, tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}]>}) {
  %0 = sdy.all_reduce {"x"} %x out_sharding=<@mesh, [{"y"}]> : tensor<8xf32>
  %1 = sdy.all_reduce max {"x"} %x out_sharding=<@mesh, [{"y"}]> : tensor<8xf32>
  return %0, %1 : tensor<8xf32>, tensor<8xf32>
}
