// RUN: stablehlo-tools opt %s -p accumulate-gradients --split-input-file 2>%t.warnings | filecheck %s
// RUN: filecheck %s --check-prefix=WARNED --input-file %t.warnings
// RUN: stablehlo-tools opt %s -p 'accumulate-gradients{explain}' --split-input-file -o /dev/null 2>&1 | filecheck %s --check-prefix=EXPLAINED

// What runs on samples is in the loop, once for each microbatch; the scaled weights are in front of
// it, the update of the weights behind it. Output 2 is put together sample by sample.
// EXPLAINED: note: accumulate-gradients: the batch is dimension 0 of argument 1, dimension 0 of argument 2; 5 of 10 ops run on each of 2 microbatches; 2 sums, 28 bytes, are accumulated, and 1 values of samples are collected
// CHECK-LABEL: func.func @step
// CHECK: %[[W:.+]] = stablehlo.multiply %arg0
// CHECK: %[[X:.+]] = stablehlo.reshape %arg1 : (tensor<4x3xf32>) -> tensor<2x2x1x3xf32>
// CHECK: %[[Y:.+]] = stablehlo.reshape %arg2
// CHECK: %[[LOOP:.+]]:4 = stablehlo.while(%[[I:.+]] = %{{.+}}, %[[LOSS:.+]] = %{{.+}}, %[[SUM:.+]] = %{{.+}}, %[[OUT:.+]] = %{{.+}})
// CHECK: do {
// CHECK-NEXT: stablehlo.dynamic_slice %[[X]], %{{.+}}, %[[I]], %{{.+}}, %{{.+}}, sizes = [2, 1, 1, 3]
// CHECK-NEXT: %[[XI:.+]] = stablehlo.reshape
// CHECK-NEXT: stablehlo.dynamic_slice %[[Y]], %{{.+}}, %[[I]]
// CHECK-NEXT: %[[YI:.+]] = stablehlo.reshape
// CHECK-NEXT: %[[H:.+]] = stablehlo.dot_general %[[XI]], %[[W]]
// CHECK-NEXT: %[[D:.+]] = stablehlo.subtract %[[H]], %[[YI]]
// CHECK-NEXT: %[[S:.+]] = stablehlo.multiply %[[D]], %[[D]]
// CHECK-NEXT: %[[L:.+]] = stablehlo.reduce(%[[S]]
// CHECK-NEXT: %[[G:.+]] = stablehlo.dot_general %[[XI]], %[[D]], contracting_dims = [0] x [0]
// CHECK-NEXT: stablehlo.add %[[LOSS]], %[[L]]
// CHECK-NEXT: stablehlo.add %[[SUM]], %[[G]]
// CHECK-NEXT: %[[ROW:.+]] = stablehlo.reshape %[[H]]
// CHECK-NEXT: stablehlo.dynamic_update_slice %[[OUT]], %[[ROW]], %{{.+}}, %[[I]]
// CHECK: %[[WHOLE:.+]] = stablehlo.reshape %[[LOOP]]#3 : (tensor<2x2x1x2xf32>) -> tensor<4x2xf32>
// CHECK-NEXT: %[[SCALED:.+]] = stablehlo.multiply %[[LOOP]]#2
// CHECK-NEXT: %[[NEW:.+]] = stablehlo.subtract %arg0, %[[SCALED]]
// CHECK-NEXT: return %[[LOOP]]#1, %[[NEW]], %[[WHOLE]]
func.func @step(%w: tensor<3x2xf32>, %x: tensor<4x3xf32>, %y: tensor<4x2xf32>) -> (tensor<f32>, tensor<3x2xf32>, tensor<4x2xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %half = stablehlo.constant dense<0.5> : tensor<3x2xf32>
  %0 = stablehlo.multiply %w, %half : tensor<3x2xf32>
  %1 = stablehlo.dot_general %x, %0, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x2xf32>) -> tensor<4x2xf32>
  %2 = stablehlo.subtract %1, %y : tensor<4x2xf32>
  %3 = stablehlo.multiply %2, %2 : tensor<4x2xf32>
  %4 = stablehlo.reduce(%3 init: %zero) applies stablehlo.add across dimensions = [0, 1] : (tensor<4x2xf32>, tensor<f32>) -> tensor<f32>
  %5 = stablehlo.dot_general %x, %2, contracting_dims = [0] x [0] : (tensor<4x3xf32>, tensor<4x2xf32>) -> tensor<3x2xf32>
  %6 = stablehlo.multiply %5, %half : tensor<3x2xf32>
  %7 = stablehlo.subtract %w, %6 : tensor<3x2xf32>
  return %4, %7, %1 : tensor<f32>, tensor<3x2xf32>, tensor<4x2xf32>
}

// -----

// A mean over samples with weights: the sum of the weights is known in front of the loop, on the
// whole batch, since each microbatch needs it.
// CHECK-LABEL: func.func @masked_mean
// CHECK: %[[COUNT:.+]] = stablehlo.reduce(%arg2
// CHECK: stablehlo.while
// CHECK: do {
// CHECK: %[[MASK:.+]] = stablehlo.reshape %{{.+}} -> tensor<2xf32>
// CHECK: stablehlo.dot_general
// CHECK: %[[L:.+]] = stablehlo.multiply %{{.+}}, %[[MASK]] : tensor<2xf32>
// CHECK: stablehlo.divide %[[L]], %{{.+}} : tensor<2xf32>
// CHECK: return
func.func @masked_mean(%w: tensor<3xf32>, %x: tensor<4x3xf32>, %mask: tensor<4xf32>) -> tensor<f32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %count = stablehlo.reduce(%mask init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3xf32>) -> tensor<4xf32>
  %1 = stablehlo.multiply %0, %mask : tensor<4xf32>
  %2 = stablehlo.broadcast_in_dim %count, dims = [] : (tensor<f32>) -> tensor<4xf32>
  %3 = stablehlo.divide %1, %2 : tensor<4xf32>
  %4 = stablehlo.reduce(%3 init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
  return %4 : tensor<f32>
}

// -----

// Two gradients of one weight are added before they are accumulated: one accumulator for both.
// CHECK-LABEL: func.func @tied
// CHECK: stablehlo.while(%{{.+}} = %{{.+}}, %[[SUM:.+]] = %{{.+}}) : tensor<i32>, tensor<3x3xf32>
// CHECK: do {
// CHECK: %[[ONE:.+]] = stablehlo.dot_general %{{.+}}, contracting_dims = [0] x [0]
// CHECK: %[[OTHER:.+]] = stablehlo.dot_general %{{.+}}, contracting_dims = [0] x [0]
// CHECK: %[[TURNED:.+]] = stablehlo.transpose %[[OTHER]]
// CHECK: %[[BOTH:.+]] = stablehlo.add %[[ONE]], %[[TURNED]]
// CHECK: stablehlo.add %[[SUM]], %[[BOTH]]
func.func @tied(%w: tensor<3x3xf32>, %x: tensor<4x3xf32>) -> tensor<3x3xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
  %1 = stablehlo.dot_general %x, %0, contracting_dims = [0] x [0] : (tensor<4x3xf32>, tensor<4x3xf32>) -> tensor<3x3xf32>
  %2 = stablehlo.dot_general %0, %0, contracting_dims = [0] x [0] : (tensor<4x3xf32>, tensor<4x3xf32>) -> tensor<3x3xf32>
  %3 = stablehlo.transpose %2, dims = [1, 0] : (tensor<3x3xf32>) -> tensor<3x3xf32>
  %4 = stablehlo.add %1, %3 : tensor<3x3xf32>
  return %4 : tensor<3x3xf32>
}

// -----

// Sums of bfloat16 are accumulated in float32, after the program's own conversion if it has one.
// Maxima, and what holds of all samples, are joined by their own reductions.
// CHECK-LABEL: func.func @reductions
// CHECK-DAG: stablehlo.constant dense<0xFF800000> : tensor<3xf32>
// CHECK-DAG: stablehlo.constant dense<true> : tensor<i1>
// CHECK: stablehlo.while(%{{.+}}) : tensor<i32>, tensor<3x3xf32>, tensor<3xf32>, tensor<i1>
// CHECK: do {
// CHECK: %[[G:.+]] = stablehlo.dot_general %{{.+}} -> tensor<3x3xbf16>
// CHECK: %[[WIDE:.+]] = stablehlo.convert %[[G]]
// CHECK: stablehlo.add %{{.+}}, %[[WIDE]] : tensor<3x3xf32>
// CHECK: stablehlo.maximum %{{.+}} : tensor<3xf32>
// CHECK: stablehlo.and %{{.+}} : tensor<i1>
func.func @reductions(%w: tensor<3x3xbf16>, %x: tensor<4x3xbf16>) -> (tensor<3x3xf32>, tensor<3xbf16>, tensor<i1>) {
  %low = stablehlo.constant dense<0xFF80> : tensor<bf16>
  %true = stablehlo.constant dense<true> : tensor<i1>
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x3xbf16>, tensor<3x3xbf16>) -> tensor<4x3xbf16>
  %1 = stablehlo.dot_general %x, %0, contracting_dims = [0] x [0] : (tensor<4x3xbf16>, tensor<4x3xbf16>) -> tensor<3x3xbf16>
  %2 = stablehlo.convert %1 : (tensor<3x3xbf16>) -> tensor<3x3xf32>
  %3 = stablehlo.reduce(%0 init: %low) applies stablehlo.maximum across dimensions = [0] : (tensor<4x3xbf16>, tensor<bf16>) -> tensor<3xbf16>
  %4 = stablehlo.is_finite %0 : (tensor<4x3xbf16>) -> tensor<4x3xi1>
  %5 = stablehlo.reduce(%4 init: %true) applies stablehlo.and across dimensions = [0, 1] : (tensor<4x3xi1>, tensor<i1>) -> tensor<i1>
  return %2, %3, %5 : tensor<3x3xf32>, tensor<3xbf16>, tensor<i1>
}

// -----

// What each device runs: the local batch is cut, and the gradients are summed over the devices once.
// CHECK-LABEL: func.func @devices
// CHECK: sdy.manual_computation
// CHECK: stablehlo.while(%{{.+}}) : tensor<i32>, tensor<3x2xf32>
// CHECK: stablehlo.dot_general %{{.+}} : (tensor<2x3xf32>, tensor<2x2xf32>) -> tensor<3x2xf32>
// CHECK-NOT: stablehlo.all_reduce
// CHECK: stablehlo.return
// CHECK: "stablehlo.all_reduce"
// CHECK: sdy.return
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["data"=2]>
func.func @devices(%w: tensor<3x2xf32>, %x: tensor<8x3xf32>) -> tensor<3x2xf32> {
  %0 = sdy.manual_computation(%w, %x) in_shardings=[<@mesh, [{}, {}]>, <@mesh, [{"data"}, {}]>] out_shardings=[<@mesh, [{}, {}]>] manual_axes={"data"} (%a: tensor<3x2xf32>, %b: tensor<4x3xf32>) {
    %1 = stablehlo.dot_general %b, %a, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x2xf32>) -> tensor<4x2xf32>
    %2 = stablehlo.dot_general %b, %1, contracting_dims = [0] x [0] : (tensor<4x3xf32>, tensor<4x2xf32>) -> tensor<3x2xf32>
    %3 = "stablehlo.all_reduce"(%2) ({
    ^bb0(%l: tensor<f32>, %r: tensor<f32>):
      %s = stablehlo.add %l, %r : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids} : (tensor<3x2xf32>) -> tensor<3x2xf32>
    sdy.return %3 : tensor<3x2xf32>
  } : (tensor<3x2xf32>, tensor<8x3xf32>) -> tensor<3x2xf32>
  return %0 : tensor<3x2xf32>
}
}

// -----

// A microbatch of two samples cannot be divided over four devices: a constraint divides it over as
// many as it can, and the program is told.
// WARNED: warning: accumulate-gradients: argument 1 is divided over 4 devices along the batch, and a microbatch has 2 samples
// CHECK-LABEL: func.func @constrained
// CHECK: sdy.sharding_constraint %{{.+}} <@mesh, [{"data":(1)2}, {?}]> : tensor<2x2xf32>
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
sdy.mesh @mesh = <["data"=4]>
func.func @constrained(%w: tensor<3x2xf32>, %x: tensor<4x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) -> tensor<3x2xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x2xf32>) -> tensor<4x2xf32>
  %1 = sdy.sharding_constraint %0 <@mesh, [{"data"}, {?}]> : tensor<4x2xf32>
  %2 = stablehlo.dot_general %x, %1, contracting_dims = [0] x [0] : (tensor<4x3xf32>, tensor<4x2xf32>) -> tensor<3x2xf32>
  return %2 : tensor<3x2xf32>
}
}

// -----

// Two batches in one product: a microbatch has its share of each, in front and behind.
// CHECK-LABEL: func.func @together
// CHECK: stablehlo.while
// CHECK: %[[BOTH:.+]] = stablehlo.concatenate %{{.+}}, %{{.+}}, dim = 0 : (tensor<2x3xf32>, tensor<2x3xf32>) -> tensor<4x3xf32>
// CHECK: %[[PRODUCT:.+]] = stablehlo.dot_general %[[BOTH]], %arg0
// CHECK: stablehlo.slice %[[PRODUCT]] [2:4, 0:2]
// CHECK: stablehlo.pad %{{.+}}, %{{.+}}, low = [2, 0], high = [0, 0], interior = [0, 0] : (tensor<2x2xf32>, tensor<f32>) -> tensor<4x2xf32>
// CHECK: stablehlo.return
// CHECK-NOT: stablehlo.dot_general
func.func @together(%w: tensor<3x2xf32>, %x: tensor<4x3xf32>, %y: tensor<4x3xf32>) -> tensor<3x2xf32> {
  %none = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.concatenate %x, %y, dim = 0 : (tensor<4x3xf32>, tensor<4x3xf32>) -> tensor<8x3xf32>
  %1 = stablehlo.dot_general %0, %w, contracting_dims = [1] x [0] : (tensor<8x3xf32>, tensor<3x2xf32>) -> tensor<8x2xf32>
  %2 = stablehlo.slice %1 [4:8, 0:2] : (tensor<8x2xf32>) -> tensor<4x2xf32>
  %3 = stablehlo.tanh %2 : tensor<4x2xf32>
  %4 = stablehlo.pad %3, %none, low = [4, 0], high = [0, 0], interior = [0, 0] : (tensor<4x2xf32>, tensor<f32>) -> tensor<8x2xf32>
  %5 = stablehlo.dot_general %0, %4, contracting_dims = [0] x [0] : (tensor<8x3xf32>, tensor<8x2xf32>) -> tensor<3x2xf32>
  return %5 : tensor<3x2xf32>
}
