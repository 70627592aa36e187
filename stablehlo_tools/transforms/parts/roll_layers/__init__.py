"""The parts of roll-layers. `repetitions.py` finds ops that repeat, and `iterations.py` proves that
they are iterations of one loop. `planning.py` decides which stacks the loops share, and
`writing.py` writes the loops."""
