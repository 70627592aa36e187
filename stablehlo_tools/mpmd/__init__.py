"""Programs of the ranks of a pipeline, one for each: what belongs together, and what is proven."""
