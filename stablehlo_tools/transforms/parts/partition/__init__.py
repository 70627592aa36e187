"""How partition makes of a sharded program the one that each device runs, by Shardy's passes."""
