"""A module as a task graph: its ops as nodes, the nodes grouped into kernels, the kernels timed."""
