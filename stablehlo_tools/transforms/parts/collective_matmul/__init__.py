"""What `collective-matmul` is made of: regions, rings, and their writing."""
