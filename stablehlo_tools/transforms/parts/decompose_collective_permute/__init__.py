"""How decompose-collective-permute skips transfers of loops, and writes send and recv."""
