// A test is made anew from its own input: once the pipeline does something else, as here where the
// Made-by line names another, the checks follow.
// RUN: rm -f %t.made.mlir
// RUN: stablehlo-tools make-test %s -p thread-tokens -o %t.made.mlir
// RUN: stablehlo-tools make-test --update --check %t.made.mlir | diff -u /dev/null -
// RUN: stablehlo-tools make-test --update %t.made.mlir | diff -u /dev/null -

// What people write into it stays: a comment above a check, another command, the form of the input.
// RUN: sed -e 's/^\/\/ CHECK-LABEL/\/\/ Written by hand.\n&/' -e '1s/^/\/\/ {{R}}UN: true\n/' -e 's/%%arg0/%%operand/g' -e 's/^  func.func/  \/\/ Inside.\n&/' %t.made.mlir | sed 's/{{R}}/R/' > %t.edited.mlir
// RUN: stablehlo-tools make-test --update %t.edited.mlir | not grep '^[-+]// CHECK'
// RUN: sed -i 's/\(Made by.* \)thread-tokens/\1'"'thread-tokens{form=composite}'"'/' %t.edited.mlir
// RUN: cp %t.edited.mlir %t.copy.mlir
// RUN: not stablehlo-tools make-test --update --check %t.made.mlir %t.edited.mlir > %t.diff
// RUN: cmp %t.copy.mlir %t.edited.mlir
// RUN: stablehlo-tools make-test --update %t.made.mlir %t.edited.mlir | diff -u %t.diff -
// RUN: filecheck %s --input-file %t.diff
// RUN: filecheck %s --check-prefix=UPDATED --input-file %t.edited.mlir
// RUN: stablehlo-tools opt %t.edited.mlir -p 'thread-tokens{form=composite}' | filecheck %t.edited.mlir
// RUN: stablehlo-tools make-test --update --check %t.edited.mlir

// CHECK: --- {{.*}}.edited.mlir
// CHECK-NEXT: +++ {{.*}}.edited.mlir
// CHECK: -// {{R}}UN: stablehlo-tools opt %s -p thread-tokens |
// CHECK: +// {{R}}UN: stablehlo-tools opt %s -p 'thread-tokens{form=composite}' |
// CHECK: +// {{C}}HECK-NEXT: %{{.*}} = stablehlo.composite "stablehlo_tools.all_gather"
// CHECK: -// {{C}}HECK-NEXT: return %{{.*}}BARRIER_1]]#0 :

// UPDATED: {{R}}UN: true
// UPDATED: {{R}}UN: stablehlo-tools opt %s -p 'thread-tokens{form=composite}'
// UPDATED: {{^}}// Written by hand.
// UPDATED-NEXT: {{C}}HECK-LABEL: func.func @main(
// UPDATED: {{^}}module {
// UPDATED-NEXT: // Inside.
// UPDATED-NEXT: func.func @main(%operand: tensor<2xf32>)

// An expected diagnostic is looked for anew.
// RUN: sed 's/mlir -p .*/mlir -p strip-tokens/; s/%%0 = "stablehlo/%%0 = "mhlo/' %t.made.mlir > %t.strip.mlir
// RUN: stablehlo-tools make-test --update %t.strip.mlir > %t.diff
// RUN: sed -i 's/mlir -p strip-tokens$/mlir -p thread-tokens/' %t.strip.mlir
// RUN: stablehlo-tools make-test --update %t.strip.mlir > %t.diff
// RUN: stablehlo-tools make-test --update --check %t.strip.mlir
// RUN: filecheck %s --check-prefix=REFUSED --input-file %t.strip.mlir
// REFUSED: {{e}}xpected-error@+1 {{[{][{]}}mhlo.all_gather communicates in a dialect
func.func @main(%x: tensor<2xf32>) -> tensor<4xf32> {
  %0 = "stablehlo.all_gather"(%x) {
    all_gather_dim = 0 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
