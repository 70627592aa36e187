"""The programs that run when two artifacts are compared in exact arithmetic.

before                BEFORE without shardings outside of manual computations: the reference
after                 AFTER as XLA's partitioner divides it
after_unsharded       AFTER without them; runs if `after` differs, to find out whose fault it is
before_partitioned    BEFORE as XLA's partitioner divides it, once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stablehlo_tools import bindings
from stablehlo_tools.analysis.argument_ranges import Range, argument_ranges, steering_arguments
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.exported import argument_leaves
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.async_calls import lower_async_calls
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.verify.element_types import Kind, element_type
from stablehlo_tools.verify.exact.branches import Branching, write_probes
from stablehlo_tools.verify.exact.field import Field
from stablehlo_tools.verify.exact.host_functions import HostFunction
from stablehlo_tools.verify.exact.inputs import tempting_scalars
from stablehlo_tools.verify.exact.mapping import field_of, map_into_field
from stablehlo_tools.verify.exact.shardings import drop_shardings
from stablehlo_tools.verify.job import SIDES, Run, Side, run_of
from stablehlo_tools.verify.plan import (
    agreed,
    common_forms,
    common_grid,
    cpu_index,
    each,
    in_range,
    runnable_module,
    shared,
)
from stablehlo_tools.verify.signatures import (
    Signature,
    Value,
    exported_signature,
    module_signature,
    uncounted,
)


@dataclass(frozen=True)
class FieldRun:
    """One program: how it runs, and what its host computes and counts."""

    run: Run
    taken: tuple[int, ...]  # of the inputs
    host_functions: tuple[HostFunction, ...]
    branchings: tuple[Branching, ...]

    @staticmethod
    def of(fields: dict[str, Any]) -> FieldRun:
        """The run that has these fields."""
        return FieldRun(
            run_of(fields["run"]),
            tuple(fields["taken"]),
            tuple(map(HostFunction.of, fields["host_functions"])),
            tuple(map(Branching.of, fields["branchings"])),
        )


@dataclass(frozen=True)
class FieldPlan:
    """Programs by name, the bytes of each, and what they are given."""

    field: Field
    runs: Mapping[str, FieldRun]
    code: Mapping[str, bytes]
    signature: Signature
    scalars: tuple[int, ...]
    steering: tuple[int, ...]

    @property
    def devices(self) -> int:
        """How many devices the programs need at most."""
        return max(each.run.replicas * each.run.partitions for each in self.runs.values())

    def to_json(self) -> dict[str, Any]:
        """What the child needs to know but for the bytes."""
        return {
            "prime": self.field.prime,
            "runs": {name: asdict(run) for name, run in self.runs.items()},
            "inputs": [asdict(value) for value in self.signature.inputs],
            "outputs": [asdict(value) for value in self.signature.outputs],
            "scalars": list(self.scalars),
            "steering": list(self.steering),
        }


def plan_in_field(
    artifacts: Mapping[Side, Artifact], ranges: Sequence[Range] = (), *, partitioned: bool = True
) -> FieldPlan:
    """Maps both artifacts into one field; `partitioned`: with `before_partitioned`.

    Raises UnmappedError for an op that has no form there, and ToolError, with the name of the file
    that it is about, if the two cannot be run or compared.
    """
    platform = cpu_index(artifacts)
    modules = each(artifacts, lambda _, artifact: _module(artifact, platform))
    signatures = each(artifacts, lambda side, artifact: _signature(artifact, modules[side]))
    signature = agreed(artifacts, signatures)
    taken = each(artifacts, lambda s, a: _taken(a, modules[s], len(signature.inputs)))
    found = dict(zip(taken["before"], ranges or argument_ranges(modules["before"]), strict=True))
    of_inputs = [found.get(i, Range()) for i in range(len(signature.inputs))]
    signature = Signature(in_range(signature.inputs, of_inputs), signature.outputs)
    grid = common_grid(artifacts, modules)
    forms = common_forms(artifacts, modules, grid)
    instances = grid.num_replicas if forms["before"] == "partitioned" else grid.size
    alone = ((0,),) * len(signature.inputs)
    whole = Run(
        "cpu",
        {},
        tuple(map(_in_field, signature.inputs)),
        tuple(map(_in_field, signature.outputs)),
        grid.num_replicas,
        grid.num_partitions,
        instances,
        alone if instances == 1 else shared(modules, signature, grid, instances),
    )
    field = field_of(modules.values())
    runs: dict[str, FieldRun] = {}
    code: dict[str, bytes] = {}

    def add(name: str, side: Side, module: ir.Module, devices: int) -> None:
        def mapped(_: Side, __: Artifact) -> None:
            functions: list[HostFunction] = []
            with module.context, ir.Location.unknown():
                branchings = write_probes(module, functions)
            map_into_field(module, field, functions)
            inputs = tuple(whole.inputs[i] for i in taken[side])
            run = replace(whole, inputs=inputs, partitions=devices, forms={"before": forms[side]})
            runs[name] = FieldRun(run, taken[side], tuple(functions), tuple(branchings))
            code[name] = bindings.write_bytecode(module)

        each({side: artifacts[side]}, mapped)

    scalars = tempting_scalars(modules["before"])
    steering = tuple(taken["before"][i] for i in steering_arguments(modules["before"]))
    for side in SIDES:
        unsharded = copy_module(modules[side])
        devices = drop_shardings(unsharded) if forms[side] == "partitioned" else None
        if devices is not None:
            add("before" if side == "before" else "after_unsharded", side, unsharded, devices)
        if devices is None or side == "after":
            add(side, side, modules[side], grid.num_partitions)
        elif partitioned:
            add("before_partitioned", side, modules[side], grid.num_partitions)
    return FieldPlan(field, runs, code, signature, tuple(scalars), steering)


def _module(artifact: Artifact, platform: int) -> ir.Module:
    module = runnable_module(artifact, platform)
    lower_async_calls(module)
    return module


def _taken(artifact: Artifact, module: ir.Module, count: int) -> tuple[int, ...]:
    """Which of `count` inputs the module takes: that of an export lacks those that it does not
    use."""
    if artifact.exported is None:
        return tuple(range(count))
    leaves = argument_leaves(artifact.exported, entry_function(module))
    first = count - len(artifact.exported.in_avals)
    return (*range(first), *(first + leaf for leaf in leaves.values()))


def _signature(artifact: Artifact, module: ir.Module) -> Signature:
    """That of the module, with the names and keys that callers of an export see."""
    of_module = module_signature(module)
    if artifact.exported is None:
        return of_module
    of_calls = exported_signature(artifact)
    first = uncounted(of_module.inputs)
    return Signature((*of_module.inputs[:first], *of_calls.inputs), of_calls.outputs)


def _in_field(value: Value) -> Value:
    """How the residues of a value are stored."""
    if value.role == "nothing":
        return replace(value, element="i1")
    element = element_type(value.element)
    if element is None or not element.is_inexact:
        return value
    return replace(value, element="complex<f64>" if element.kind is Kind.COMPLEX else "i64")
