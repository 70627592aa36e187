"""The programs that run when two artifacts are compared in exact arithmetic.

before                BEFORE without shardings outside manual computations: the reference
after                 AFTER as XLA's partitioner divides it
after_unsharded       AFTER without them; runs if `after` differs, to check the partitioner
before_partitioned    BEFORE as XLA's partitioner divides it, once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stablehlo_tools import bindings
from stablehlo_tools.analysis.argument_ranges import steering_arguments
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import naming
from stablehlo_tools.ir.async_calls import lower_async_calls, lower_async_regions
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.shardings_dropped import drop_shardings
from stablehlo_tools.verify.comparison import OutputComparison
from stablehlo_tools.verify.element_types import ElementKind, element_type
from stablehlo_tools.verify.exact.degree import degree_of
from stablehlo_tools.verify.exact.entered_branches import Branching, write_probes
from stablehlo_tools.verify.exact.field import Field
from stablehlo_tools.verify.exact.host_functions import HostFunction
from stablehlo_tools.verify.exact.inputs import tempting_scalars
from stablehlo_tools.verify.exact.mapping import field_of, map_into_field
from stablehlo_tools.verify.run_plan import (
    common_forms,
    common_grid,
    common_signature,
    cpu_index,
    make_run,
    runnable_module,
)
from stablehlo_tools.verify.signatures import ProgramSignature, SignatureValue
from stablehlo_tools.verify.verification_job import SIDES, BackendRun, Side

PARTIAL = "partial.pickle"  # the child's answer before it runs `before_partitioned`


@dataclass(frozen=True)
class FieldRun:
    """One program: its run, its host functions, and the branches that the host counts."""

    run: BackendRun
    host_functions: tuple[HostFunction, ...]
    branchings: tuple[Branching, ...]


@dataclass(frozen=True)
class FieldPlan:
    """Programs by name, and their inputs; `files` are written to the child's directory."""

    field: Field
    runs: Mapping[str, FieldRun]
    files: Mapping[str, bytes]
    signature: ProgramSignature
    scalars: tuple[int, ...]
    steering: tuple[int, ...]
    degree: int | None  # the larger one of both programs, or None

    @property
    def devices(self) -> int:
        """The largest number of devices of a program."""
        return max(each.run.replicas * each.run.partitions for each in self.runs.values())


@dataclass(frozen=True)
class FieldRequest:
    """The request to the child: a plan, and its inputs.

    `fixed` maps numbers of inputs to values. `together`: programs are compiled at the same time.
    """

    plan: FieldPlan
    fixed: Mapping[int, float]
    seed: int
    trials: int
    together: bool


@dataclass(frozen=True)
class Exactness:
    """The further facts of an answer in exact arithmetic.

    `degree` is that of the programs as polynomials of their inputs, or None (see `degree_of`).
    `not_entered` are the branches and loops of each program that no input entered; `branches`
    counts all of them. `one_sided` are the marked comparisons of a twin without both outcomes.
    `wrongly_partitioned` are the outputs that XLA's partitioner makes wrong.
    """

    prime: int
    degree: int | None
    branches: Mapping[Side, int]
    not_entered: Mapping[Side, tuple[str, ...]]
    one_sided: Mapping[Side, tuple[int, ...]]
    wrongly_partitioned: Mapping[Side, tuple[int, ...]]

    def chance(self, inputs: int) -> float | None:
        """Returns a bound on the probability that an element agrees in programs that differ.

        Assumes that hashes are random functions; None without a degree."""
        return None if self.degree is None else (self.degree / self.prime) ** inputs

    def to_json(self, inputs: int) -> dict[str, Any]:
        """Returns the fields as plain data, without `one_sided`, which a twin reports."""
        fields = {**asdict(self), "chance": self.chance(inputs)}
        del fields["one_sided"]
        return fields


@dataclass(frozen=True)
class FieldAnswer:
    """The comparison of the outputs for the last of `inputs` inputs; all else is over all inputs.

    `zero` are the outputs that are always zero in BEFORE."""

    outputs: tuple[OutputComparison, ...]
    inputs: int
    zero: tuple[int, ...]
    exactness: Exactness


def plan_in_field(
    artifacts: Mapping[Side, Artifact],
    limits: Sequence[int] = (),
    *,
    partitioned: bool = True,
    beside: Sequence[ir.Module] | None = None,
) -> FieldPlan:
    """Maps both artifacts into one field; `partitioned`: with `before_partitioned`.

    If modules are given in `beside`, it maps only BEFORE, into a field that also suits these.
    Raises UnmappedError if an op has no form in the field, and ToolError, with the name of the
    file, if the two cannot be run or compared.
    """
    platform = cpu_index(artifacts)
    modules: dict[Side, ir.Module] = {}
    for side, artifact in artifacts.items():
        with naming(artifact.name):
            modules[side] = runnable_module(artifact, platform)
            lower_async_calls(modules[side])
            lower_async_regions(modules[side])
    signature, taken = common_signature(artifacts, modules, limits)
    grid = common_grid(artifacts, modules)
    forms = common_forms(artifacts, modules, grid)
    whole = replace(
        make_run(modules, signature, grid, forms),
        inputs=tuple(map(_in_field, signature.inputs)),
        outputs=tuple(map(_in_field, signature.outputs)),
    )
    field = field_of([*modules.values(), *(beside or ())])
    degrees = [degree_of(module, field.prime) for module in modules.values()]
    runs: dict[str, FieldRun] = {}

    def add(name: str, side: Side, module: ir.Module, devices: int) -> None:
        functions: list[HostFunction] = []
        with naming(artifacts[side].name):
            with module.context, ir.Location.unknown():
                branchings = write_probes(module, functions)
            map_into_field(module, field, functions)
            run = replace(
                whole,
                partitions=devices,
                forms={"before": forms[side]},
                taken={"before": taken[side]},
                programs={"before": bindings.write_bytecode(module)},
            )
            runs[name] = FieldRun(run, tuple(functions), tuple(branchings))

    scalars = tempting_scalars(modules["before"])
    steering = tuple(taken["before"][i] for i in steering_arguments(modules["before"]))
    for side in SIDES if beside is None else SIDES[:1]:
        unsharded = copy_module(modules[side])
        devices = (
            drop_shardings(unsharded, grid.num_partitions) if forms[side] == "partitioned" else None
        )
        if devices is not None:
            add("before" if side == "before" else "after_unsharded", side, unsharded, devices)
        if devices is None or side == "after":
            add(side, side, modules[side], grid.num_partitions)
        elif partitioned:
            add("before_partitioned", side, modules[side], grid.num_partitions)
    degree = None if None in degrees else max(d for d in degrees if d is not None)
    return FieldPlan(field, runs, {}, signature, tuple(scalars), steering, degree)


def _in_field(value: SignatureValue) -> SignatureValue:
    """Returns a value with the element type of its residues."""
    if value.role == "nothing":
        return replace(value, element="i1")
    element = element_type(value.element)
    if element is None or not element.is_inexact:
        return value
    return replace(value, element="complex<f64>" if element.kind is ElementKind.COMPLEX else "i64")
