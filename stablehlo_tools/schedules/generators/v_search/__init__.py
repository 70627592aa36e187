"""How the V-shaped schedules are found: building blocks, and orders that come of them."""
