"""Hypothesis without a clock."""

from hypothesis import HealthCheck, settings


def be_unhurried() -> None:
    """No deadline for an example from here on, and no complaint that examples are slow."""
    slow = [HealthCheck.too_slow]
    settings.register_profile("unhurried", deadline=None, suppress_health_check=slow)
    settings.load_profile("unhurried")
