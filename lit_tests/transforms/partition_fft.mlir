// RUN: stablehlo-tools opt %s -p partition --split-input-file | filecheck %s --enable-var-scope

// An FFT of three dimensions, the first divided: the local ones first, then an exchange.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @slab
// CHECK: sdy.manual_computation{{.*}} (%[[X:.+]]: tensor<2x8x8xcomplex<f32>>)
// CHECK-NEXT: %[[LOCAL:.+]] = stablehlo.fft %[[X]], type = FFT, length = [8, 8]
// CHECK-NEXT: %[[SENT:.+]] = "stablehlo.all_to_all"(%[[LOCAL]])
// CHECK-NEXT: %[[ROWS:.+]] = stablehlo.transpose %[[SENT]], dims = [1, 2, 0]
// CHECK-NEXT: stablehlo.fft %[[ROWS]], type = FFT, length = [8]
// CHECK: "stablehlo.all_to_all"
// CHECK-NOT: stablehlo.all_gather
func.func @slab(%x: tensor<8x8x8xcomplex<f32>> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}, {}]>}) -> (tensor<8x8x8xcomplex<f32>> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}, {}]>}) {
  %0 = stablehlo.fft %x, type = FFT, length = [8, 8, 8] : (tensor<8x8x8xcomplex<f32>>) -> tensor<8x8x8xcomplex<f32>>
  return %0 : tensor<8x8x8xcomplex<f32>>
}

// -----

// A pair with elementwise ops between has one exchange there and one back: the inverse begins with
// the dimension that the other ended with.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @pair
// CHECK: stablehlo.fft {{.*}} type = FFT, length = [8]
// CHECK: "stablehlo.all_to_all"
// CHECK: stablehlo.fft {{.*}} type = FFT, length = [8]
// CHECK: stablehlo.multiply {{.*}} : tensor<8x2xcomplex<f32>>
// CHECK: stablehlo.fft {{.*}} type = IFFT, length = [8]
// CHECK: "stablehlo.all_to_all"
// CHECK: stablehlo.fft {{.*}} type = IFFT, length = [8]
// CHECK-NOT: stablehlo.all_to_all
func.func @pair(%x: tensor<8x8xcomplex<f32>> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> (tensor<8x8xcomplex<f32>> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
  %0 = stablehlo.fft %x, type = FFT, length = [8, 8] : (tensor<8x8xcomplex<f32>>) -> tensor<8x8xcomplex<f32>>
  %1 = stablehlo.multiply %0, %0 : tensor<8x8xcomplex<f32>>
  %2 = stablehlo.fft %1, type = IFFT, length = [8, 8] : (tensor<8x8xcomplex<f32>>) -> tensor<8x8xcomplex<f32>>
  return %2 : tensor<8x8xcomplex<f32>>
}

// -----

// Real numbers are before the transform of the last dimension, and after the inverse one. The first
// two dimensions are divided.
sdy.mesh @mesh = <["x"=2, "y"=2]>
// CHECK-LABEL: func.func @real_pencil
// CHECK: stablehlo.fft {{.*}} type = RFFT, length = [6] : (tensor<4x4x6xf32>) -> tensor<4x4x4xcomplex<f32>>
// CHECK-COUNT-2: stablehlo.fft {{.*}} type = FFT, length = [8]
// CHECK-COUNT-2: stablehlo.fft {{.*}} type = IFFT, length = [8]
// CHECK: stablehlo.fft {{.*}} type = IRFFT, length = [6] : (tensor<4x4x4xcomplex<f32>>) -> tensor<4x4x6xf32>
func.func @real_pencil(%x: tensor<8x8x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}, {}]>}) -> (tensor<8x8x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}, {}]>}) {
  %0 = stablehlo.fft %x, type = RFFT, length = [8, 8, 6] : (tensor<8x8x6xf32>) -> tensor<8x8x4xcomplex<f32>>
  %1 = stablehlo.multiply %0, %0 : tensor<8x8x4xcomplex<f32>>
  %2 = stablehlo.fft %1, type = IRFFT, length = [8, 8, 6] : (tensor<8x8x4xcomplex<f32>>) -> tensor<8x8x6xf32>
  return %2 : tensor<8x8x6xf32>
}

// -----

// A batch is divided, but no transformed dimension: one FFT of all of them stays.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @batch
// CHECK: stablehlo.fft {{.*}} type = FFT, length = [8, 8] : (tensor<1x8x8xcomplex<f32>>)
// CHECK-NOT: stablehlo.all
func.func @batch(%x: tensor<4x8x8xcomplex<f32>> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}, {}]>}) -> tensor<4x8x8xcomplex<f32>> {
  %0 = stablehlo.fft %x, type = FFT, length = [8, 8] : (tensor<4x8x8xcomplex<f32>>) -> tensor<4x8x8xcomplex<f32>>
  return %0 : tensor<4x8x8xcomplex<f32>>
}
