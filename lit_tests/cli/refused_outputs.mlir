// Outputs that cannot be, each refused before any work is done.

// RUN: python %{inputs}/expect_refusal.py --absent %t stablehlo-tools opt %s -o %t | filecheck %s --check-prefix=TMP
// TMP: stablehlo-tools: error: output '{{.*}}': unknown suffix '.tmp'; use .mlir, .mlirbc, .bc, .jax_export

// RUN: python %{inputs}/expect_refusal.py --absent nosuffix stablehlo-tools opt %s -o nosuffix | filecheck %s --check-prefix=SUFFIX
// SUFFIX: error: output 'nosuffix': unknown suffix ''

// RUN: rm -rf %t.dir
// RUN: python %{inputs}/expect_refusal.py --absent %t.dir stablehlo-tools opt %s -o %t.dir/x.mlir | filecheck %s --check-prefix=PARENT
// PARENT: error: cannot write '{{.*}}.tmp.dir/x.mlir': no directory '{{.*}}.tmp.dir'

// RUN: mkdir -p %t.dir.mlir
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools opt %s -o %t.dir.mlir | filecheck %s --check-prefix=DIRECTORY
// DIRECTORY: error: cannot write '{{.*}}.tmp.dir.mlir': it is a directory

// A directory where nobody may make a file.
// RUN: python %{inputs}/expect_refusal.py --absent /proc/x.mlir stablehlo-tools opt %s -o /proc/x.mlir | filecheck %s --check-prefix=PROC
// PROC: error: cannot write '/proc/x.mlir':

// A full device, as a file and as standard output.
// RUN: ln -sf /dev/full %t.full.mlir
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools opt %s -o %t.full.mlir | filecheck %s --check-prefix=FULL
// FULL: error: cannot write '{{.*}}.tmp.full.mlir': No space left on device

// RUN: not stablehlo-tools opt %s > /dev/full 2> %t.err
// RUN: filecheck %s --check-prefix=STDOUT < %t.err
// STDOUT: stablehlo-tools: error: cannot write the output: No space left on device
// STDOUT-NOT: error:

// Only what came from jax.export can go back into its calling convention.
// RUN: python %{inputs}/expect_refusal.py --absent %t.jax_export stablehlo-tools opt %s -o %t.jax_export | filecheck %s --check-prefix=EXPORT
// EXPORT: error: only an artifact of jax.export can become a .jax_export file, and this is .mlir

// Test modes write text.
// RUN: python %{inputs}/expect_refusal.py --absent %t.bc stablehlo-tools opt %s --split-input-file -o %t.bc | filecheck %s --check-prefix=SPLIT
// RUN: python %{inputs}/expect_refusal.py --absent %t.bc stablehlo-tools opt %s --verify-diagnostics -o %t.bc | filecheck %s --check-prefix=SPLIT
// SPLIT: error: --split-input-file and --verify-diagnostics write only text: use -o NAME.mlir

// A bad output is reported though the input is bad, too, and the pipeline.
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools opt /nonexistent -p nonsense -o x.txt | filecheck %s --check-prefix=FIRST
// FIRST: error: output 'x.txt': unknown suffix '.txt'
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
}
