"""The parts of split-layers: `ranges.py` writes the loops over ranges of layers."""
