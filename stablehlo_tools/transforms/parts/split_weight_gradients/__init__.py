"""The parts of split-weight-gradients: `two_loops.py` writes a backward loop in two."""
