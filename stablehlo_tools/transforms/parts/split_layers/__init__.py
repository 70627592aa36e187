"""The parts of split-layers: `cut_loops.py` says which loops are cut and how rows lie in pieces,
`ranges.py` writes the loops over ranges; `marks.py` is how others know one."""
