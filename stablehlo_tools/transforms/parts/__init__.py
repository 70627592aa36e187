"""What a pass is made of, where one file does not do: a room for each, by the name of the pass.

Python has no module and package of one name, so the parts of `transforms/partition.py` stand in
`transforms/parts/partition/`.
"""
