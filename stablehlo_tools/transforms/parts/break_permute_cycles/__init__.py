"""What break-permute-cycles consists of."""
