"""Eight virtual CPU devices for every test, set before anything imports jax, programs that are
compiled quickly, and no deadlines.
"""

import os
import sys

import pytest
from unhurried import be_unhurried

from stablehlo_tools.processes import activity

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
_FLAG = "--xla_force_host_platform_device_count=8"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()

be_unhurried()


@pytest.fixture(scope="session", autouse=True)
def read_in_process() -> None:
    """Tests read what they wrote themselves: at once, and not in a process that may die."""
    activity.trust_input()


@pytest.fixture(scope="session", autouse=True)
def compiled_quickly() -> None:
    """XLA leaves out what makes programs fast: those of tests run once.

    Only in this process: what the tools start compiles as it does for users. Tests that need no
    JAX do not load it for this.
    """
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_disable_most_optimizations", True)


pytest_plugins = ["report_browser"]  # the browser that the pages of `report` are opened in
