// Expectations that do not match what is reported: the answer is no, exit code 1, with a line for
// each, and no output.
// DEFINE: %{verify} = not stablehlo-tools opt %t.mlir -p thread-tokens --verify-diagnostics

// As it stands, the file matches.
// RUN: stablehlo-tools opt %s -p thread-tokens --verify-diagnostics | filecheck %s
// CHECK: func.func @main

// Expected and not reported.
// RUN: sed 's/are unused/somebody uses/' %s > %t.mlir
// RUN: %{verify} > %t.out 2>&1
// RUN: filecheck %s --check-prefix=BOTH < %t.out
// BOTH: verify_diagnostics_mismatch.mlir.tmp.mlir: unexpected warning: {{.*}}its results are unused
// BOTH-NEXT: verify_diagnostics_mismatch.mlir.tmp.mlir: line {{[0-9]+}}: expected warning was not reported: somebody
// BOTH-NOT: func.func

// Reported and not expected.
// RUN: sed '/are unused/d' %s > %t.mlir
// RUN: %{verify} 2>&1 | filecheck %s --check-prefix=SURPLUS
// SURPLUS: unexpected warning: {{.*}}its results are unused
// SURPLUS-NOT: was not reported

// On another line.
// RUN: sed 's/expected-warning@+1/expected-warning@+2/' %s > %t.mlir
// RUN: %{verify} 2>&1 | filecheck %s --check-prefix=LINE
// LINE: unexpected warning
// LINE: line {{[0-9]+}}: expected warning was not reported

// Of another severity.
// RUN: sed 's/expected-warning/expected-error/' %s > %t.mlir
// RUN: %{verify} 2>&1 | filecheck %s --check-prefix=SEVERITY
// SEVERITY: unexpected warning
// SEVERITY: expected error was not reported

// Twice where it is reported once.
// RUN: sed 's/\(.*expected-warning\)@+1\(.*\)/\1@+2\2\n\1@+1\2/' %s > %t.mlir
// RUN: %{verify} 2>&1 | filecheck %s --check-prefix=TWICE
// TWICE-NOT: unexpected
// TWICE: expected warning was not reported
// TWICE-NOT: was not reported

// The exit code is that of an answer, not of bad input.
// RUN: python -c "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode != 1)" stablehlo-tools opt %t.mlir -p thread-tokens --verify-diagnostics

// An unexpected error, and bad input, are mismatches as well.
// RUN: sed 's/return %%x/return %%undefined/' %s > %t.mlir
// RUN: %{verify} 2>&1 | filecheck %s --check-prefix=ERROR
// ERROR: unexpected error: {{.*}}use of undeclared SSA value name
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-warning@+1 {{are unused}}
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %x : tensor<2xf32>
}
