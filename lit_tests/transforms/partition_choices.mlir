// RUN: stablehlo-tools opt %s -p 'partition{hardware=h100}' --split-input-file | filecheck %s --enable-var-scope
// RUN: stablehlo-tools opt %s -p 'partition{hardware=h100 explain=true}' --split-input-file 2>&1 >%t.mlir | filecheck %s --check-prefix=EXPLAIN
// RUN: not stablehlo-tools opt %s -p 'partition{hardware=h1000}' --split-input-file 2>&1 | filecheck %s --check-prefix=UNKNOWN
// RUN: not stablehlo-tools opt %s -p 'partition{choices=cheap}' --split-input-file 2>&1 | filecheck %s --check-prefix=INVALID

// UNKNOWN: error: {{.*}}h1000
// INVALID: error: {{.*}}choices

// Batch and weights ask for one axis: the smaller of the two moves. Here the weights.
sdy.mesh @mesh = <["data"=8]>
// CHECK-LABEL: func.func @large_batch
// CHECK: manual_axes={"data"} (%[[X:.+]]: tensor<4096x1024xbf16>, %[[W:.+]]: tensor<128x1024xbf16>) {
// CHECK-NEXT: %[[GATHER:.+]] = "stablehlo.all_gather"(%[[W]]) {{.*}} -> tensor<1024x1024xbf16>
// CHECK-NEXT: %[[DOT:.+]] = stablehlo.dot_general %[[X]], %[[GATHER]]
// CHECK-NEXT: sdy.return %[[DOT]]
// EXPLAIN: note: partition: 1 value resharded or summed, in
// EXPLAIN-NEXT: all_gather over {"data"} of 2.00 MiB: {{.*}}; tensor<1024x1024xbf16> is made as P('data') and wanted as P(); dividing the argument as P() saves
func.func @large_batch(
    %x: tensor<32768x1024xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
    %w: tensor<1024x1024xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}
) -> (tensor<32768x1024xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<32768x1024xbf16>, tensor<1024x1024xbf16>) -> tensor<32768x1024xbf16>
  return %0 : tensor<32768x1024xbf16>
}

// -----

// Here the batch, to the dimension that is contracted; what is left are parts of a sum.
sdy.mesh @mesh = <["data"=8]>
// CHECK-LABEL: func.func @large_weights
// CHECK: manual_axes={"data"} (%[[X:.+]]: tensor<1x16384xbf16>, %[[W:.+]]: tensor<2048x16384xbf16>) {
// CHECK-NOT: tensor<16384x16384xbf16>
// CHECK: "stablehlo.all_to_all"(%[[X]]) {{.*}} -> tensor<8x2048xbf16>
// CHECK: stablehlo.dot_general {{.*}}, %[[W]]
// CHECK-NEXT: "stablehlo.reduce_scatter"
// CHECK: sdy.return
func.func @large_weights(
    %x: tensor<8x16384xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
    %w: tensor<16384x16384xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}
) -> (tensor<8x16384xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<8x16384xbf16>, tensor<16384x16384xbf16>) -> tensor<8x16384xbf16>
  return %0 : tensor<8x16384xbf16>
}

// -----

// A loop over layers: the batch stays divided through the loop, and each layer's weights are
// gathered in it, not all of them before it.
sdy.mesh @mesh = <["data"=8]>
// CHECK-LABEL: func.func @layers
// CHECK: manual_axes={"data"} (%[[X:.+]]: tensor<8192x1024xbf16>, %[[W:.+]]: tensor<16x128x1024xbf16>) {
// CHECK-NOT: stablehlo.all_gather
// CHECK: stablehlo.while({{.*}} = %[[X]]
// CHECK: } do {
// CHECK: "stablehlo.all_gather"({{.*}}) {{.*}} -> tensor<{{(1x)?}}1024x1024xbf16>
// CHECK: stablehlo.dot_general {{.*}} -> tensor<8192x1024xbf16>
// CHECK-NOT: stablehlo.all_gather
// CHECK: sdy.return
// EXPLAIN: all_gather over {"data"} of 2.00 MiB, 16 times
func.func @layers(
    %x: tensor<65536x1024xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
    %w: tensor<16x1024x1024xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}
) -> tensor<65536x1024xbf16> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %count = stablehlo.constant dense<16> : tensor<i32>
  %0:3 = stablehlo.while(%i = %zero, %h = %x, %v = %w) : tensor<i32>, tensor<65536x1024xbf16>, tensor<16x1024x1024xbf16>
  cond {
    %1 = stablehlo.compare LT, %i, %count : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %1 : tensor<i1>
  } do {
    %1 = stablehlo.dynamic_slice %v, %i, %zero, %zero, sizes = [1, 1024, 1024] : (tensor<16x1024x1024xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x1024x1024xbf16>
    %2 = stablehlo.reshape %1 : (tensor<1x1024x1024xbf16>) -> tensor<1024x1024xbf16>
    %3 = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<65536x1024xbf16>, tensor<1024x1024xbf16>) -> tensor<65536x1024xbf16>
    %4 = stablehlo.tanh %3 : tensor<65536x1024xbf16>
    %5 = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %5, %4, %v : tensor<i32>, tensor<65536x1024xbf16>, tensor<16x1024x1024xbf16>
  }
  return %0#1 : tensor<65536x1024xbf16>
}

// -----

// Both dimensions are gathered, the one that is divided over slow links first, while it is small:
// of 16 H100 the axis "data" joins two nodes.
sdy.mesh @mesh = <["data"=2, "model"=8]>
// CHECK-LABEL: func.func @slow_links_first
// CHECK: %[[SLOW:.+]] = "stablehlo.all_gather"(%{{.+}}) <{all_gather_dim = 1 : i64, {{.*}}[0, 8]
// CHECK-SAME: (tensor<256x2048xf32>) -> tensor<256x4096xf32>
// CHECK-NEXT: "stablehlo.all_gather"(%[[SLOW]]) <{all_gather_dim = 0 : i64
// CHECK-SAME: (tensor<256x4096xf32>) -> tensor<2048x4096xf32>
func.func @slow_links_first(
    %x: tensor<2048x4096xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"model"}, {"data"}]>}
) -> (tensor<2048x4096xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
  return %x : tensor<2048x4096xf32>
}

// -----

// What has no elements is sent nowhere.
sdy.mesh @mesh = <["data"=4]>
// CHECK-LABEL: func.func @no_elements
// CHECK-NOT: all_gather
// CHECK: stablehlo.reshape {{.*}} -> tensor<8x0xcomplex<f32>>
// CHECK-NOT: all_gather
func.func @no_elements(
    %x: tensor<8x0xcomplex<f32>> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}
) -> (tensor<8x0xcomplex<f32>> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
  %0 = stablehlo.negate %x : tensor<8x0xcomplex<f32>>
  return %0 : tensor<8x0xcomplex<f32>>
}

// -----

// Experts stay where they are: tokens go to them, within a node, and back. To divide the weights over
// "data" in the place of "expert" would be no slice, but an exchange of all of them.
sdy.mesh @mesh = <["data"=8, "expert"=8]>
// CHECK-LABEL: func.func @experts
// CHECK-NOT: collective_permute
// CHECK: "stablehlo.all_to_all"{{.*}}dense<{{.}}[0, 1, 2, 3, 4, 5, 6, 7]{{.*}} (tensor<8x1x256x1024xbf16>) -> tensor<1x8x256x1024xbf16>
// CHECK-NEXT: stablehlo.dot_general {{.*}} (tensor<1x8x256x1024xbf16>, tensor<1x1024x4096xbf16>)
// CHECK: "stablehlo.all_to_all"{{.*}}dense<{{.}}[0, 1, 2, 3, 4, 5, 6, 7]
// CHECK-NOT: collective_permute
func.func @experts(
    %x: tensor<8x64x256x1024xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data", "expert"}, {}, {}]>},
    %w: tensor<8x1024x4096xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"expert"}, {}, {}]>}
) -> (tensor<8x64x256x4096xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data", "expert"}, {}, {}]>}) {
  %0 = stablehlo.dot_general %x, %w, batching_dims = [0] x [0], contracting_dims = [3] x [1] : (tensor<8x64x256x1024xbf16>, tensor<8x1024x4096xbf16>) -> tensor<8x64x256x4096xbf16>
  return %0 : tensor<8x64x256x4096xbf16>
}

// -----

// A loop that only adds up gradients: compilers take the all_reduce out of it, and run it once. In
// parts it would be a reduce_scatter of each microbatch.
sdy.mesh @mesh = <["data"=16]>
// CHECK-LABEL: func.func @accumulated
// CHECK: stablehlo.while
// CHECK: stablehlo.dot_general {{.*}} -> tensor<4096x4096xf32>
// CHECK-NEXT: "stablehlo.all_reduce"
// CHECK: stablehlo.add {{.*}} : tensor<4096x4096xf32>
// CHECK-NOT: all_gather
func.func @accumulated(
    %x: tensor<32x65536x4096xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}
) -> (tensor<4096x4096xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %steps = stablehlo.constant dense<32> : tensor<i32>
  %none = stablehlo.constant dense<0.0> : tensor<4096x4096xf32>
  %0:3 = stablehlo.while(%i = %zero, %sum = %none, %v = %x) : tensor<i32>, tensor<4096x4096xf32>, tensor<32x65536x4096xf32>
  cond {
    %1 = stablehlo.compare LT, %i, %steps : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %1 : tensor<i1>
  } do {
    %1 = stablehlo.dynamic_slice %v, %i, %zero, %zero, sizes = [1, 65536, 4096] : (tensor<32x65536x4096xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x65536x4096xf32>
    %2 = stablehlo.reshape %1 : (tensor<1x65536x4096xf32>) -> tensor<65536x4096xf32>
    %3 = stablehlo.dot_general %2, %2, contracting_dims = [0] x [0] : (tensor<65536x4096xf32>, tensor<65536x4096xf32>) -> tensor<4096x4096xf32>
    %4 = stablehlo.add %sum, %3 : tensor<4096x4096xf32>
    %5 = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %5, %4, %v : tensor<i32>, tensor<4096x4096xf32>, tensor<32x65536x4096xf32>
  }
  return %0#1 : tensor<4096x4096xf32>
}

// -----

// Weights are gathered beside the layers before their own. To divide activations in their place takes
// fewer bytes, but each layer would wait for them.
sdy.mesh @mesh = <["data"=8]>
// CHECK-LABEL: func.func @hidden
// CHECK-COUNT-8: "stablehlo.all_gather"({{.*}} (tensor<4096x32768xbf16>) -> tensor<32768x32768xbf16>
// CHECK-NOT: stablehlo.all_to_all
// CHECK-NOT: stablehlo.reduce_scatter
func.func @hidden(
    %x: tensor<24576x32768xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
    %a: tensor<32768x32768xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
    %b: tensor<32768x32768xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
    %c: tensor<32768x32768xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
    %d: tensor<32768x32768xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
    %e: tensor<32768x32768xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
    %f: tensor<32768x32768xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
    %g: tensor<32768x32768xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
    %h: tensor<32768x32768xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}
) -> (tensor<24576x32768xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) {
  %0 = stablehlo.dot_general %x, %a, contracting_dims = [1] x [0] : (tensor<24576x32768xbf16>, tensor<32768x32768xbf16>) -> tensor<24576x32768xbf16>
  %1 = stablehlo.dot_general %0, %b, contracting_dims = [1] x [0] : (tensor<24576x32768xbf16>, tensor<32768x32768xbf16>) -> tensor<24576x32768xbf16>
  %2 = stablehlo.dot_general %1, %c, contracting_dims = [1] x [0] : (tensor<24576x32768xbf16>, tensor<32768x32768xbf16>) -> tensor<24576x32768xbf16>
  %3 = stablehlo.dot_general %2, %d, contracting_dims = [1] x [0] : (tensor<24576x32768xbf16>, tensor<32768x32768xbf16>) -> tensor<24576x32768xbf16>
  %4 = stablehlo.dot_general %3, %e, contracting_dims = [1] x [0] : (tensor<24576x32768xbf16>, tensor<32768x32768xbf16>) -> tensor<24576x32768xbf16>
  %5 = stablehlo.dot_general %4, %f, contracting_dims = [1] x [0] : (tensor<24576x32768xbf16>, tensor<32768x32768xbf16>) -> tensor<24576x32768xbf16>
  %6 = stablehlo.dot_general %5, %g, contracting_dims = [1] x [0] : (tensor<24576x32768xbf16>, tensor<32768x32768xbf16>) -> tensor<24576x32768xbf16>
  %7 = stablehlo.dot_general %6, %h, contracting_dims = [1] x [0] : (tensor<24576x32768xbf16>, tensor<32768x32768xbf16>) -> tensor<24576x32768xbf16>
  return %7 : tensor<24576x32768xbf16>
}
