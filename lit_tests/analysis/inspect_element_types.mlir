// RUN: stablehlo-tools inspect %s | filecheck %s

// Bytes on one participant: numbers narrower than a byte are packed, complex ones count twice.

// CHECK: 13 communicating ops
module attributes {mhlo.num_replicas = 2 : i32} {
  func.func @main(
      %a0: tensor<9xi1>,
      %a1: tensor<3xi4>,
      %a2: tensor<5xui2>,
      %a3: tensor<3xi8>,
      %a4: tensor<3xf4E2M1FN>,
      %a5: tensor<3xf6E2M3FN>,
      %a6: tensor<3xf8E4M3FN>,
      %a7: tensor<3xbf16>,
      %a8: tensor<3xf64>,
      %a9: tensor<3xcomplex<f32>>,
      %a10: tensor<complex<f64>>,
      %a11: tensor<0x4xf32>
  ) {
    // A boolean takes a byte: XLA never packs it.
    // CHECK: collective_permute {0,1} i1 9 9 -
    %0 = "stablehlo.collective_permute"(%a0) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<9xi1>) -> tensor<9xi1>

    // Three elements of four bits: twelve bits.
    // CHECK: collective_permute {0,1} i4 2 2 -
    %1 = "stablehlo.collective_permute"(%a1) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<3xi4>) -> tensor<3xi4>

    // Five of two bits.
    // CHECK: collective_permute {0,1} ui2 2 2 -
    %2 = "stablehlo.collective_permute"(%a2) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<5xui2>) -> tensor<5xui2>

    // Whole bytes, of integers and of floats.
    // CHECK: collective_permute {0,1} i8 3 3 -
    %3 = "stablehlo.collective_permute"(%a3) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<3xi8>) -> tensor<3xi8>

    // Floats are packed like integers.
    // CHECK: collective_permute {0,1} f4E2M1FN 2 2 -
    %4 = "stablehlo.collective_permute"(%a4) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<3xf4E2M1FN>) -> tensor<3xf4E2M1FN>

    // Eighteen bits.
    // CHECK: collective_permute {0,1} f6E2M3FN 3 3 -
    %5 = "stablehlo.collective_permute"(%a5) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<3xf6E2M3FN>) -> tensor<3xf6E2M3FN>

    // CHECK: collective_permute {0,1} f8E4M3FN 3 3 -
    %6 = "stablehlo.collective_permute"(%a6) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<3xf8E4M3FN>) -> tensor<3xf8E4M3FN>

    // CHECK: collective_permute {0,1} bf16 6 6 -
    %7 = "stablehlo.collective_permute"(%a7) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<3xbf16>) -> tensor<3xbf16>

    // CHECK: collective_permute {0,1} f64 24 24 -
    %8 = "stablehlo.collective_permute"(%a8) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<3xf64>) -> tensor<3xf64>

    // Real and imaginary part.
    // CHECK: collective_permute {0,1} complex<f32> 24 24 -
    %9 = "stablehlo.collective_permute"(%a9) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<3xcomplex<f32>>) -> tensor<3xcomplex<f32>>

    // A scalar.
    // CHECK: collective_permute {0,1} complex<f64> 16 16 -
    %10 = "stablehlo.collective_permute"(%a10) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<complex<f64>>) -> tensor<complex<f64>>

    // A tensor without elements.
    // CHECK: collective_permute {0,1} f32 0 0 -
    %11 = "stablehlo.collective_permute"(%a11) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<0x4xf32>) -> tensor<0x4xf32>

    // Several operands: the sum of their bytes, each element type once.
    // CHECK: all_gather {0,1} i4,f64 28 54 -
    %12:3 = "stablehlo.all_gather"(%a1, %a8, %a1) {
      all_gather_dim = 0 : i64,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<3xi4>, tensor<3xf64>, tensor<3xi4>) -> (tensor<6xi4>, tensor<6xf64>, tensor<6xi4>)
    return
  }
}
