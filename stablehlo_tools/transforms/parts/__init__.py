"""The parts of passes that need more than one file: a package for each, named after the pass.

A Python module and a package cannot have the same name. So the parts of `transforms/partition.py`
are in `transforms/parts/partition/`.
"""
