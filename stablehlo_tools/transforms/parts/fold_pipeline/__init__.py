"""Finding the layer scan that a pipeline computes, and writing it."""
