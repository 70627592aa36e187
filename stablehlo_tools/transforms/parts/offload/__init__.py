"""Parts of `offload`."""
