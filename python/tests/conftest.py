"""Eight virtual CPU devices for every test, set before anything imports jax, programs that are
compiled quickly, and no deadlines.
"""

import gc
import os
import signal
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from forked_commands import start
from forked_process import fork_children
from unhurried import COMPILED_QUICKLY, be_unhurried

from stablehlo_tools.processes import activity

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
for flag in ("--xla_force_host_platform_device_count=8", *COMPILED_QUICKLY):  # of children, too
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

# A shell starts what runs in the background with interrupts ignored, and commands inherit that.
if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):
    signal.signal(signal.SIGINT, signal.default_int_handler)

be_unhurried()


@pytest.fixture(scope="session", autouse=True)
def read_in_process() -> None:
    """Tests read what they wrote themselves: at once, and not in a process that may die."""
    activity.trust_input()


@pytest.fixture(scope="session", autouse=True)
def forked_children() -> Path | None:
    """The tool's child processes start in forks of one that is loaded already, as in the lit suite;
    with STABLEHLO_TOOLS_LIT_PLAIN=1 in the usual way. Where that one's command is."""
    if os.environ.get("STABLEHLO_TOOLS_LIT_PLAIN"):
        return None
    directory = start(dict(os.environ), ["children"])
    fork_children(directory)
    return directory


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The garbage collector leaves the modules and the tests alone, which stay to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(_OBJECTS)


# New objects before the garbage collector looks at them: programs are made of a great many.
_OBJECTS = 20_000

# The files that take longest, for which a worker is never found too late.
_LONGEST = (
    "test_fold_training.py",
    "test_snippets.py",
    "test_notebooks.py",
    "test_rematerialize.py",
    "test_optimizing.py",
    "test_processes.py",
    "test_collective_matmul.py",
    "test_expand_mpmd.py",
    "test_expand_pipeline.py",
    "test_site.py",
    "test_two_workers.py",
    "test_accumulate_gradients.py",
    "test_mpmd_mutations.py",
    "test_partition_models.py",
    "test_train_mpmd.py",
    "test_training.py",
    "test_what_is_sent.py",
    "test_offload_state.py",
    "test_once.py",
    "test_verify.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; workers take whole files in this order."""
    rank = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


pytest_plugins = ["report_browser"]  # the browser that the pages of `report` are opened in
