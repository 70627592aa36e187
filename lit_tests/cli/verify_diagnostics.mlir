// What is reported must be what is expected, and where: errors, warnings and notes.
// RUN: stablehlo-tools opt %s -p thread-tokens --split-input-file --verify-diagnostics

// Notes may be expected, but need not be.
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-note@+1 {{called here}}
  %0 = call @public(%x) : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// expected-error@below {{@public communicates}}
func.func @public(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) {
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

// On the line itself, as a regular expression, and on the line above.
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.collective_permute"(%x) { // expected-warning {{its results are unused}}
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<2xf32>) -> tensor<2xf32>
  // expected-warning-re@+1 {{stablehlo.{{[a-z]+}}_permute: its results}}
  %1 = "stablehlo.collective_permute"(%x) {source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
  %2 = "stablehlo.collective_permute"(%x) {source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
  // expected-warning@above {{its results are unused}}
  return %x : tensor<2xf32>
}

// -----

// A part that does not parse is refused like any other.
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  // expected-error@+1 {{use of undeclared SSA value name}}
  return %y : tensor<2xf32>
}

// -----

// Nothing expected, nothing reported.
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
}
