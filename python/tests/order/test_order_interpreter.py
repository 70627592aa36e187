"""Verdicts of check-order against the reference interpreter, which runs two programs in text order.

Its rendezvous give up after three seconds and end the process: what hangs is seen as a death.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stablehlo_tools.artifacts.program_set import JobOptions, read_programs
from stablehlo_tools.cli.main import main
from stablehlo_tools.order.order_findings import Verdict
from stablehlo_tools.order.verdict import decide

RUN = """
import sys
from stablehlo_tools import bindings
context = bindings.new_context()
bindings.register_interpreter_dialect(context)
module = bindings.parse_module(open(sys.argv[1]).read(), context)
print(bindings.eval_module(module, []))
"""
TYPE = "tensor<2xi64>"
# On one channel the two would meet, and mix up their data.
SUM = f""""stablehlo.all_reduce"(%0) <{{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
  channel_handle = #stablehlo.channel_handle<handle = 3, type = 1>}}> ({{
  ^bb0(%a: tensor<i64>, %b: tensor<i64>):
    %s = stablehlo.add %a, %b : tensor<i64>
    stablehlo.return %s : tensor<i64>
  }}) : ({TYPE}) -> {TYPE}"""
GATHER = f""""stablehlo.all_gather"(%0) <{{all_gather_dim = 0 : i64,
  channel_handle = #stablehlo.channel_handle<handle = 4, type = 1>,
  replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}}> : ({TYPE}) -> tensor<4xi64>"""
OPS = {"sum": (SUM, TYPE), "gather": (GATHER, "tensor<4xi64>")}


def transfer(kind: str, channel: int, token: str) -> str:
    """A send from device 0 to 1 on channel 1, from 1 to 0 on channel 2, or the recv of one."""
    attributes = (
        f"channel_handle = #stablehlo.channel_handle<handle = {channel}, type = 1>, "
        "is_host_transfer = false, source_target_pairs = "
        f"dense<[[{channel - 1}, {2 - channel}]]> : tensor<1x2xi64>"
    )
    if kind == "send":
        types = f"({TYPE}, !stablehlo.token) -> !stablehlo.token"
        return f'"stablehlo.send"(%0, {token}) <{{{attributes}}}> : {types}'
    types = f"(!stablehlo.token) -> ({TYPE}, !stablehlo.token)"
    return f'"stablehlo.recv"({token}) <{{{attributes}}}> : {types}'


def body(steps: list[str]) -> tuple[str, str]:
    """The ops of a program that takes %0, and the types that it returns."""
    lines = ["%t0 = stablehlo.after_all : !stablehlo.token"]
    returned, types, token = ["%0"], [TYPE], "%t0"
    for i, step in enumerate(steps):
        if step in OPS:
            op, kind = OPS[step]
            lines.append(f"%r{i} = {op}")
            returned.append(f"%r{i}")
            types.append(kind)
            continue
        kind, channel = step.split()
        results = f"%t{i + 1}" if kind == "send" else f"%r{i}, %t{i + 1}"
        lines.append(f"{results} = {transfer(kind, int(channel), token)}")
        token = f"%t{i + 1}"
    lines.append(f"return {', '.join(returned)} : {', '.join(types)}")
    return "\n  ".join(lines), ", ".join(types)


def survives(directory: Path, ranks: list[list[str]]) -> bool:
    """Whether the interpreter runs the two programs to their end."""
    functions: list[str] = []
    types: list[str] = []
    for rank, steps in enumerate(ranks):
        ops, returned = body(steps)
        functions.append(f"func.func @rank{rank}(%0: {TYPE}) -> ({returned}) {{\n  {ops}\n}}")
        types.append(returned)
    count = sum(text.count("tensor<") for text in types)
    results = ", ".join(f"%r#{i}" for i in range(count))
    main = f"""func.func @main() -> ({", ".join(types)}) {{
  %a = stablehlo.constant dense<[7, 9]> : {TYPE}
  %b = stablehlo.constant dense<[1, 2]> : {TYPE}
  %r:{count} = "interpreter.run_parallel"(%a, %b) {{programs = [[@rank0], [@rank1]]}}
    : ({TYPE}, {TYPE}) -> ({", ".join(types)})
  return {results} : {", ".join(types)}
}}"""
    path = directory / "parallel.mlir"
    path.write_text("\n".join([*functions, main]))
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0 or "imed out" in done.stderr, done.stderr
    return done.returncode == 0


def judged(directory: Path, ranks: list[list[str]]) -> Verdict:
    """What check-order says of the two programs, each in a token chain where it sums or gathers."""
    paths: list[str] = []
    for rank, steps in enumerate(ranks):
        ops, returned = body(steps)
        path = directory / f"rank{rank}.mlir"
        path.write_text(f"func.func @main(%0: {TYPE}) -> ({returned}) {{\n  {ops}\n}}")
        paths.append(str(path))
    if any(step in OPS for steps in ranks for step in steps):
        for path in paths:
            assert main(["opt", path, "-p", "thread-tokens", "-o", path]) == 0
    return decide(read_programs(paths, JobOptions())).verdict


@pytest.mark.parametrize(
    ("ranks", "ends"),
    [
        ([["sum", "gather"], ["sum", "gather"]], True),
        ([["sum", "gather"], ["gather", "sum"]], False),
        ([["send 1", "recv 2"], ["recv 1", "send 2"]], True),
        ([["recv 2", "send 1"], ["recv 1", "send 2"]], False),
    ],
    ids=["same order", "opposite order", "ping-pong", "both receive first"],
)
def test_interpreter_agrees(tmp_path: Path, ranks: list[list[str]], ends: bool) -> None:
    assert (judged(tmp_path, ranks) is Verdict.ORDERED) == ends
    # A rank that comes late for a rendezvous ends the process too, but not three times.
    assert any(survives(tmp_path, ranks) for _ in range(3 if ends else 1)) == ends
