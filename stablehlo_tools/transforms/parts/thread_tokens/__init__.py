"""Plans the links of the token chain, and writes them in one of two forms."""
