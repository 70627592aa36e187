// One program beside another, as a page and as a trace.

// RUN: stablehlo-tools opt %s -p thread-tokens -o %t.mlir
// RUN: stablehlo-tools report %s %t.mlir -o %t.html --hardware %{inputs}/round.toml --title "Before <and> after"
// RUN: filecheck %s --input-file %t.html
// RUN: stablehlo-tools report %s %t.mlir -o %t.html2.html --hardware %{inputs}/round.toml --title "Before <and> after"
// RUN: diff %t.html %t.html2.html
// RUN: stablehlo-tools report %s -o %t.json --hardware %{inputs}/round.toml
// RUN: python -m json.tool %t.json | filecheck %s --check-prefix=TRACE

// CHECK: <!doctype html>
// CHECK: <title>Before &lt;and&gt; after
// CHECK-NOT: http:
// CHECK: </html>

// TRACE: "traceEvents": [
// TRACE: "ph": "M"
// TRACE: "ph": "X"
module attributes {mhlo.num_partitions = 2 : i32} {
  func.func @main(%x: tensor<1000xf32>) -> (tensor<2000xf32>, tensor<1000xf32>) {
    %0 = "stablehlo.all_gather"(%x) {
      all_gather_dim = 0 : i64,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids
    } : (tensor<1000xf32>) -> tensor<2000xf32>
    %1 = stablehlo.negate %x : tensor<1000xf32>
    return %0, %1 : tensor<2000xf32>, tensor<1000xf32>
  }
}
