// RUN: stablehlo-tools inspect %s | filecheck %s
// RUN: stablehlo-tools inspect %s --json | filecheck %s --check-prefix=JSON

// Nothing communicates: one line, no table.
// CHECK: inspect_nothing.mlir: 0 communicating ops on 1 x 1 (replicas x partitions)
// CHECK-NOT: kind
// JSON: "collectives": []
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
}
