// Outputs of align-order that cannot be are refused, and nothing is written.

// RUN: mkdir -p %t.sub && cp %s %t.sub/other.mlir && cp %s %t.sub/align_order_outputs.mlir
// RUN: rm -rf %t.dir
// RUN: python %{inputs}/expect_refusal.py --absent %t.dir stablehlo-tools align-order %s %t.sub/align_order_outputs.mlir -o %t.dir | filecheck %s --check-prefix=CLASH
// CLASH: error: two programs are called 'align_order_outputs.mlir', and each output keeps its program's name: copy one to another name

// RUN: python %{inputs}/expect_refusal.py --absent %t.dir stablehlo-tools align-order %s - -o %t.dir < %s | filecheck %s --check-prefix=STDIN
// STDIN: error: standard input has no file name for its output: give a file

// RUN: echo > %t.file
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools align-order %s %t.sub/other.mlir -o %t.file | filecheck %s --check-prefix=FILE
// FILE: error: cannot write to '{{.*}}.tmp.file': not a directory

// RUN: python %{inputs}/expect_refusal.py --absent %t.dir stablehlo-tools align-order %s %t.sub/other.mlir -o %t.dir/deeper | filecheck %s --check-prefix=PARENT
// PARENT: error: cannot make '{{.*}}.tmp.dir/deeper': no directory '{{.*}}.tmp.dir'

// RUN: python %{inputs}/expect_refusal.py --absent /proc/out stablehlo-tools align-order %s %t.sub/other.mlir -o /proc/out | filecheck %s --check-prefix=PROC
// PROC: error: cannot make '/proc/out': No such file or directory

// A name that is taken by a directory: neither program is written.
// RUN: rm -rf %t.taken && mkdir -p %t.taken/other.mlir
// RUN: python %{inputs}/expect_refusal.py --absent %t.taken/align_order_outputs.mlir stablehlo-tools align-order %s %t.sub/other.mlir -o %t.taken | filecheck %s --check-prefix=TAKEN
// TAKEN: error: cannot write '{{.*}}other.mlir': Is a directory

// RUN: not stablehlo-tools align-order %s 2>&1 | filecheck %s --check-prefix=USAGE
// USAGE: error: needs -o/--output
module attributes {mhlo.num_replicas = 2 : i32, mhlo.num_partitions = 1 : i32} {
  func.func @main(%x: tensor<2xf32>) -> tensor<4xf32> {
    %g = "stablehlo.all_gather"(%x) {
      all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2xf32>) -> tensor<4xf32>
    return %g : tensor<4xf32>
  }
}
