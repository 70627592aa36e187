// RUN: stablehlo-tools opt %s -p 'accumulate-gradients{microbatches=2}' -o %t.after.mlir
// RUN: filecheck %s --check-prefix=REWRITTEN --input-file %t.after.mlir
// RUN: stablehlo-tools verify --exact %s %t.after.mlir | filecheck %s

// A device has half of each microbatch. The body adds up the samples of its device, and an
// all_reduce those of all: a term on a microbatch. The mask of the whole batch is cut outside; a
// table for each sample of a device is cut inside, by the number of the microbatch.
// REWRITTEN: stablehlo.while
// REWRITTEN: sdy.manual_computation(%{{.+}}, %arg0, %{{.+}}, %iterArg)
// REWRITTEN-SAME: manual_axes={"data"} (%[[X:.+]]: tensor<2x3xf32>, %[[W:.+]]: tensor<3x2xf32>, %{{.+}}: tensor<2x3xf32>, %[[K:.+]]: tensor<i32>)
// REWRITTEN: stablehlo.dynamic_slice %{{.+}}, %{{.+}}, %[[K]]
// REWRITTEN: stablehlo.dot_general %{{.+}}, %[[W]], contracting_dims = [1] x [0] : (tensor<2x3xf32>, tensor<3x2xf32>) -> tensor<2x2xf32>
// REWRITTEN: "stablehlo.all_reduce"
// CHECK: identical in exact arithmetic: 2 outputs, 22 elements
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=2]>
  func.func @main(%w: tensor<3x2xf32>, %x: tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) -> (tensor<8x2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}, tensor<3x2xf32>) {
    %row = stablehlo.iota dim = 0 : tensor<8x3xi32>
    %mask = stablehlo.convert %row : (tensor<8x3xi32>) -> tensor<8x3xf32>
    %0:2 = sdy.manual_computation(%x, %w, %mask) in_shardings=[<@mesh, [{"data"}, {}]>, <@mesh, [{}, {}]>, <@mesh, [{"data"}, {}]>] out_shardings=[<@mesh, [{"data"}, {}]>, <@mesh, [{}, {}]>] manual_axes={"data"} (%a: tensor<4x3xf32>, %b: tensor<3x2xf32>, %m: tensor<4x3xf32>) {
      %table = stablehlo.constant dense<[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0], [3.0, 2.0, 1.0]]> : tensor<4x3xf32>
      %1 = stablehlo.multiply %a, %m : tensor<4x3xf32>
      %2 = stablehlo.add %1, %table : tensor<4x3xf32>
      %3 = stablehlo.dot_general %2, %b, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x2xf32>) -> tensor<4x2xf32>
      %4 = stablehlo.dot_general %2, %3, contracting_dims = [0] x [0] : (tensor<4x3xf32>, tensor<4x2xf32>) -> tensor<3x2xf32>
      %5 = "stablehlo.all_reduce"(%4) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids}> ({
      ^bb0(%l: tensor<f32>, %r: tensor<f32>):
        %s = stablehlo.add %l, %r : tensor<f32>
        stablehlo.return %s : tensor<f32>
      }) : (tensor<3x2xf32>) -> tensor<3x2xf32>
      sdy.return %3, %5 : tensor<4x2xf32>, tensor<3x2xf32>
    } : (tensor<8x3xf32>, tensor<3x2xf32>, tensor<8x3xf32>) -> (tensor<8x2xf32>, tensor<3x2xf32>)
    return %0#0, %0#1 : tensor<8x2xf32>, tensor<3x2xf32>
  }
}
