"""Hypothesis without a clock, and XLA without what makes programs fast: those of tests run once."""

from hypothesis import HealthCheck, settings

# In XLA_FLAGS; a program is compiled alike before a pass and behind it.
COMPILED_QUICKLY = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)


def be_unhurried() -> None:
    """No deadline for an example from here on, and no complaint that examples are slow."""
    slow = [HealthCheck.too_slow]
    settings.register_profile("unhurried", deadline=None, suppress_health_check=slow)
    settings.load_profile("unhurried")
