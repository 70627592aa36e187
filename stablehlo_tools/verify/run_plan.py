"""Plans the run of two artifacts: their common signature, the devices, and a program for each side.

All modules are run below JAX. The signature of a jax.export artifact is the one that its callers
see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from stablehlo_tools import bindings
from stablehlo_tools.analysis.argument_ranges import index_limits, steering_arguments
from stablehlo_tools.analysis.collectives import GRID, stated_grid
from stablehlo_tools.analysis.entry import erase_groups_of_one
from stablehlo_tools.analysis.replica_groups import ProcessGrid
from stablehlo_tools.analysis.shardings import SHARDING, sharding_per_value, without_parts
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.exported import argument_leaves
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.dialect.traits import COLLECTIVES, DEVICE_IDS
from stablehlo_tools.ir.async_calls import (
    find_async_starts,
    is_waited_for_beside,
    lower_async_calls,
)
from stablehlo_tools.ir.builder import Builder, constrain_sharding, shape_of
from stablehlo_tools.ir.gspmd_import import write_mesh
from stablehlo_tools.ir.shardings_dropped import drop_shardings
from stablehlo_tools.ir.shardy_round_trip import restore_shardy, set_entry
from stablehlo_tools.ir.values import stand_in
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function, ops_where, symbol_name
from stablehlo_tools.verify.device_grid import inferred_grid, is_partitioned, shared_inputs
from stablehlo_tools.verify.interpreter_program import interpreter_grid, interpreter_module
from stablehlo_tools.verify.signatures import (
    ProgramSignature,
    check_agreement,
    count_platform_inputs,
    exported_signature,
    module_signature,
)
from stablehlo_tools.verify.verification_job import SIDES, BackendRun, Form, Side

_LOWER_CHLO = "builtin.module(func.func(chlo-legalize-to-stablehlo))"
_FORM_MEANINGS: Mapping[Form, str] = {
    "partitioned": "a whole program, divided by its shardings",
    "per_device": "the program of each device",
}


@dataclass(frozen=True)
class BackendPlan:
    """A run on one backend. `steering` are the inputs, integer scalars, that decide branches and
    trip counts."""

    run: BackendRun
    steering: tuple[int, ...] = ()


_WHOLE = "whole"  # a mesh, and its axis
_OF_SEVERAL = COLLECTIVES | DEVICE_IDS | {MANUAL_COMPUTATION}


def no_input(number: int, value: float, count: int) -> ToolError:
    """Returns the error for a value of an input that does not exist."""
    said = f"there is no input {number} to set: the program has {count}, counted from 0"
    return ToolError(said, instead=(f"{number}={value:g}", f"{count - 1}={value:g}"))


def make_plan(
    artifacts: Mapping[Side, Artifact], backend: str, limits: Sequence[int] = ()
) -> BackendPlan:
    """Plans a run of two artifacts on `cpu` or `interpreter`.

    Indices are below `limits`, or else below the limits that `before` shows. Raises ToolError, with
    the name of the file, if they cannot be run or compared: the signatures or device counts differ,
    or there are symbolic sizes or tokens.
    """
    artifacts = each(artifacts, lambda _, artifact: _with_plain_collectives(artifact, backend))
    platform = cpu_index(artifacts)
    interpreted = backend == "interpreter"
    modules = each(
        artifacts, lambda _, artifact: runnable_module(artifact, platform, interpreted=interpreted)
    )
    if interpreted:  # it has the signature of the modules, not of the exports
        artifacts = each(artifacts, lambda side, a: replace(a, exported=None))
    signature, taken = common_signature(artifacts, modules, limits)
    grid = common_grid(artifacts, modules)
    steering = tuple(taken["before"][i] for i in steering_arguments(modules["before"]))
    programs: dict[Side, bytes]
    forms: dict[Side, Form]
    if interpreted:
        whole = grid
        grids = each(artifacts, lambda side, _: interpreter_grid(modules[side], whole))
        check_equal(artifacts, "number of devices", each(artifacts, lambda s, _: grids[s].size))
        grid = grids["before"]
        forms = dict.fromkeys(SIDES, "interpreter")
        programs = {s: interpreter_module(m, signature, grid) for s, m in modules.items()}
    else:
        forms = common_forms(artifacts, modules, grid)
        programs = {side: bindings.write_bytecode(m) for side, m in modules.items()}
    run = make_run(modules, signature, grid, forms)
    return BackendPlan(replace(run, backend=backend, taken=taken, programs=programs), steering)


def make_run(
    modules: Mapping[Side, ir.Module],
    signature: ProgramSignature,
    grid: ProcessGrid,
    forms: Mapping[Side, Form],
) -> BackendRun:
    """Returns a run of bare modules on a grid, on XLA:CPU, without programs.

    Instances share an input if either program says so."""
    instances = grid.num_replicas if forms["before"] == "partitioned" else grid.size
    shared: Iterable[tuple[int, ...]] = ((0,),) * len(signature.inputs)
    if instances > 1:
        sides = [shared_inputs(m, signature.inputs, grid, instances) for m in modules.values()]
        shared = (
            tuple(min(pair) for pair in zip(one, other, strict=True))
            for one, other in zip(*sides, strict=True)
        )
    return BackendRun(
        "cpu",
        forms,
        signature.inputs,
        signature.outputs,
        grid.num_replicas,
        grid.num_partitions,
        instances,
        tuple(shared),
    )


def common_signature(
    artifacts: Mapping[Side, Artifact],
    modules: Mapping[Side, ir.Module],
    limits: Sequence[int] = (),
) -> tuple[ProgramSignature, dict[Side, tuple[int, ...]]]:
    """Returns the common signature, as callers of an export see it, and each module's inputs.

    The latter are numbers of inputs of the signature. Indices are below `limits`, or else below the
    limits that `before` shows. Raises ToolError if the signatures differ.
    """
    signatures = each(artifacts, lambda side, artifact: _signature(artifact, modules[side]))
    signature = merge_signatures(artifacts, signatures)
    taken = each(artifacts, lambda s, a: _input_numbers(a, modules[s], len(signature.inputs)))
    below = dict(zip(taken["before"], limits or index_limits(modules["before"]), strict=True))
    inputs = [replace(value, below=below.get(i, 0)) for i, value in enumerate(signature.inputs)]
    return ProgramSignature(tuple(inputs), signature.outputs), taken


def _input_numbers(artifact: Artifact, module: ir.Module, count: int) -> tuple[int, ...]:
    """Returns the numbers of the inputs that the module has; an export drops unused ones."""
    if artifact.exported is None:
        return tuple(range(count))
    leaves = argument_leaves(artifact.exported, entry_function(module))
    first = count - len(artifact.exported.in_avals)
    return (*range(first), *(first + leaf for leaf in leaves.values()))


def _signature(artifact: Artifact, module: ir.Module) -> ProgramSignature:
    """Returns the module's signature, with the names and keys that callers of an export see."""
    of_module = module_signature(module)
    if artifact.exported is None:
        return of_module
    of_calls = exported_signature(artifact)
    first = count_platform_inputs(of_module.inputs)
    return ProgramSignature((*of_module.inputs[:first], *of_calls.inputs), of_calls.outputs)


def _with_plain_collectives(artifact: Artifact, backend: str) -> Artifact:
    """Returns the artifact without explicit asynchronous collectives that the backend cannot run.

    XLA:CPU runs a start if its dones are in the same block; the interpreter runs none.
    """
    starts = find_async_starts(artifact.module)
    if not starts or (backend == "cpu" and all(map(is_waited_for_beside, starts))):
        return artifact
    copy = artifact.copy()
    lower_async_calls(copy.module)
    return copy


def common_forms(
    artifacts: Mapping[Side, Artifact], modules: Mapping[Side, ir.Module], grid: ProcessGrid
) -> dict[Side, Form]:
    """Returns the form of each module: `partitioned` if it has shardings, else `per_device`.

    Raises ToolError if the forms differ on several partitions.
    """
    forms: dict[Side, Form] = {
        side: "partitioned" if is_partitioned(module) else "per_device"
        for side, module in modules.items()
    }
    if grid.num_partitions > 1:
        meanings = each(artifacts, lambda side, _: _FORM_MEANINGS[forms[side]])
        check_equal(artifacts, "meaning of the inputs", meanings)
    return forms


def merge_signatures(
    artifacts: Mapping[Side, Artifact], signatures: Mapping[Side, ProgramSignature]
) -> ProgramSignature:
    """Returns the signature of `before`, with output names that only `after` has.

    Raises ToolError if the signatures differ or there are no outputs."""
    before, after = signatures["before"], signatures["after"]
    with naming(artifacts["after"].name):
        check_agreement(before, after, (artifacts["before"].name, artifacts["after"].name))
    if all(value.role == "nothing" for value in before.outputs):
        with naming(artifacts["before"].name):
            raise ToolError("the programs have no outputs to compare")
    outputs = tuple(
        replace(one, name=one.name or other.name)
        for one, other in zip(before.outputs, after.outputs, strict=True)
    )
    return ProgramSignature(before.inputs, outputs)


def common_grid(
    artifacts: Mapping[Side, Artifact], modules: Mapping[Side, ir.Module]
) -> ProcessGrid:
    """Returns the grid that the modules state, or else the smallest grid of their collectives.

    A program for one device runs on many as well: each computes all of it. Raises ToolError if the
    grids differ."""
    for one, other in (SIDES, SIDES[::-1]):
        _state_grid_of(modules[one], modules[other])
    stated = each(artifacts, lambda side, _: stated_grid(modules[side]))
    spoken = each(artifacts, lambda side, _: stated[side] or inferred_grid(modules[side]))
    larger = ProcessGrid(
        max(grid.num_replicas for grid in spoken.values()),
        max(grid.num_partitions for grid in spoken.values()),
    )
    known = {grid for grid in stated.values() if grid is not None}
    if known and known != {larger}:
        counts: dict[Side, str] = {
            side: str(grid.num_partitions)
            if grid.num_replicas == 1
            else f"{grid.num_replicas} replicas of {grid.num_partitions} partitions"
            for side, grid in spoken.items()
        }
        check_equal(artifacts, "number of devices", counts)
    return larger


def _state_grid_of(module: ir.Module, other: ir.Module) -> None:
    """States the grid of another module in one for a single device, in place."""
    own, larger = stated_grid(module), stated_grid(other)
    is_one = own is None or own.size == 1
    if not is_one or larger is None or larger.num_partitions == 1:
        return
    # The program of each of several devices is another one than the whole program.
    if not is_partitioned(other):
        return
    if ops_where(module.operation, lambda op: op.name in _OF_SEVERAL):
        return
    # jax states shardings of random keys, over a mesh without axes.
    if is_partitioned(module) and drop_shardings(module, 1) is None:
        return
    for name in GRID:
        if name in other.operation.attributes:
            text = str(other.operation.attributes[name])
            module.operation.attributes[name] = ir.Attribute.parse(text, module.context)
    # A sharding says that it is the whole program, not that of each device.
    main = entry_function(module)
    first = Function(main).yields[0]
    write_mesh(module, _WHOLE, ((_WHOLE, larger.size),))
    dims = ", ".join(["{}"] * len(shape_of(first)))
    sharding = ir.Attribute.parse(f"#sdy.sharding<@{_WHOLE}, [{dims}]>", module.context)
    set_entry(main, "res_attrs", 0, SHARDING, sharding)


def runnable_module(artifact: Artifact, platform: int, *, interpreted: bool = False) -> ir.Module:
    """Copies a module to a new context; renames its entry to `main` and fixes the platform index.

    XLA:CPU ends the process if the choice between platforms is left open. The interpreter does not
    have the chlo dialect, which is lowered for it.
    """
    context = bindings.new_context()
    module = bindings.parse_module(bindings.write_bytecode(artifact.module), context)
    restore_shardy(module)  # XLA ends the process on manual computations in the form of jax 0.4
    erase_groups_of_one(module)
    if interpreted:
        bindings.parse_pass_pipeline(_LOWER_CHLO, context).run(module.operation)
    entry = entry_function(module)
    name = symbol_name(entry)
    with context, ir.Location.unknown():
        if name != "main":
            ir.SymbolTable.replace_all_symbol_uses(name, "main", module.operation)
            ir.SymbolTable.set_symbol_name(entry, "main")
        block = Function(entry).body
        build = Builder(ir.InsertionPoint.at_block_begin(block), ir.Location.unknown())
        for argument, value in zip(block.arguments, module_signature(module).inputs, strict=True):
            if value.role == "platform":
                argument.replace_all_uses_with(build.splat_like(platform, argument))
    _sum_parts(module)
    return module


def _sum_parts(module: ir.Module) -> None:
    """Removes unreduced shardings outside manual computations, and adds up their partial sums.

    Before and after a pass, devices may hold different partial sums of one value; whole sums can be
    compared."""
    for op in ops_where(module.operation, lambda op: True):
        if op.name != MANUAL_COMPUTATION:
            for name in ("sdy.sharding", "sharding", "arg_attrs", "res_attrs"):
                if name in op.attributes:
                    op.attributes[name] = without_parts(op.attributes[name])
            continue
        ins, outs = (sharding_per_value(op.attributes[f"{s}_shardings"]) for s in ("in", "out"))
        for number, sharding in enumerate(ins):
            if without_parts(sharding) != sharding:
                point = ir.InsertionPoint(op)
                op.operands[number] = constrain_sharding(op.operands[number], sharding, point)
        for result, sharding in zip(op.results, outs, strict=True):
            if (whole := without_parts(sharding)) != sharding:
                # A constraint without parts makes the partitioner reduce here.
                stand_in(result, constrain_sharding(result, whole, ir.InsertionPoint.after(op)))


def cpu_index(artifacts: Mapping[Side, Artifact]) -> int:
    """Returns the index of the CPU in the first platform list that has it; 0 if none has."""
    lists = (a.exported.platforms for a in artifacts.values() if a.exported is not None)
    return next((platforms.index("cpu") for platforms in lists if "cpu" in platforms), 0)


def check_equal[T](artifacts: Mapping[Side, Artifact], what: str, values: Mapping[Side, T]) -> None:
    """Raises ToolError if the values of both artifacts differ; `what` names them."""
    if values["before"] != values["after"]:
        places = ", ".join(f"{values[side]} in {artifacts[side].name}" for side in SIDES)
        with naming(artifacts["after"].name):
            raise ToolError(f"the two programs differ in the {what}: {places}")


def each[T](
    artifacts: Mapping[Side, Artifact], function: Callable[[Side, Artifact], T]
) -> dict[Side, T]:
    """Calls a function for both sides; its ToolErrors get the name of that side's file."""
    results: dict[Side, T] = {}
    for side, artifact in artifacts.items():
        with naming(artifact.name):
            results[side] = function(side, artifact)
    return results
