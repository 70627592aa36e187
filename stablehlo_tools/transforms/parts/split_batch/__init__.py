"""Running the ops of a block once for each part of the batch."""
