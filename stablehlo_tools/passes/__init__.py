"""What a pass is, its options, the text of a pipeline, and the passes by name."""
