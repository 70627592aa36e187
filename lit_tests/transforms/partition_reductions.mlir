// RUN: stablehlo-tools opt %s -p 'partition{choices=shardy}' --split-input-file --verify-diagnostics | filecheck %s --enable-var-scope

// Partial results are combined by the reducer that made them.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @maximum
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xf32>) {
// CHECK-NEXT: %[[CONSTANT:.+]] = stablehlo.constant dense<0xFF800000> : tensor<f32>
// CHECK-NEXT: %[[REDUCE:.+]] = stablehlo.reduce(%[[X]] init: %[[CONSTANT]]) applies stablehlo.maximum across dimensions = [0]
// CHECK-SAME: -> tensor<4xf32>
// CHECK-NEXT: %[[REDUCED:.+]] = "stablehlo.all_reduce"(%[[REDUCE]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK: stablehlo.maximum
// CHECK: }) : (tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT: sdy.return %[[REDUCED]] : tensor<4xf32>
func.func @maximum(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> tensor<4xf32> {
  %low = stablehlo.constant dense<0xFF800000> : tensor<f32>
  %0 = stablehlo.reduce(%x init: %low) applies stablehlo.maximum across dimensions = [0] : (tensor<8x4xf32>, tensor<f32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// All of booleans.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @all
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<4x4xi1>) {
// CHECK-NEXT: %[[CONSTANT:.+]] = stablehlo.constant dense<true> : tensor<i1>
// CHECK-NEXT: %[[REDUCE:.+]] = stablehlo.reduce(%[[X]] init: %[[CONSTANT]]) applies stablehlo.and across dimensions = [0]
// CHECK-SAME: -> tensor<4xi1>
// CHECK-NEXT: %[[REDUCED:.+]] = "stablehlo.all_reduce"(%[[REDUCE]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 1], [2, 3], [4, 5], [6, 7]]>
// CHECK: stablehlo.and
// CHECK: }) : (tensor<4xi1>) -> tensor<4xi1>
// CHECK-NEXT: sdy.return %[[REDUCED]] : tensor<4xi1>
func.func @all(
    %x: tensor<8x4xi1> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}
) -> tensor<4xi1> {
  %true = stablehlo.constant dense<true> : tensor<i1>
  %0 = stablehlo.reduce(%x init: %true) applies stablehlo.and across dimensions = [0] : (tensor<8x4xi1>, tensor<i1>) -> tensor<4xi1>
  return %0 : tensor<4xi1>
}

// -----

// Any of booleans, over both axes at once.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @any
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x2xi1>) {
// CHECK-NEXT: %[[CONSTANT:.+]] = stablehlo.constant dense<false> : tensor<i1>
// CHECK-NEXT: %[[REDUCE:.+]] = stablehlo.reduce(%[[X]] init: %[[CONSTANT]]) applies stablehlo.or across dimensions = [0, 1]
// CHECK-SAME: -> tensor<i1>
// CHECK-NEXT: %[[REDUCED:.+]] = "stablehlo.all_reduce"(%[[REDUCE]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 1, 2, 3, 4, 5, 6, 7]]>
// CHECK: stablehlo.or
// CHECK: }) : (tensor<i1>) -> tensor<i1>
// CHECK-NEXT: sdy.return %[[REDUCED]] : tensor<i1>
func.func @any(
    %x: tensor<8x4xi1> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}
) -> tensor<i1> {
  %false = stablehlo.constant dense<false> : tensor<i1>
  %0 = stablehlo.reduce(%x init: %false) applies stablehlo.or across dimensions = [0, 1] : (tensor<8x4xi1>, tensor<i1>) -> tensor<i1>
  return %0 : tensor<i1>
}

// -----

// Summed along a divided dimension with the other one divided too: that one stays.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @sum_of_columns
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x2xf32>) {
// CHECK-NEXT: %[[ZERO:.+]] = stablehlo.constant dense<0.000000e+00> : tensor<f32>
// CHECK-NEXT: %[[REDUCE:.+]] = stablehlo.reduce(%[[X]] init: %[[ZERO]]) applies stablehlo.add across dimensions = [0]
// CHECK-SAME: -> tensor<2xf32>
// CHECK-NEXT: %[[REDUCED:.+]] = "stablehlo.all_reduce"(%[[REDUCE]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK: stablehlo.add
// CHECK: }) : (tensor<2xf32>) -> tensor<2xf32>
// CHECK-NEXT: sdy.return %[[REDUCED]] : tensor<2xf32>
func.func @sum_of_columns(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}
) -> tensor<4xf32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<8x4xf32>, tensor<f32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// A sum that starts from 5 would start from it on every device: 5 is added afterwards.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @sum_from_five
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2xi32>) {
// CHECK-DAG: %[[FIVE:.+]] = stablehlo.constant dense<5> : tensor<i32>
// CHECK-DAG: %[[ZERO:.+]] = stablehlo.constant dense<0> : tensor<i32>
// CHECK: %[[REDUCE:.+]] = stablehlo.reduce(%[[X]] init: %[[ZERO]]) applies stablehlo.add across dimensions = [0]
// CHECK-SAME: -> tensor<i32>
// CHECK-NEXT: %[[REDUCED:.+]] = "stablehlo.all_reduce"(%[[REDUCE]])
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK: %[[SPREAD:.+]] = stablehlo.broadcast_in_dim %[[FIVE]], dims = []
// CHECK-NEXT: %[[SUM:.+]] = stablehlo.add %[[REDUCED]], %[[SPREAD]] : tensor<i32>
// CHECK-NEXT: sdy.return %[[SUM]] : tensor<i32>
func.func @sum_from_five(
    %x: tensor<8xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}
) -> tensor<i32> {
  %five = stablehlo.constant dense<5> : tensor<i32>
  %0 = stablehlo.reduce(%x init: %five) applies stablehlo.add across dimensions = [0] : (tensor<8xi32>, tensor<i32>) -> tensor<i32>
  return %0 : tensor<i32>
}

// -----

// A maximum may start from 5 as often as it likes.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @maximum_from_five
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2xi32>) {
// CHECK-NEXT: %[[CONSTANT:.+]] = stablehlo.constant dense<5> : tensor<i32>
// CHECK-NEXT: %[[REDUCE:.+]] = stablehlo.reduce(%[[X]] init: %[[CONSTANT]]) applies stablehlo.maximum across dimensions = [0]
// CHECK-SAME: -> tensor<i32>
// CHECK-NEXT: %[[REDUCED:.+]] = "stablehlo.all_reduce"(%[[REDUCE]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK: stablehlo.maximum
// CHECK: }) : (tensor<i32>) -> tensor<i32>
// CHECK-NEXT: sdy.return %[[REDUCED]] : tensor<i32>
func.func @maximum_from_five(
    %x: tensor<8xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}
) -> tensor<i32> {
  %five = stablehlo.constant dense<5> : tensor<i32>
  %0 = stablehlo.reduce(%x init: %five) applies stablehlo.maximum across dimensions = [0] : (tensor<8xi32>, tensor<i32>) -> tensor<i32>
  return %0 : tensor<i32>
}

// -----

// A start that is data is combined afterwards, too.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @maximum_from_an_argument
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xi32>, %[[START:.+]]: tensor<i32>) {
// CHECK-NEXT: %[[LEAST:.+]] = stablehlo.constant dense<-2147483648> : tensor<i32>
// CHECK-NEXT: %[[REDUCE:.+]] = stablehlo.reduce(%[[X]] init: %[[LEAST]]) applies stablehlo.maximum across dimensions = [0]
// CHECK-SAME: -> tensor<4xi32>
// CHECK-NEXT: %[[REDUCED:.+]] = "stablehlo.all_reduce"(%[[REDUCE]])
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK: %[[SPREAD:.+]] = stablehlo.broadcast_in_dim %[[START]], dims = []
// CHECK-NEXT: %[[MAXIMUM:.+]] = stablehlo.maximum %[[REDUCED]], %[[SPREAD]] : tensor<4xi32>
// CHECK-NEXT: sdy.return %[[MAXIMUM]] : tensor<4xi32>
func.func @maximum_from_an_argument(
    %x: tensor<8x4xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, %start: tensor<i32>
) -> tensor<4xi32> {
  %0 = stablehlo.reduce(%x init: %start) applies stablehlo.maximum across dimensions = [0] : (tensor<8x4xi32>, tensor<i32>) -> tensor<4xi32>
  return %0 : tensor<4xi32>
}

// -----

// A float that has no infinity has no identity of a maximum, and the dimension is gathered.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @maximum_of_finite_floats
// CHECK: %[[GATHER:.+]] = "stablehlo.all_gather"
// CHECK-NEXT: stablehlo.reduce(%[[GATHER]] init: %{{.+}}) applies stablehlo.maximum across dimensions = [0]
func.func @maximum_of_finite_floats(
    %x: tensor<8xf8E4M3FN> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}, %start: tensor<f8E4M3FN>
) -> tensor<f8E4M3FN> {
  // expected-warning@+1 {{stablehlo.reduce cannot run on parts of dimension 0, divided over {"x"}: it is gathered}}
  %0 = stablehlo.reduce(%x init: %start) applies stablehlo.maximum across dimensions = [0] : (tensor<8xf8E4M3FN>, tensor<f8E4M3FN>) -> tensor<f8E4M3FN>
  return %0 : tensor<f8E4M3FN>
}

// -----

// Complex numbers.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @complex_sum
// CHECK-DAG: %[[ZERO:.+]] = stablehlo.constant dense<(0.000000e+00,0.000000e+00)> : tensor<complex<f32>>
// CHECK-DAG: %[[FIVE:.+]] = stablehlo.constant dense<(5.000000e+00,1.000000e+00)> : tensor<complex<f32>>
// CHECK: stablehlo.reduce(%{{.+}} init: %[[ZERO]]) applies stablehlo.add across dimensions = [0]
// CHECK-NEXT: %[[REDUCED:.+]] = "stablehlo.all_reduce"
// CHECK: %[[SPREAD:.+]] = stablehlo.broadcast_in_dim %[[FIVE]], dims = []
// CHECK-NEXT: stablehlo.add %[[REDUCED]], %[[SPREAD]] : tensor<complex<f32>>
func.func @complex_sum(
    %x: tensor<8xcomplex<f32>> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}
) -> tensor<complex<f32>> {
  %five = stablehlo.constant dense<(5.0, 1.0)> : tensor<complex<f32>>
  %0 = stablehlo.reduce(%x init: %five) applies stablehlo.add across dimensions = [0] : (tensor<8xcomplex<f32>>, tensor<complex<f32>>) -> tensor<complex<f32>>
  return %0 : tensor<complex<f32>>
}

// -----

// Several sums at once start from zeros; the one that does so already is left alone.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @two_sums
// CHECK: %[[PART:.+]]:2 = stablehlo.reduce(%{{.+}} init: %[[ZERO:.+]]), (%{{.+}} init: %[[OTHER:.+]]) across dimensions = [0] : (tensor<2xi32>
// CHECK: "stablehlo.all_gather"
// CHECK: %[[WHOLE:.+]]:2 = stablehlo.reduce(
// CHECK: %[[SUM:.+]] = stablehlo.add %[[WHOLE]]#0, %{{.+}} : tensor<i32>
// CHECK-NEXT: sdy.return %[[SUM]], %[[WHOLE]]#1 : tensor<i32>, tensor<i32>
func.func @two_sums(
    %x: tensor<8xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}
) -> (tensor<i32>, tensor<i32>) {
  %five = stablehlo.constant dense<5> : tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %0:2 = stablehlo.reduce(%x init: %five), (%x init: %zero) across dimensions = [0] : (tensor<8xi32>, tensor<8xi32>, tensor<i32>, tensor<i32>) -> (tensor<i32>, tensor<i32>)
    reducer(%a: tensor<i32>, %b: tensor<i32>) (%m: tensor<i32>, %n: tensor<i32>) {
      %1 = stablehlo.add %m, %n : tensor<i32>
      %2 = stablehlo.add %a, %b : tensor<i32>
      stablehlo.return %2, %1 : tensor<i32>, tensor<i32>
    }
  return %0#0, %0#1 : tensor<i32>, tensor<i32>
}

// -----

// Windows start from the identity, too, which is the padding around the last device's rows.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @windows_from_five
// CHECK-DAG: %[[FIVE:.+]] = stablehlo.constant dense<5> : tensor<i32>
// CHECK-DAG: %[[ZERO:.+]] = stablehlo.constant dense<0> : tensor<i32>
// CHECK: %[[WINDOWS:.+]] = "stablehlo.reduce_window"(%{{.+}}, %[[ZERO]])
// CHECK: %[[SPREAD:.+]] = stablehlo.broadcast_in_dim %[[FIVE]], dims = []
// CHECK-NEXT: stablehlo.add %[[WINDOWS]], %[[SPREAD]] : tensor<2xi32>
func.func @windows_from_five(
    %x: tensor<8xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}
) -> (tensor<8xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) {
  %five = stablehlo.constant dense<5> : tensor<i32>
  %0 = "stablehlo.reduce_window"(%x, %five) ({
  ^bb0(%a: tensor<i32>, %b: tensor<i32>):
    %1 = stablehlo.add %a, %b : tensor<i32>
    stablehlo.return %1 : tensor<i32>
  }) {window_dimensions = array<i64: 2>, padding = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<8xi32>, tensor<i32>) -> tensor<8xi32>
  return %0 : tensor<8xi32>
}

// -----

// Two values at once, as of an argmax: each device's pair is gathered, and reduced once more.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @argmax
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2x4xi32>) {
// CHECK-NEXT: %[[DEVICE:.+]] = stablehlo.partition_id : tensor<ui32>
// CHECK-NEXT: %[[TABLE:.+]] = stablehlo.constant dense<[0, 0, 2, 2, 4, 4, 6, 6]> : tensor<8xi32>
// CHECK-NEXT: %[[ROW:.+]] = stablehlo.dynamic_slice %[[TABLE]], %[[DEVICE]], sizes = [1]
// CHECK-NEXT: %[[START:.+]] = stablehlo.reshape %[[ROW]]
// CHECK-NEXT: %[[CONSTANT:.+]] = stablehlo.constant dense<-2147483648> : tensor<i32>
// CHECK-NEXT: %[[ZERO:.+]] = stablehlo.constant dense<0> : tensor<i32>
// CHECK-NEXT: %[[IOTA:.+]] = stablehlo.iota dim = 0 : tensor<2x4xi32>
// CHECK-NEXT: %[[SPREAD:.+]] = stablehlo.broadcast_in_dim %[[START]], dims = []
// CHECK-SAME: -> tensor<2x4xi32>
// CHECK-NEXT: %[[ADD:.+]] = stablehlo.add %[[SPREAD]], %[[IOTA]] : tensor<2x4xi32>
// CHECK-NEXT: %[[REDUCE:.+]]:2 = stablehlo.reduce(%[[X]] init: %[[CONSTANT]]), (%[[ADD]] init: %[[ZERO]]) across dimensions = [0]
// CHECK-SAME: -> (tensor<4xi32>, tensor<4xi32>)
// CHECK: %[[RESHAPE:.+]] = stablehlo.reshape %[[REDUCE]]#0
// CHECK-SAME: -> tensor<1x4xi32>
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[RESHAPE]])
// CHECK-SAME: all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: -> tensor<4x4xi32>
// CHECK-NEXT: %[[RESHAPE_2:.+]] = stablehlo.reshape %[[REDUCE]]#1
// CHECK-SAME: -> tensor<1x4xi32>
// CHECK-NEXT: %[[GATHER_2:.+]] = "stablehlo.all_gather"(%[[RESHAPE_2]])
// CHECK-SAME: all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: -> tensor<4x4xi32>
// CHECK-NEXT: %[[REDUCE_2:.+]]:2 = stablehlo.reduce(%[[GATHER]] init: %[[CONSTANT]]), (%[[GATHER_2]] init: %[[ZERO]]) across dimensions = [0]
// CHECK-SAME: -> (tensor<4xi32>, tensor<4xi32>)
// CHECK: sdy.return %[[REDUCE_2]]#1 : tensor<4xi32>
func.func @argmax(
    %x: tensor<8x4xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> tensor<4xi32> {
  %low = stablehlo.constant dense<-2147483648> : tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %i = stablehlo.iota dim = 0 : tensor<8x4xi32>
  %0:2 = stablehlo.reduce(%x init: %low), (%i init: %zero) across dimensions = [0] : (tensor<8x4xi32>, tensor<8x4xi32>, tensor<i32>, tensor<i32>) -> (tensor<4xi32>, tensor<4xi32>)
    reducer(%a: tensor<i32>, %b: tensor<i32>) (%m: tensor<i32>, %n: tensor<i32>) {
      %1 = stablehlo.compare GT, %a, %b : (tensor<i32>, tensor<i32>) -> tensor<i1>
      %2 = stablehlo.compare EQ, %a, %b : (tensor<i32>, tensor<i32>) -> tensor<i1>
      %3 = stablehlo.compare LT, %m, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      %4 = stablehlo.and %2, %3 : tensor<i1>
      %5 = stablehlo.or %1, %4 : tensor<i1>
      %6 = stablehlo.select %1, %a, %b : tensor<i1>, tensor<i32>
      %7 = stablehlo.select %5, %m, %n : tensor<i1>, tensor<i32>
      stablehlo.return %6, %7 : tensor<i32>, tensor<i32>
    }
  return %0#1 : tensor<4xi32>
}

// -----

// A reducer of several ops: starting from 0 twice is as good as once, so that parts are reduced, but
// by a gather and the same reducer.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @largest_magnitude
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2xi32>) {
// CHECK-NEXT: %[[ZERO:.+]] = stablehlo.constant dense<0> : tensor<i32>
// CHECK-NEXT: %[[REDUCE:.+]] = stablehlo.reduce(%[[X]] init: %[[ZERO]]) across dimensions = [0]
// CHECK-SAME: -> tensor<i32>
// CHECK: %[[RESHAPE:.+]] = stablehlo.reshape %[[REDUCE]]
// CHECK-SAME: -> tensor<1xi32>
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[RESHAPE]])
// CHECK-SAME: all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: -> tensor<4xi32>
// CHECK-NEXT: %[[REDUCE_2:.+]] = stablehlo.reduce(%[[GATHER]] init: %[[ZERO]]) across dimensions = [0]
// CHECK-SAME: -> tensor<i32>
// CHECK: sdy.return %[[REDUCE_2]] : tensor<i32>
func.func @largest_magnitude(
    %x: tensor<8xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}
) -> tensor<i32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %0 = stablehlo.reduce(%x init: %zero) across dimensions = [0] : (tensor<8xi32>, tensor<i32>) -> tensor<i32>
    reducer(%a: tensor<i32>, %b: tensor<i32>) {
      %1 = stablehlo.abs %a : tensor<i32>
      %2 = stablehlo.abs %b : tensor<i32>
      %3 = stablehlo.maximum %1, %2 : tensor<i32>
      stablehlo.return %3 : tensor<i32>
    }
  return %0 : tensor<i32>
}

// -----

// One that does not leave its start alone needs all of the dimension at once.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @sum_of_sums
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[X:.+]]: tensor<2xi32>) {
// CHECK-NEXT: %[[CONSTANT:.+]] = stablehlo.constant dense<1> : tensor<i32>
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[X]])
// CHECK-SAME: all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK-SAME: -> tensor<8xi32>
// CHECK-NEXT: %[[REDUCE:.+]] = stablehlo.reduce(%[[GATHER]] init: %[[CONSTANT]]) across dimensions = [0]
// CHECK-SAME: -> tensor<i32>
// CHECK: sdy.return %[[REDUCE]] : tensor<i32>
func.func @sum_of_sums(
    %x: tensor<8xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}
) -> tensor<i32> {
  %one = stablehlo.constant dense<1> : tensor<i32>
  // expected-warning@+1 {{stablehlo.reduce cannot run on parts of dimension 0, divided over {"x"}: it is gathered}}
  %0 = stablehlo.reduce(%x init: %one) across dimensions = [0] : (tensor<8xi32>, tensor<i32>) -> tensor<i32>
    reducer(%a: tensor<i32>, %b: tensor<i32>) {
      %1 = stablehlo.add %a, %b : tensor<i32>
      %2 = stablehlo.add %1, %a : tensor<i32>
      stablehlo.return %2 : tensor<i32>
    }
  return %0 : tensor<i32>
}

// -----

// A sum of booleans, as a contraction makes one, is an or.
sdy.mesh @mesh = <["x"=4, "y"=2]>
// CHECK-LABEL: func.func @contraction_of_booleans
// CHECK-NEXT: sdy.manual_computation(
// CHECK-SAME: manual_axes={"x", "y"} (%[[A:.+]]: tensor<3x2xi1>, %[[B:.+]]: tensor<2x3xi1>) {
// CHECK-NEXT: %[[DOT:.+]] = stablehlo.dot_general %[[A]], %[[B]], contracting_dims = [1] x [0]
// CHECK-SAME: -> tensor<3x3xi1>
// CHECK-NEXT: %[[REDUCED:.+]] = "stablehlo.all_reduce"(%[[DOT]])
// CHECK-SAME: channel_handle<handle = 1, type = 1>
// CHECK-SAME: replica_groups = dense<{{\[\[}}0, 2, 4, 6], [1, 3, 5, 7]]>
// CHECK: stablehlo.or
// CHECK: }) : (tensor<3x3xi1>) -> tensor<3x3xi1>
// CHECK-NEXT: sdy.return %[[REDUCED]] : tensor<3x3xi1>
func.func @contraction_of_booleans(
    %a: tensor<3x8xi1> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>},
    %b: tensor<8x3xi1> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
) -> tensor<3x3xi1> {
  %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<3x8xi1>, tensor<8x3xi1>) -> tensor<3x3xi1>
  return %0 : tensor<3x3xi1>
}

// -----

// A region of bf16, a type that NumPy does not know: what it makes of its start is asked in f64.

module attributes {mhlo.num_partitions = 2 : i32} {
  sdy.mesh @mesh = <["x"=2]>
  // CHECK-LABEL: func.func public @main(
  func.func public @main(
      %arg0: tensor<8x4xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}
  ) -> (tensor<4xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}) {
    // CHECK: %[[PART:.+]] = stablehlo.reduce({{.*}}) {{.*}} : (tensor<4x4xbf16>, tensor<bf16>)
    // CHECK: "stablehlo.all_gather"
    // CHECK: stablehlo.reduce({{.*}}) {{.*}} : (tensor<2x4xbf16>, tensor<bf16>)
    %low = stablehlo.constant dense<0xFF80> : tensor<bf16>
    %0 = stablehlo.reduce(%arg0 init: %low) across dimensions = [0]
        : (tensor<8x4xbf16>, tensor<bf16>) -> tensor<4xbf16>
      reducer(%a: tensor<bf16>, %b: tensor<bf16>) {
        %1 = stablehlo.maximum %a, %b : tensor<bf16>
        %2 = stablehlo.maximum %1, %b : tensor<bf16>
        stablehlo.return %2 : tensor<bf16>
      }
    return %0 : tensor<4xbf16>
  }
}
