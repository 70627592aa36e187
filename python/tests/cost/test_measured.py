"""Measured profiles: how they are looked up and refused, and how a real trace becomes one."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from tree import FIXTURES

from stablehlo_tools.cost.clock import SCHEMA, MeasuredProfile
from stablehlo_tools.cost.traces import profile_from_trace
from stablehlo_tools.diagnostics import ToolError

# What jax.profiler.trace wrote on two virtual devices of XLA:CPU, trimmed to the runs of XLA ops
# and ten events of the host: three calls of a loop of three matrix products, and a small program.
TRACES = FIXTURES / "traces" / "cpu"

type _Event = dict[str, object]


def measured(tmp_path: Path, **changes: object) -> MeasuredProfile:
    document: dict[str, object] = {"schema": SCHEMA, "source": "a test", "ops": {"dot.1": 250}}
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({**document, **changes}))
    return MeasuredProfile.load(path)


def test_the_first_name_that_has_a_time_is_used(tmp_path: Path):
    profile = measured(tmp_path, ops={"dot.1": 250, "model.py:3": 7.5})
    assert profile.ns(["dot.1", "model.py:3"]) == 250
    assert profile.ns(["add.2", "jit(f)/add", "model.py:3"]) == 7.5
    assert profile.ns(["add.2"]) is None
    assert profile.ns([]) is None
    assert profile.used == {"dot.1", "model.py:3"}


def test_a_profile_of_which_something_was_used_passes(tmp_path: Path):
    profile = measured(tmp_path)
    profile.ns(["dot.1"])
    profile.ns(["add.2"])
    profile.check_used()


def test_a_profile_of_another_program_is_refused(tmp_path: Path):
    profile = measured(tmp_path)
    profile.ns(["add.2", "jit(f)/add"])
    message = "none of its 1 ops, such as 'dot.1', is in this program, such as 'add.2'"
    with pytest.raises(ToolError, match=message) as caught:
        profile.check_used()
    assert str(caught.value).startswith(f"{tmp_path / 'measured.json'}: error: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "other/1"}, "'schema' is 'other/1', but must be 'stablehlo-tools/measured/1'"),
        ({"source": ""}, "'source' must say where these times were measured"),
        ({"ops": {}}, "'ops' must name at least one op"),
        ({"ops": [1]}, "'ops' must name at least one op"),
        (
            {"ops": {"dot.1": -1}},
            "the time of op 'dot.1' is -1, but must be a number of nanoseconds, 0 or more",
        ),
        ({"ops": {"dot.1": "3 us"}}, "the time of op 'dot.1' is '3 us', but must be a number"),
        ({"ops": {"dot.1": True}}, "the time of op 'dot.1' is True, but must be a number"),
        ({"ops": {"dot.1": float("nan")}}, "invalid JSON: NaN is not a JSON number"),
        ({"ops": {"dot.1": float("inf")}}, "invalid JSON: Infinity is not a JSON number"),
        ({"unit": "ns"}, "unknown field 'unit'; a profile has 'schema', 'source' and 'ops'"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, changes: dict[str, object], message: str):
    with pytest.raises(ToolError, match=re.escape(f"measured.json: error: {message}")):
        measured(tmp_path, **changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "invalid JSON: "), ("[]", "not a measured profile"), ("é", "invalid JSON: ")],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "measured.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ToolError, match=message):
        MeasuredProfile.load(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ToolError, match=r"none\.json: error: cannot read the file: No such file"):
        MeasuredProfile.load(tmp_path / "none.json")


def ops(path: Path, module: str | None = None) -> dict[str, float]:
    """Through the file that a user would write, as the profile is read back."""
    document = profile_from_trace(path, module)
    assert document["schema"] == SCHEMA
    read = document["ops"]
    assert isinstance(read, dict)
    return read


def test_a_trace_of_xla_cpu():
    """The least of the two devices' medians; of ynn_fusion's nine runs, 39356 and 39368 ns."""
    read = ops(TRACES)
    assert list(read) == sorted(read)
    assert read["ynn_fusion"] == pytest.approx(39356)
    assert read["psum_invariant.7"] == pytest.approx(69409)  # the other device waited: 134129
    assert "broadcast_multiply_fusion" not in read  # of the small program


def test_a_module_of_a_trace():
    assert ops(TRACES, "jit__lambda") == {"broadcast_multiply_fusion": pytest.approx(2689)}
    with pytest.raises(
        ToolError, match="no module 'jit_f' in this trace; it has jit__lambda, jit_"
    ):
        profile_from_trace(TRACES, "jit_f")


def test_a_profile_from_a_trace_is_read_back(tmp_path: Path):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(profile_from_trace(TRACES)))
    profile = MeasuredProfile.load(path)
    assert profile.ns(["while.9"]) == pytest.approx(148229)
    assert "jit_step" in profile.source


def trace(path: Path, events: Sequence[_Event]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": list(events)}).encode(), mtime=0))
    return path


def run(name: str, microseconds: float, pid: int = 1, **arguments: object) -> _Event:
    return {"ph": "X", "name": name, "pid": pid, "ts": 0, "dur": microseconds, "args": arguments}


def test_kernels_of_one_instruction_are_added_up(tmp_path: Path):
    events = [run("gemm", 3, hlo_op="dot.1"), run("split_k", 2, hlo_op="dot.1")] * 2
    assert ops(trace(tmp_path / "x.trace.json.gz", events)) == {"dot.1": 5000}


def test_kernels_count_once_where_an_event_stands_for_all(tmp_path: Path):
    kernels = [run("gemm", 3, hlo_op="dot.1"), run("split_k", 2, hlo_op="dot.1")]
    events = [*kernels, run("dot.1", 6, hlo_op="dot.1")]
    assert ops(trace(tmp_path / "x.trace.json.gz", events)) == {"dot.1": 6000}


def test_processes_are_devices_and_the_least_waits_for_nobody(tmp_path: Path):
    events = [run("all-reduce.1", 9 - pid, pid, hlo_op="all-reduce.1") for pid in (1, 2, 3)]
    assert ops(trace(tmp_path / "x.trace.json.gz", events)) == {"all-reduce.1": 6000}


def test_events_of_a_tpu_are_named_themselves(tmp_path: Path):
    events = [run("fusion.3", 2, hlo_category="fusion"), run("step 1", 99)]
    assert ops(trace(tmp_path / "x.trace.json.gz", events)) == {"fusion.3": 2000}


def test_all_hosts_of_the_newest_run_are_read(tmp_path: Path):
    runs = tmp_path / "plugins" / "profile"
    trace(runs / "2026_01_01_10_00_00" / "a.trace.json.gz", [run("old", 1, hlo_op="old")])
    trace(runs / "2026_01_02_09_00_00" / "a.trace.json.gz", [run("new", 5, hlo_op="new")])
    trace(runs / "2026_01_02_09_00_00" / "b.trace.json.gz", [run("new", 4, hlo_op="new")])
    assert ops(tmp_path) == {"new": 4000}


def test_a_trace_may_be_unpacked(tmp_path: Path):
    path = tmp_path / "x.trace.json"
    path.write_text(json.dumps({"traceEvents": [run("dot.1", 1, hlo_op="dot.1")]}))
    assert ops(path) == {"dot.1": 1000}


def refusal(path: Path) -> str:
    with pytest.raises(ToolError) as caught:
        profile_from_trace(path)
    rendered = str(caught.value)
    assert rendered.startswith(f"{path}: error: ")
    return rendered


def test_a_place_without_a_trace_is_refused(tmp_path: Path):
    assert "no such file or directory" in refusal(tmp_path / "none")
    assert "no *.trace.json.gz in it or below; jax.profiler.trace(" in refusal(tmp_path)
    (tmp_path / "x.xplane.pb").touch()
    assert "give the .trace.json.gz next to it instead" in refusal(tmp_path / "x.xplane.pb")


def test_a_trace_without_xla_ops_is_refused(tmp_path: Path):
    path = trace(tmp_path / "x.trace.json.gz", [run("python", 1), {"ph": "M"}])
    assert "no XLA op in this trace; trace a call that is already compiled" in refusal(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9],
            "x.trace.json.gz is not a trace: cannot inflate the file",
        ),
        (
            b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xff\xff",
            "x.trace.json.gz is not a trace: cannot inflate the file",
        ),
        (gzip.compress(b"{", mtime=0), "x.trace.json.gz is not a trace: invalid JSON"),
        (gzip.compress(b"[]", mtime=0), "x.trace.json.gz has no 'traceEvents'"),
        (b"", "x.trace.json.gz is not a trace: invalid JSON"),
    ],
)
def test_a_broken_trace_is_refused(tmp_path: Path, data: bytes, message: str):
    path = tmp_path / "x.trace.json.gz"
    path.write_bytes(data)
    assert message in refusal(path)
