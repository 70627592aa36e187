"""Walking and editing of MLIR: carries, signatures, clones. No policy lives here."""
