"""The search for the fastest pass pipeline of a program on a machine, with a proof."""
