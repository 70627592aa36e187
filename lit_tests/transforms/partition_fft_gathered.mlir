// RUN: stablehlo-tools opt %s -p partition -o %t.mlir 2>&1 | filecheck %s

// An FFT of a single divided dimension needs all of it, and a warning says so.
// CHECK: partition_fft_gathered.mlir:{{[0-9]+:[0-9]+}}: warning: stablehlo.fft cannot run on parts of dimension 0, divided over {"x"}: it is gathered
sdy.mesh @mesh = <["x"=4]>
func.func @row(%x: tensor<64xcomplex<f32>> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<64xcomplex<f32>> {
  %0 = stablehlo.fft %x, type = FFT, length = [64] : (tensor<64xcomplex<f32>>) -> tensor<64xcomplex<f32>>
  return %0 : tensor<64xcomplex<f32>>
}
