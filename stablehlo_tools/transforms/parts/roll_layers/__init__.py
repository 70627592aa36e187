"""The parts of roll-layers: ops that repeat (`repetitions.py`), the proof that they are iterations
of one loop (`iterations.py`), which stacks the loops share (`planning.py`), and the loops that are
written for them (`writing.py`)."""
