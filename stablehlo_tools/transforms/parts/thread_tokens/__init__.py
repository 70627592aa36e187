"""The token chain: its marks, the plan of its links, and the two forms it is written in."""
