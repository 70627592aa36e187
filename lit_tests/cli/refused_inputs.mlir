// Inputs that are no module, each refused with one located line and without an output file.
// DEFINE: %{refused} = python %{inputs}/expect_refusal.py --absent %t.out.mlir stablehlo-tools opt %t.in -o %t.out.mlir

// RUN: rm -rf %t.in
// RUN: %{refused} | filecheck %s --check-prefix=MISSING
// MISSING: refused_inputs.mlir.tmp.in: error: cannot read the file: No such file or directory
// MISSING-NEXT: try:

// RUN: mkdir %t.in
// RUN: %{refused} | filecheck %s --check-prefix=DIRECTORY
// DIRECTORY: refused_inputs.mlir.tmp.in: error: cannot read the file: Is a directory
// RUN: rmdir %t.in

// RUN: cp /dev/null %t.in
// RUN: %{refused} | filecheck %s --check-prefix=EMPTY
// EMPTY: refused_inputs.mlir.tmp.in: error: the file is empty

// RUN: echo '  ' > %t.in
// RUN: %{refused} | filecheck %s --check-prefix=BLANK
// BLANK: refused_inputs.mlir.tmp.in: error: the file is empty

// Bytes that are neither text nor any known form.
// RUN: printf '\377\376' > %t.in
// RUN: %{refused} | filecheck %s --check-prefix=BYTES
// BYTES: refused_inputs.mlir.tmp.in: error: neither an artifact nor text: byte 0 is not UTF-8
// BYTES-NEXT: try: give it what jax.export writes: {{.*}}serialize

// RUN: echo 'import jax' > %t.in
// RUN: %{refused} | filecheck %s --check-prefix=SOURCE
// SOURCE: refused_inputs.mlir.tmp.in:1:1: error: text, but not MLIR; expected a program: a jax.export file, MLIR
// SOURCE-NEXT: try: give it what jax.export writes

// Text that does not parse, does not verify, or is of an unknown dialect.
// RUN: echo 'func.func @f(%%x: tensor<2xf32>) -> {' > %t.in
// RUN: %{refused} | filecheck %s --check-prefix=SYNTAX
// SYNTAX: refused_inputs.mlir.tmp.in:1:35: error: invalid MLIR text: expected {{.*}}; the text ends here
// SYNTAX-NEXT: try: copy the file again

// RUN: sed 's/PLACE/stablehlo.add %%x, %%x tensor<2xf32>/' %s > %t.in
// RUN: %{refused} | filecheck %s --check-prefix=COLON
// COLON: refused_inputs.mlir.tmp.in:{{[0-9]+}}:28: error: invalid MLIR text: expected ':'
// COLON-NEXT: try: correct that line, or write the text again

// RUN: sed 's/PLACE/stablehlo.add %%x, %%y : tensor<2xf32>/' %s > %t.in
// RUN: %{refused} | filecheck %s --check-prefix=TYPES
// TYPES: refused_inputs.mlir.tmp.in:{{[0-9]+}}:{{[0-9]+}}: error: {{.*}}%y

// RUN: sed 's/PLACE/stablehlo.reshape %%y : (tensor<3xf32>) -> tensor<2xf32>/' %s > %t.in
// RUN: %{refused} | filecheck %s --check-prefix=VERIFY
// VERIFY: refused_inputs.mlir.tmp.in:{{[0-9]+}}:8: error: {{.*}}number of output elements

// RUN: sed 's/PLACE/"tosa.add"(%%x, %%x) : (tensor<2xf32>, tensor<2xf32>) -> tensor<2xf32>/' %s > %t.in
// RUN: %{refused} | filecheck %s --check-prefix=DIALECT
// DIALECT: refused_inputs.mlir.tmp.in:{{[0-9]+}}:{{[0-9]+}}: error: {{.*}}unregistered dialect

// RUN: sed 's/PLACE/stablehlo.no_such_op %%x : tensor<2xf32>/' %s > %t.in
// RUN: %{refused} | filecheck %s --check-prefix=UNKNOWN
// UNKNOWN: refused_inputs.mlir.tmp.in:{{[0-9]+}}:8: error: {{.*}}no_such_op

// Locations of the text itself are what messages show.
// RUN: sed 's/PLACE/stablehlo.reshape %%y : (tensor<3xf32>) -> tensor<2xf32> loc("model.py":7:0)/' %s > %t.in
// RUN: %{refused} | filecheck %s --check-prefix=PYTHON
// PYTHON: model.py:7: error: {{.*}}number of output elements
func.func @main(%x: tensor<2xf32>, %y: tensor<3xf32>) -> tensor<2xf32> {
  %0 = PLACE
  return %0 : tensor<2xf32>
}
