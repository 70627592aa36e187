"""The known schedules, by closed forms or from building blocks; named.py lists them."""
