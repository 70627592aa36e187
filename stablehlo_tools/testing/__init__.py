"""Support for FileCheck-style tests: split inputs, expected diagnostics, generated tests."""
