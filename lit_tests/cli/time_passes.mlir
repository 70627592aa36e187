// A line for each pass, as it was written, with its time and its share; then the total.
// RUN: stablehlo-tools opt %s -p 'cse,thread-tokens{minimal}' --time-passes > %t.out 2> %t.err
// RUN: filecheck %s < %t.err
// RUN: stablehlo-tools opt %s -p cse | diff -u %t.out -

// CHECK: time by pass:
// CHECK-NEXT: {{[0-9]+\.[0-9]+}} s {{[0-9]+\.[0-9]}}% cse
// CHECK-NEXT: {{[0-9]+\.[0-9]+}} s {{[0-9]+\.[0-9]}}% thread-tokens{minimal}
// CHECK-NEXT: {{[0-9]+\.[0-9]+}} s total
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
}
