"""What FileCheck-style tests need: split inputs and expected diagnostics."""
