// RUN: stablehlo-tools opt %s -p partition --split-input-file --verify-diagnostics

// P1: the shardings can be read. Here one cannot.
// expected-error@+1 {{mhlo.sharding: {devices=[4,2]<=[4]} does not assign a device to each of its 8 tiles (P1)}}
func.func @too_few_devices_p1(%x: tensor<8x4xf32> {mhlo.sharding = "{devices=[4,2]<=[4]}"}) -> tensor<8x4xf32> {
  return %x : tensor<8x4xf32>
}

// -----

// One of another rank, on an op.
func.func @another_rank_p1(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
  // expected-error@+1 {{an mhlo.sharding of 1 dimensions on a value of type tensor<8x4xf32> (P1)}}
  %0 = stablehlo.negate %x {mhlo.sharding = "{devices=[8]<=[8]}"} : tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}

// -----

// A device's part of which it is not said how it is cut out.
func.func @unsaid_part_p1(%x: tensor<8x4xf32>) -> tensor<2x4xf32> {
  // expected-error@+1 {{a device's part of tensor<8x4xf32> is tensor<2x4xf32>, but its sharding over the manual axes divides it into 1 x 1 parts (P1)}}
  %0 = stablehlo.custom_call @SPMDFullToShardShape(%x) {mhlo.sharding = "{devices=[1,1,4]<=[4] last_tile_dims={manual}}"} : (tensor<8x4xf32>) -> tensor<2x4xf32>
  %1 = stablehlo.custom_call @SPMDShardToFullShape(%0) {mhlo.sharding = "{replicated}"} : (tensor<2x4xf32>) -> tensor<2x4xf32>
  return %1 : tensor<2x4xf32>
}

// -----

// A device's part that nothing makes whole.
func.func @never_whole_p1(%x: tensor<8x4xf32> {mhlo.sharding = "{devices=[4,1]<=[4]}"}) -> tensor<2x4xf32> {
  %0 = stablehlo.custom_call @SPMDFullToShardShape(%x) {mhlo.sharding = "{manual}"} : (tensor<8x4xf32>) -> tensor<2x4xf32>
  // expected-error@+1 {{a value of a manual computation leaves it without SPMDShardToFullShape (P1)}}
  return %0 : tensor<2x4xf32>
}

// -----

// A manual computation in a manual one, over the same axes.
func.func @nested_p1(%x: tensor<8x4xf32> {mhlo.sharding = "{devices=[4,1]<=[4]}"}) -> tensor<8x4xf32> {
  %0 = stablehlo.custom_call @SPMDFullToShardShape(%x) {mhlo.sharding = "{manual}"} : (tensor<8x4xf32>) -> tensor<2x4xf32>
  %1 = stablehlo.negate %0 : tensor<2x4xf32>
  // expected-error@+1 {{the operand of SPMDFullToShardShape is already one device's part: manual computations must not nest (P1)}}
  %2 = stablehlo.custom_call @SPMDFullToShardShape(%1) {mhlo.sharding = "{manual}"} : (tensor<2x4xf32>) -> tensor<2x4xf32>
  %3 = stablehlo.custom_call @SPMDShardToFullShape(%2) {mhlo.sharding = "{devices=[4,1]<=[4]}"} : (tensor<2x4xf32>) -> tensor<8x4xf32>
  return %3 : tensor<8x4xf32>
}

// -----

// A value for all devices in the middle of one's.
func.func @taken_from_outside_p1(%x: tensor<8x4xf32> {mhlo.sharding = "{devices=[4,1]<=[4]}"}, %y: tensor<2x4xf32>) -> tensor<8x4xf32> {
  %0 = stablehlo.custom_call @SPMDFullToShardShape(%x) {mhlo.sharding = "{manual}"} : (tensor<8x4xf32>) -> tensor<2x4xf32>
  // expected-error@+1 {{stablehlo.add in a manual computation reads a value from outside that did not go through SPMDFullToShardShape (P1)}}
  %1 = stablehlo.add %0, %y : tensor<2x4xf32>
  %2 = stablehlo.custom_call @SPMDShardToFullShape(%1) {mhlo.sharding = "{devices=[4,1]<=[4]}"} : (tensor<2x4xf32>) -> tensor<8x4xf32>
  return %2 : tensor<8x4xf32>
}

// -----

// Two manual computations over other axes, of which one value is made.
func.func @two_in_one_p1(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %0 = stablehlo.custom_call @SPMDFullToShardShape(%x) {mhlo.sharding = "{devices=[1,1,2,2]<=[4] last_tile_dims={manual, replicated}}"} : (tensor<8x4xf32>) -> tensor<8x4xf32>
  // expected-error@+1 {{manual computations must not nest: values enter one over the axes ['axis_0'], and this one over ['axis_0', 'axis_1'] (P1)}}
  %1 = stablehlo.custom_call @SPMDFullToShardShape(%x) {mhlo.sharding = "{manual}"} : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %2 = stablehlo.add %0, %1 : tensor<8x4xf32>
  %3 = stablehlo.custom_call @SPMDShardToFullShape(%2) {mhlo.sharding = "{replicated}"} : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %3 : tensor<8x4xf32>
}

// -----

// A way out of a manual computation and back into it.
func.func @overlapping_p1(%x: tensor<8x4xf32> {mhlo.sharding = "{devices=[4,1]<=[4]}"}) -> tensor<8x4xf32> {
  // expected-error@+1 {{two manual computations overlap: a value leaves one, and the program outside passes it back into it (P1)}}
  %0 = stablehlo.custom_call @SPMDFullToShardShape(%x) {mhlo.sharding = "{manual}"} : (tensor<8x4xf32>) -> tensor<2x4xf32>
  %1 = stablehlo.custom_call @SPMDShardToFullShape(%0) {mhlo.sharding = "{devices=[4,1]<=[4]}"} : (tensor<2x4xf32>) -> tensor<8x4xf32>
  %2 = stablehlo.custom_call @Sharding(%1) {mhlo.sharding = "{devices=[4,1]<=[4]}"} : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %3 = stablehlo.custom_call @SPMDFullToShardShape(%2) {mhlo.sharding = "{manual}"} : (tensor<8x4xf32>) -> tensor<2x4xf32>
  %4 = stablehlo.add %0, %3 : tensor<2x4xf32>
  %5 = stablehlo.custom_call @SPMDShardToFullShape(%4) {mhlo.sharding = "{devices=[4,1]<=[4]}"} : (tensor<2x4xf32>) -> tensor<8x4xf32>
  return %5 : tensor<8x4xf32>
}

// -----

// Shardy's, in the form that older jax wrote them in, and damaged.
module attributes {mhlo.frontend_attributes = {xla.sdy.meshes = "{mesh = #sdy.mesh<[\\\22x\\\22=4]>}"}} {
  // expected-error@+1 {{unreadable Shardy attribute: #sdy.sharding<@mesh, [{} (P1)}}
  func.func @round_trip_p1(%x: tensor<8x4xf32> {mhlo.frontend_attributes = {xla.sdy.sharding = "#sdy.sharding<@mesh, [{}"}}) -> tensor<8x4xf32> {
    return %x : tensor<8x4xf32>
  }
}

// -----

// In that form, and without its mesh.
module attributes {mhlo.num_partitions = 4 : i32} {
  // expected-error@+1 {{unreadable Shardy sharding in XLA's frontend attributes: the module lacks xla.sdy.meshes, or the op is unknown (P1)}}
  func.func @round_trip_without_mesh_p1(%x: tensor<8x4xf32> {mhlo.frontend_attributes = {xla.sdy.sharding = "#sdy.sharding<@mesh, [{}, {}]>"}}) -> tensor<8x4xf32> {
    return %x : tensor<8x4xf32>
  }
}

// -----

// A call that marks nothing.
func.func @mark_of_nothing_p1(%x: tensor<8x4xf32> {mhlo.sharding = "{devices=[4,1]<=[4]}"}) -> tensor<8x4xf32> {
  // expected-error@+1 {{a custom call of GSPMD's must have one operand and one result (P1)}}
  %0 = stablehlo.custom_call @Sharding() {mhlo.sharding = "{devices=[4,1]<=[4]}"} : () -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}

// -----

// P3: all shardings name one mesh. These tiles are those of no mesh.
// expected-error@+1 {{no single mesh expresses the tiles [2, 3] over devices 0, 1, 2, 3, 4, 5 together with the shardings before (P3)}}
func.func @no_mesh_of_gspmd_p3(%x: tensor<6x6xf32> {mhlo.sharding = "{devices=[3,2]<=[6]}"}, %y: tensor<6x6xf32> {mhlo.sharding = "{devices=[2,3]<=[6]}"}) -> tensor<6x6xf32> {
  return %x : tensor<6x6xf32>
}

// -----

// For eight devices and for four.
module attributes {mhlo.num_partitions = 8 : i32} {
  // expected-error@+1 {{a sharding is over 4 devices, but the program has 8 (P3)}}
  func.func @device_counts_p3(%x: tensor<8x4xf32> {mhlo.sharding = "{devices=[4,1]<=[4]}"}) -> tensor<8x4xf32> {
    return %x : tensor<8x4xf32>
  }
}

// -----

// On one of them.
module attributes {mhlo.num_partitions = 8 : i32} {
  // expected-error@+1 {{mhlo.sharding places a value on device 3 alone: partition divides values over all devices (P3)}}
  func.func @one_device_of_gspmd_p3(%x: tensor<8x4xf32> {mhlo.sharding = "{maximal device=3}"}) -> tensor<8x4xf32> {
    return %x : tensor<8x4xf32>
  }
}

// -----

// P2: shapes are static. Here one inside.
sdy.mesh @mesh = <["x"=4, "y"=2]>
func.func @symbolic_shape_p2(%n: tensor<1xi32>) -> tensor<i32> {
  // expected-error@+1 {{stablehlo.dynamic_iota has a value of a symbolic shape, tensor<?xi32>: partition needs static shapes; export for concrete ones (P2)}}
  %0 = stablehlo.dynamic_iota %n, dim = 0 : (tensor<1xi32>) -> tensor<?xi32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.reduce(%0 init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<?xi32>, tensor<i32>) -> tensor<i32>
  return %1 : tensor<i32>
}

// -----

// An argument's.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// expected-error@+1 {{argument 0 has a value of a symbolic shape, tensor<?x4xf32>}}
func.func @symbolic_argument_p2(%x: tensor<?x4xf32>) -> tensor<?x4xf32> {
  return %x : tensor<?x4xf32>
}

// -----

// P3: all shardings name one mesh. Here two have the same axes in another order.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// expected-error@+1 {{the meshes @mesh and @other differ: partition needs one mesh, with the same axes over the same devices (P3)}}
sdy.mesh @other = <["y"=2, "x"=4]>
func.func @axes_in_another_order_p3(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
                   %y: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@other, [{"x"}, {}]>}) -> tensor<8x4xf32> {
  %0 = stablehlo.add %x, %y : tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}

// -----

// The same axes over other devices.
sdy.mesh @mesh = <["x"=2]>
// expected-error@+1 {{the meshes @mesh and @other differ}}
sdy.mesh @other = <["x"=2], device_ids=[1, 0]>
func.func @other_devices_p3(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
                   %y: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@other, [{"x"}, {}]>}) -> tensor<8x4xf32> {
  %0 = stablehlo.add %x, %y : tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}

// -----

// P4: the program runs as one replica of several partitions.
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 2 : i32} {
  sdy.mesh @mesh = <["x"=4]>
  // expected-error@+1 {{partition needs a program of one replica and several partitions (P4)}}
  func.func @two_replicas_p4(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> tensor<8x4xf32> {
    return %x : tensor<8x4xf32>
  }
}

// -----

// P5: outside of manual computations nothing depends on the device. A collective, for one.
sdy.mesh @mesh = <["x"=4, "y"=2]>
func.func @collective_outside_p5(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> tensor<8x4xf32> {
  // expected-error@+1 {{stablehlo.collective_permute is outside of a manual computation: it would run on every device instead of once, so partition cannot divide it (P5)}}
  %0 = "stablehlo.collective_permute"(%x) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}

// -----

// An argument that orders side effects, there may be none of.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// expected-error@+1 {{an argument is a token, which orders side effects: partition only divides programs without side effects (P5)}}
func.func @token_argument_p5(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, %token: !stablehlo.token) -> tensor<8x4xf32> {
  return %x : tensor<8x4xf32>
}

// -----

// A transfer to another device. The start of its chain of tokens has no effect.
sdy.mesh @mesh = <["x"=4, "y"=2]>
func.func @send_outside_p5(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> tensor<8x4xf32> {
  %0 = stablehlo.after_all : !stablehlo.token
  // expected-error@+1 {{stablehlo.send is outside of a manual computation}}
  %1 = "stablehlo.send"(%x, %0) {
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<8x4xf32>, !stablehlo.token) -> !stablehlo.token
  return %x : tensor<8x4xf32>
}

// -----

// A question which device this is.
sdy.mesh @mesh = <["x"=4, "y"=2]>
func.func @partition_id_outside_p5(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> (tensor<8x4xf32>, tensor<ui32>) {
  // expected-error@+1 {{stablehlo.partition_id is outside of a manual computation}}
  %0 = stablehlo.partition_id : tensor<ui32>
  return %x, %0 : tensor<8x4xf32>, tensor<ui32>
}

// -----

// Numbers that each device would draw for itself.
sdy.mesh @mesh = <["x"=4, "y"=2]>
func.func @rng_outside_p5(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, %low: tensor<f32>, %high: tensor<f32>) -> tensor<8x4xf32> {
  %shape = stablehlo.constant dense<[8, 4]> : tensor<2xi64>
  // expected-error@+1 {{stablehlo.rng is outside of a manual computation}}
  %0 = stablehlo.rng %low, %high, %shape, distribution = UNIFORM : (tensor<f32>, tensor<f32>, tensor<2xi64>) -> tensor<8x4xf32>
  %1 = stablehlo.add %x, %0 : tensor<8x4xf32>
  return %1 : tensor<8x4xf32>
}

// -----

// A side effect, which would happen eight times.
sdy.mesh @mesh = <["x"=4, "y"=2]>
func.func @side_effect_outside_p5(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> tensor<8x4xf32> {
  // expected-error@+1 {{stablehlo.custom_call is outside of a manual computation}}
  stablehlo.custom_call @print(%x) {has_side_effect = true} : (tensor<8x4xf32>) -> ()
  return %x : tensor<8x4xf32>
}

// -----

// In a function that is called.
sdy.mesh @mesh = <["x"=4, "y"=2]>
func.func @callee_asks_p5(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> tensor<ui32> {
  %0 = call @device() : () -> tensor<ui32>
  return %0 : tensor<ui32>
}
func.func private @device() -> tensor<ui32> {
  // expected-error@+1 {{stablehlo.partition_id is outside of a manual computation}}
  %0 = stablehlo.partition_id : tensor<ui32>
  return %0 : tensor<ui32>
}

// -----

// P6: it is clear of which sums a value is a part. Here a manual computation takes parts.
sdy.mesh @mesh = <["x"=4, "y"=2]>
func.func @operand_in_parts_p6(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}], unreduced={"x"}>}) -> tensor<8xf32> {
  // expected-error@+1 {{a manual computation takes operand 0 in parts of a sum, #sdy.sharding<@mesh, [{}], unreduced={"x"}>, and its result can depend on which device holds which part: partition needs the operand whole, so sum the parts before it (P6)}}
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{}], unreduced={"x"}>] out_shardings=[<@mesh, [{}], unreduced={"x"}>] manual_axes={"x"} (%a: tensor<8xf32>) {
    %1 = stablehlo.abs %a : tensor<8xf32>
    sdy.return %1 : tensor<8xf32>
  } : (tensor<8xf32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}

// -----

// The absolute value of each part is no part of an absolute value.
sdy.mesh @mesh = <["x"=4]>
func.func @not_linear_p6(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}], unreduced={"x"}>}) -> tensor<8xf32> {
  // expected-error@+1 {{stablehlo.abs reads and returns parts of sums, but is not linear in them: its results on the devices do not add up to one sum; partition needs the operand summed first, by a sharding constraint without unreduced axes (P6)}}
  %0 = stablehlo.abs %x {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}], unreduced={"x"}>]>} : tensor<8xf32>
  return %0 : tensor<8xf32>
}

// -----

// Nor is a part times a part one of a product.
sdy.mesh @mesh = <["x"=4]>
func.func @product_of_parts_p6(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}], unreduced={"x"}>}) -> tensor<8xf32> {
  // expected-error@+1 {{stablehlo.multiply reads and returns parts of sums}}
  %0 = stablehlo.multiply %x, %x {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}], unreduced={"x"}>]>} : tensor<8xf32>
  return %0 : tensor<8xf32>
}

// -----

// A collective of Shardy's sums along an axis of which a contraction has divided a part.
sdy.mesh @mesh = <["x"=4, "y"=2]>
func.func @sums_more_than_is_divided_p6(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}, %w: tensor<4x2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> tensor<8x2xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}, {}]>]>} : (tensor<8x4xf32>, tensor<4x2xf32>) -> tensor<8x2xf32>
  // expected-error@+1 {{sdy.all_reduce sums a value, but the shardings do not state whether each device holds a part of the sum along all of its axes: partition needs this stated, by unreduced={"axis"} in the sharding of the value (P6)}}
  %1 = sdy.all_reduce {"x", "y"} %0 out_sharding=<@mesh, [{}, {}]> : tensor<8x2xf32>
  return %1 : tensor<8x2xf32>
}

// -----

// It sums what a contraction may have divided: no operand says how.
sdy.mesh @mesh = <["x"=4]>
func.func @sums_what_nothing_states_p6(%x: tensor<8x4xf32>, %w: tensor<4x2xf32>) -> tensor<8x2xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}, {}]>]>} : (tensor<8x4xf32>, tensor<4x2xf32>) -> tensor<8x2xf32>
  // expected-error@+1 {{sdy.all_reduce sums a value}}
  %1 = sdy.all_reduce {"x"} %0 out_sharding=<@mesh, [{}, {}]> : tensor<8x2xf32>
  return %1 : tensor<8x2xf32>
}

// -----

// Of complex values the multiple that a sum of equal ones is.
sdy.mesh @mesh = <["x"=4]>
func.func @sums_equal_complex_values_p6(%x: tensor<8xcomplex<f32>> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}) -> tensor<8xcomplex<f32>> {
  // expected-error@+1 {{sdy.all_reduce sums complex<f32> values that are the same on each device: partition can only multiply real numbers by the number of devices (P6)}}
  %0 = sdy.all_reduce {"x"} %x out_sharding=<@mesh, [{}]> : tensor<8xcomplex<f32>>
  return %0 : tensor<8xcomplex<f32>>
}

// -----

// P7: a program for several platforms has no custom calls, which one of them alone may know.
sdy.mesh @mesh = <["x"=4, "y"=2]>
func.func @custom_call_of_several_platforms_p7(
    %platform: tensor<i32> {jax.global_constant = "_platform_index"},
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> tensor<8x4xf32> {
  // expected-error@+1 {{the program is for several platforms, and the custom call 'anything' for one of them may be unknown to the others: export for one platform (P7)}}
  %0 = stablehlo.custom_call @anything(%x) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}
