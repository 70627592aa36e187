"""The published schedules, from closed forms or building blocks; named.py lists them."""
