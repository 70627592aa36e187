// RUN: stablehlo-tools opt %s -p partition -o %t.mlir
// RUN: stablehlo-tools verify %s %t.mlir | filecheck %s

// FFTs of slabs and pencils, real and complex, forward and inverse, with lengths that do not divide
// by the devices, compute the same when their dimensions are transformed one after the other.

// CHECK: identical in exact arithmetic: 4 outputs, {{[0-9,]+}} elements
sdy.mesh @mesh = <["x"=2, "y"=2]>
func.func @main(
    %slab: tensor<4x3x5xcomplex<f32>> {sdy.sharding = #sdy.sharding<@mesh, [{"x", "y"}, {}, {}]>},
    %pencil: tensor<8x8x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}, {}]>},
    %last: tensor<4x12xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x", "y"}]>},
    %batch: tensor<2x4x4xcomplex<f32>> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}, {}]>}
) -> (tensor<4x3x5xcomplex<f32>>, tensor<8x8x6xf32>, tensor<4x7xcomplex<f32>>, tensor<2x4x4xcomplex<f32>>) {
  %0 = stablehlo.fft %slab, type = IFFT, length = [4, 3, 5] : (tensor<4x3x5xcomplex<f32>>) -> tensor<4x3x5xcomplex<f32>>
  %1 = stablehlo.fft %pencil, type = RFFT, length = [8, 8, 6] : (tensor<8x8x6xf32>) -> tensor<8x8x4xcomplex<f32>>
  %2 = stablehlo.multiply %1, %1 : tensor<8x8x4xcomplex<f32>>
  %3 = stablehlo.fft %2, type = IRFFT, length = [8, 8, 6] : (tensor<8x8x4xcomplex<f32>>) -> tensor<8x8x6xf32>
  %4 = stablehlo.fft %last, type = RFFT, length = [4, 12] : (tensor<4x12xf32>) -> tensor<4x7xcomplex<f32>>
  %5 = stablehlo.fft %batch, type = FFT, length = [4, 4] : (tensor<2x4x4xcomplex<f32>>) -> tensor<2x4x4xcomplex<f32>>
  %6 = stablehlo.fft %5, type = FFT, length = [4, 4] : (tensor<2x4x4xcomplex<f32>>) -> tensor<2x4x4xcomplex<f32>>
  return %0, %3, %4, %6 : tensor<4x3x5xcomplex<f32>>, tensor<8x8x6xf32>, tensor<4x7xcomplex<f32>>, tensor<2x4x4xcomplex<f32>>
}
