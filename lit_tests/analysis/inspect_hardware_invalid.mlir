// Bad hardware, bad measurements, bad outputs: one message, exit code 2, no file.

// RUN: python %{inputs}/expect_refusal.py stablehlo-tools inspect %s --hardware h1000 | filecheck %s --check-prefix=UNKNOWN
// UNKNOWN: h1000{{.*}}h100

// RUN: sed 's/memory_bandwidth = { value = 1,/memory_bandwidth = { value = -1,/' %{inputs}/round.toml > %t.negative.toml
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools inspect %s --hardware %t.negative.toml | filecheck %s --check-prefix=NEGATIVE
// NEGATIVE: negative.toml: error: {{.*}}chip.memory_bandwidth{{.*}}-1

// RUN: sed '/^launch/d' %{inputs}/round.toml > %t.missing.toml
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools inspect %s --hardware %t.missing.toml | filecheck %s --check-prefix=MISSING
// MISSING: missing.toml: error: {{.*}}chip.launch

// RUN: echo '{"schema": "stablehlo-tools/measured/1", "source": "none", "ops": {"fusion.1": 5}}' > %t.json
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools inspect %s --measured %t.json | filecheck %s --check-prefix=MEASURED
// MEASURED: .json: error: none of its 1 ops, such as 'fusion.1', is in this program

// RUN: rm -f %t.txt
// RUN: python %{inputs}/expect_refusal.py --absent %t.txt stablehlo-tools report %s -o %t.txt | filecheck %s --check-prefix=SUFFIX
// SUFFIX: .txt: the suffix must be .html for a page, or .json for a Perfetto trace

// RUN: rm -f %t.html
// RUN: python %{inputs}/expect_refusal.py --absent %t.html stablehlo-tools report %s missing.mlir -o %t.html | filecheck %s --check-prefix=AFTER
// AFTER: missing.mlir

// RUN: python %{inputs}/expect_refusal.py stablehlo-tools import-trace %s | filecheck %s --check-prefix=TRACE
// TRACE: inspect_hardware_invalid.mlir: error: {{.*}}JSON
module attributes {mhlo.num_partitions = 2 : i32} {
  func.func @main(%x: tensor<100xf32>) -> tensor<100xf32> {
    return %x : tensor<100xf32>
  }
}
