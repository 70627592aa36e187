// Nothing is written where there is nothing to write, or something to lose.
// DEFINE: %{refused} = python %{inputs}/expect_refusal.py stablehlo-tools make-test
// RUN: rm -f %t.mlir
// RUN: python %{inputs}/expect_refusal.py --absent %t.mlir stablehlo-tools make-test %s -p cse -o %t.mlir | filecheck %s --check-prefix=CANNOT
// CANNOT: error: the checks ignore all changes of the pipeline, so the test could not fail: use --full
// RUN: stablehlo-tools make-test %s -p cse --full -o %t.mlir
// RUN: stablehlo-tools opt %t.mlir -p cse | filecheck %t.mlir

// RUN: echo 'of another kind' > %t.other.mlir
// RUN: cp %t.other.mlir %t.copy
// RUN: %{refused} %s -p cse --full -o %t.other.mlir | filecheck %s --check-prefix=OTHER
// RUN: %{refused} --update %t.other.mlir | filecheck %s --check-prefix=FOREIGN
// RUN: cmp %t.copy %t.other.mlir
// OTHER: error: cannot replace '{{.*}}.other.mlir': make-test did not write it
// FOREIGN: .other.mlir: error: make-test did not write this test

// Of several tests none is updated where one cannot be.
// RUN: sed 's/CHECK-NEXT/CHECK/' %t.mlir > %t.stale.mlir
// RUN: cp %t.stale.mlir %t.copy
// RUN: %{refused} --update %t.stale.mlir %t.other.mlir | filecheck %s --check-prefix=FOREIGN
// RUN: cmp %t.copy %t.stale.mlir

// RUN: %{refused} %t.other.mlir -p cse -o %t.mlir | filecheck %s --check-prefix=INPUT
// RUN: %{refused} %t.absent.mlir -p cse -o %t.mlir | filecheck %s --check-prefix=ABSENT
// RUN: %{refused} %s -p no-such-pass -o %t.mlir | filecheck %s --check-prefix=PASS
// RUN: %{refused} %s -p cse -o %t.test | filecheck %s --check-prefix=SUFFIX
// RUN: %{refused} %s -p cse -o %t.no/such.mlir | filecheck %s --check-prefix=FOLDER
// INPUT: .other.mlir:1:1: error:
// ABSENT: .absent.mlir: error: cannot read the file
// PASS: error: unknown pass 'no-such-pass'
// SUFFIX: error: output '{{.*}}.test': a test of this kind is called .mlir
// FOLDER: error: cannot write '{{.*}}such.mlir': no directory

// RUN: %{refused} %s -p cse | filecheck %s --check-prefix=NEEDS
// RUN: %{refused} %s %s -p cse -o %t.mlir | filecheck %s --check-prefix=ONE
// RUN: %{refused} -p cse -o %t.mlir | filecheck %s --check-prefix=ONE
// RUN: %{refused} %s --producer true -p cse -o %t.mlir | filecheck %s --check-prefix=ONE
// RUN: %{refused} %s -p cse -o %t.mlir --check | filecheck %s --check-prefix=GOES
// RUN: %{refused} --update | filecheck %s --check-prefix=NONE
// RUN: %{refused} --update -p cse %t.mlir | filecheck %s --check-prefix=ALONE
// NEEDS: error: a test needs a pipeline and an output: -p PIPELINE -o TEST.mlir
// ONE: error: a test has one input: give one INPUT, or a --producer
// GOES: error: --check goes with --update
// NONE: error: --update needs a test
// ALONE: error: --update takes only tests: each test states how it was made

// RUN: %{refused} --producer 'cp %s %%t.mlir; exit 3' -p cse -o %t.mlir | filecheck %s --check-prefix=FAILED
// RUN: %{refused} --producer 'true %%t.mlir' -p cse -o %t.mlir | filecheck %s --check-prefix=EMPTY
// RUN: %{refused} --producer true -p cse -o %t.mlir | filecheck %s --check-prefix=UNNAMED
// FAILED: error: the producer '{{.*}}' failed: exit code 3
// EMPTY: error: cannot read the file: No such file or directory
// UNNAMED: error: the producer 'true' must name its output file: write it as %t and a suffix
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.add %x, %x : tensor<2xf32>
  %1 = stablehlo.add %x, %x : tensor<2xf32>
  %2 = stablehlo.multiply %0, %1 : tensor<2xf32>
  return %2 : tensor<2xf32>
}
