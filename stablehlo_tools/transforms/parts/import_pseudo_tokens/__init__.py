"""torch-xla's pseudo-tokens: where they flow, which are tokens, how they are taken out."""
