"""Predictions of the orders that XLA's own schedulers give a task graph."""
