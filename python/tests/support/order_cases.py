"""Small modules of several replicas, and verdicts on them, for the tests of order."""

from __future__ import annotations

from collections.abc import Sequence

from jax.export import Exported

from stablehlo_tools.api import transforming
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.program_set import JobOptions, ProgramJob
from stablehlo_tools.order.verdict import Decided, decide
from stablehlo_tools.passes.pipeline import Pipeline

DEFAULTS = JobOptions()
SUM = """({
    ^bb0(%one: tensor<E>, %other: tensor<E>):
      %sum = stablehlo.add %one, %other : tensor<E>
      stablehlo.return %sum : tensor<E>
    })"""


def all_reduce(result: str, value: str, kind: str = "tensor<4xf32>", devices: int = 2) -> str:
    """`result` is the sum of `value` over the replicas."""
    element = kind.removesuffix(">").split("x")[-1].removeprefix("tensor<")
    listed = list(range(devices))
    groups = f"replica_groups = dense<[{listed}]> : tensor<1x{devices}xi64>"
    sums = SUM.replace("E", element)
    return f'{result} = "stablehlo.all_reduce"({value}) <{{{groups}}}> {sums} : ({kind}) -> {kind}'


def main(body: str, *, arguments: str = "", results: str = "", replicas: int = 2) -> str:
    """A module of so many replicas."""
    grid = f"mhlo.num_partitions = 1 : i32, mhlo.num_replicas = {replicas} : i32"
    head = f"func.func @main({arguments}) -> ({results})"
    return f"module attributes {{{grid}}} {{\n{head} {{\n{body}\n}}\n}}"


def read(*programs: str) -> tuple[Artifact, ...]:
    """The artifacts of some modules, called p0, p1 …"""
    return tuple(artifact.parse(text.encode(), f"p{i}") for i, text in enumerate(programs))


def copies(exported: Exported, count: int, pipeline: str = "") -> tuple[Artifact, ...]:
    """So many artifacts of one export, each after a pipeline if one is given."""
    made: list[Artifact] = []
    for i in range(count):
        loaded = artifact.from_exported(exported, f"worker{i}")
        if pipeline:
            transforming.run_pipeline(loaded, Pipeline.parse(pipeline))
        made.append(loaded)
    return tuple(made)


def verdict(
    artifacts: Sequence[Artifact], options: JobOptions = DEFAULTS, *, strict: bool = False
) -> Decided:
    """The verdict on artifacts, whose calls are inlined in place."""
    issued = ProgramJob(tuple(artifacts), options).read()
    return decide([part.program for part in issued], strict=strict)


def rule(decided: Decided) -> str:
    """The rule that is broken; `ordered` where none is."""
    return "ordered" if decided.finding is None else decided.finding.rule
