"""Parts of `collective-matmul`: regions, rings, the choice of regions, and writing."""
