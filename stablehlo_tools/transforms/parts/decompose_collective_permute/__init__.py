"""The parts of `break-permute-cycles` and `decompose-collective-permute`."""
