// The hardware and the target agree, or the command says so before it compiles anything.

// RUN: not stablehlo-tools compile %s --target gpu --hardware tpu-v5e 2>&1 | filecheck %s
// RUN: not stablehlo-tools inspect %s --target gpu --hardware tpu-v5e 2>&1 | filecheck %s
// CHECK: error: XLA:GPU does not compile for tpu-v5e (Google TPU v5e): use --target tpu for it, or hardware that XLA:GPU compiles for: a100, h100, h200, b200, gb200

// RUN: not stablehlo-tools compile %s --target tpu --hardware mi300x 2>&1 | filecheck %s --check-prefix=AMD
// AMD: error: XLA:TPU does not compile for mi300x (AMD Instinct MI300X 192 GB): use --target gpu for it

// RUN: not stablehlo-tools compile %s --target tpu --hardware v5 2>&1 | filecheck %s --check-prefix=UNKNOWN
// UNKNOWN: error: no hardware profile 'v5'

func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}
