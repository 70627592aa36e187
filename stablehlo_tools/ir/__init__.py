"""Walks and edits MLIR: carries, signatures, clones. No policy lives here."""
