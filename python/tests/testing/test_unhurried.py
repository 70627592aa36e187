"""No test depends on time."""

from hypothesis import HealthCheck, settings


def test_no_example_has_a_deadline() -> None:
    default = settings()
    assert default.deadline is None
    assert HealthCheck.too_slow in default.suppress_health_check
