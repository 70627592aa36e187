"""What is said of a process that ran programs and ended without an answer."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.processes import child
from stablehlo_tools.verify import verification_job
from stablehlo_tools.verify.verification_job import Side


def test_a_killed_process_is_short_of_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    killed = child.ChildOutcome(
        -signal.SIGKILL, None, "E1130 10:00:00.1 1 a.cc:1] of something else"
    )
    monkeypatch.setattr(child, "ask", lambda *_, **__: killed)
    names: dict[Side, str] = {"before": "a.mlir", "after": "b.mlir"}
    with pytest.raises(
        ToolError, match=r"was killed, which is usual if the machine runs out of"
    ) as found:
        verification_job.ask_child("module", tmp_path, None, 1, names, 10.0, ())
    assert "something else" not in str(found.value)
    assert found.value.diagnostic.added == ("--twin", "always")
