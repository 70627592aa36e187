"""Compares a set with its origin in exact arithmetic: both compute modulo a prime (`verify.exact`).

The set is mapped to ranks that compute with residues, in the same field as the original:

    "type": "tensor<4x8xf32>"                       ==>  "type": "tensor<4x8xi64>"
    %y = stablehlo.tanh %x : tensor<4x8xf32>        ==>  %y = call @field_tanh(%x)
    stablehlo.send(%y, %t) on channel 3             ==>  the same, of residues

One process runs both on the same residues, the ranks in turn as far as their messages allow. A rank
adds its terms in another order, which changes no bit. So each difference is an error. This includes
exchanged operands, residuals, messages or gradients, which `check-mpmd` cannot detect.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from stablehlo_tools import bindings
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.ir.async_calls import lower_async_calls
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.mpmd.manifest import NAME, Manifest, ManifestEntry, encode_manifest
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.running.origin_inputs import check_origin, platform_inputs
from stablehlo_tools.mpmd.running.rank_child import PACKAGE, about_the_set
from stablehlo_tools.verify import Options, Verification
from stablehlo_tools.verify.exact.entered_branches import Branching, write_probes
from stablehlo_tools.verify.exact.field import Field
from stablehlo_tools.verify.exact.host_functions import HostFunction
from stablehlo_tools.verify.exact.mapped_module import field_type
from stablehlo_tools.verify.exact.mapping import map_into_field
from stablehlo_tools.verify.exact.programs import FieldPlan, FieldRun, plan_in_field
from stablehlo_tools.verify.run_plan import cpu_index
from stablehlo_tools.verify.signatures import count_platform_inputs
from stablehlo_tools.verify.verification import run_plan
from stablehlo_tools.verify.verification_job import SIDES, Side


def verify_in_field(ranks: RankSet, original: Artifact, options: Options) -> Verification:
    """Runs both on the same random residues and compares every output bit for bit.

    Raises UnmappedError for an op that has no form in the field. Raises ToolError for programs that
    cannot be run, ranks that deadlock, and an original that the set was not made from.
    """
    started = time.monotonic()
    original.check_values_known()
    plan = plan_set(ranks, original)
    names: dict[Side, str] = {"before": original.name, "after": ranks.name}
    platform = cpu_index({"before": original})
    try:
        child = f"{PACKAGE}.exact_process"
        return run_plan(plan, names, options, started, platform=platform, child=child)
    except ToolError as error:
        raise about_the_set(error) from None


def plan_set(ranks: RankSet, original: Artifact) -> FieldPlan:
    """Maps both into one field: the original is `before`, and the set is in files."""
    modules = [program.module for program in ranks.programs]
    plan = plan_in_field(dict.fromkeys(SIDES, original), partitioned=False, beside=modules)
    run, signature, manifest = plan.runs["before"].run, plan.signature, ranks.manifest
    with naming(original.name):
        numbers = check_origin(
            manifest, original, signature.inputs, signature.outputs, run.instances
        )
        platforms = range(platform_inputs(manifest))
        if len(platforms) > count_platform_inputs(signature.inputs):
            raise ToolError(
                "the set needs the index of a platform, but this program is for one platform"
            )
    code, functions, branchings = map_set(ranks, plan.field)
    taken: dict[Side, tuple[int, ...]] = {"before": (*platforms, *numbers)}
    run = replace(run, replicas=1, partitions=manifest.devices, taken=taken, programs={})
    runs = {**plan.runs, "after": FieldRun(run, functions, branchings)}
    # the degree of a composition of ranks is unknown
    return replace(plan, runs=runs, files=code, degree=None)


def map_set(
    ranks: RankSet, field: Field
) -> tuple[dict[str, bytes], tuple[HostFunction, ...], tuple[Branching, ...]]:
    """Returns the files of the mapped set by name, its host functions, and its branches and loops.

    Raises UnmappedError, about the program of the rank, for an op that has no form in the field.
    """
    code: dict[str, bytes] = {}
    functions: list[HostFunction] = []
    branchings: list[Branching] = []
    for rank, program in enumerate(ranks.programs):
        module = copy_module(program.module)
        with naming(program.name):
            lower_async_calls(module)
            with module.context, ir.Location.unknown():
                branchings += write_probes(module, functions)
            map_into_field(module, field, functions)
        code[f"rank_{rank}.mlirbc"] = bindings.write_bytecode(module)
    with ranks.programs[0].module.context, ir.Location.unknown():
        code[NAME] = encode_manifest(_map_manifest(ranks.manifest, list(code))).encode()
    return code, tuple(functions), tuple(branchings)


def _map_manifest(manifest: Manifest, files: Sequence[str]) -> Manifest:
    """Returns the manifest of the mapped set, whose programs are these files."""

    def map_type(type_: str) -> str:
        return str(field_type(ir.Type.parse(type_)))

    def entries(given: Sequence[ManifestEntry]) -> tuple[ManifestEntry, ...]:
        return tuple(replace(entry, type=map_type(entry.type)) for entry in given)

    return replace(
        manifest,
        ranks=tuple(
            replace(rank, program=file) for rank, file in zip(manifest.ranks, files, strict=True)
        ),
        inputs=entries(manifest.inputs),
        outputs=entries(manifest.outputs),
        transfers=tuple(replace(each, type=map_type(each.type)) for each in manifest.transfers),
    )
