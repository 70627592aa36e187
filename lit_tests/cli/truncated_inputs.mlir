// Binary files cut short, in their header, in their middle and just before their end.
// DEFINE: %{refused} = python %{inputs}/expect_refusal.py --absent %t.out.mlir stablehlo-tools opt %t.in -o %t.out.mlir

// RUN: stablehlo-tools opt %s -o %t.mlirbc
// RUN: head -c 20 %t.mlirbc > %t.in
// RUN: %{refused} | filecheck %s --check-prefix=BYTECODE
// RUN: head -c 100 %t.mlirbc > %t.in
// RUN: %{refused} | filecheck %s --check-prefix=BYTECODE
// RUN: head -c -1 %t.mlirbc > %t.in
// RUN: %{refused} | filecheck %s --check-prefix=BYTECODE
// BYTECODE: truncated_inputs.mlir.tmp.in: error: MLIR bytecode that was cut off: it ends at byte {{[0-9]+}}, 
// BYTECODE-NEXT: try: copy the file again

// RUN: stablehlo-tools opt %s -o %t.bc
// RUN: head -c 30 %t.bc > %t.in
// RUN: %{refused} | filecheck %s --check-prefix=PORTABLE
// RUN: head -c 100 %t.bc > %t.in
// RUN: %{refused} | filecheck %s --check-prefix=PORTABLE
// RUN: head -c -1 %t.bc > %t.in
// RUN: %{refused} | filecheck %s --check-prefix=PORTABLE
// PORTABLE: truncated_inputs.mlir.tmp.in: error: MLIR bytecode that was cut off: it ends at byte {{[0-9]+}}, 

// Cut before the magic number ends, nothing says what it was.
// RUN: head -c 3 %t.bc > %t.in
// RUN: %{refused} | filecheck %s --check-prefix=MAGIC
// MAGIC: truncated_inputs.mlir.tmp.in: error: neither an artifact nor text

// Whole in length, but with damaged bytes in its middle.
// RUN: python -c "import pathlib, sys; p = pathlib.Path(sys.argv[1]); b = bytearray(p.read_bytes()); b[60:90] = b'\xff' * 30; pathlib.Path(sys.argv[2]).write_bytes(b)" %t.mlirbc %t.in
// RUN: %{refused} | filecheck %s --check-prefix=DAMAGED
// RUN: python -c "import pathlib, sys; p = pathlib.Path(sys.argv[1]); b = bytearray(p.read_bytes()); b[60:90] = b'\xff' * 30; pathlib.Path(sys.argv[2]).write_bytes(b)" %t.bc %t.in
// RUN: %{refused} | filecheck %s --check-prefix=DAMAGED
// DAMAGED: truncated_inputs.mlir.tmp.in{{.*}}: error:
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.add %x, %x : tensor<2xf32>
  return %0 : tensor<2xf32>
}
