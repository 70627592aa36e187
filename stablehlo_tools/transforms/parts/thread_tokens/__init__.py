"""The token chain: the plan of its links, and the two forms that it is written in."""
