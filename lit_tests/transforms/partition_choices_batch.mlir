// RUN: stablehlo-tools opt %s -p partition | filecheck %s --check-prefixes=CHECK,SPACE
// RUN: stablehlo-tools opt %s -p 'partition{hardware=tpu-v5e}' | filecheck %s --check-prefixes=CHECK,SPACE
// RUN: stablehlo-tools opt %s -p 'partition{hardware=h100}' | filecheck %s --check-prefixes=CHECK,BATCH

// Eight images a device, divided in space: their borders are exchanged where a batch of two would take
// a TPU as long as one of eight; an H100 takes two whole images instead.
sdy.mesh @mesh = <["data"=2, "space"=4]>
// CHECK-LABEL: func.func @images
// SPACE: stablehlo.collective_permute
// SPACE-NOT: all_to_all
// SPACE: stablehlo.convolution
// BATCH: "stablehlo.all_to_all"{{.*}} (tensor<8x16x64x4xbf16>) -> tensor<2x64x64x4xbf16>
// BATCH: stablehlo.convolution
// BATCH-NOT: collective_permute
func.func @images(
    %x: tensor<16x64x64x4xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {"space"}, {}, {}]>},
    %k: tensor<3x3x4x256xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}, {}, {}]>},
    %l: tensor<3x3x256x256xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}, {}, {}]>},
    %m: tensor<3x3x256x4xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}, {}, {}]>}
) -> (tensor<16x64x64x4xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {"space"}, {}, {}]>}) {
  %0 = stablehlo.convolution(%x, %k) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {stride = [1, 1], pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : (tensor<16x64x64x4xbf16>, tensor<3x3x4x256xbf16>) -> tensor<16x64x64x256xbf16>
  %1 = stablehlo.convolution(%0, %l) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {stride = [1, 1], pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : (tensor<16x64x64x256xbf16>, tensor<3x3x256x256xbf16>) -> tensor<16x64x64x256xbf16>
  %2 = stablehlo.convolution(%1, %m) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {stride = [1, 1], pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : (tensor<16x64x64x256xbf16>, tensor<3x3x256x4xbf16>) -> tensor<16x64x64x4xbf16>
  return %2 : tensor<16x64x64x4xbf16>
}
