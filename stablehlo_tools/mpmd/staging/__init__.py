"""Which op of a training step runs on which stage of a pipeline, and in which phase."""
