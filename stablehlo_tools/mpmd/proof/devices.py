"""Whether the program of a rank runs on the devices of the rank, and on no others: M1.

Rank r has the devices from r * count on. Where these are several, `main` is one manual computation
over a mesh whose slowest axis are the ranks, which divides no value; what functions communicate
stays within each rank, and is the same for all ranks.

What one device of a rank exchanges with those of other ranks, as a program of its own.

By M1 the collectives of a function stay within a rank, and its devices run one program: they issue
the same in the same order. Device d sends to device d of another rank, whatever d is. So whether
ranks can wait for each other is seen from one device of each, by its sends and receives alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.collectives import ModuleFacts, find_collectives
from stablehlo_tools.analysis.entry import entry_function
from stablehlo_tools.analysis.replica_groups import DeviceMesh, ProcessGroups
from stablehlo_tools.analysis.shardings import manual_axes, sharding_axes, sharding_per_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.collectives import TRANSFERS
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.manual import unwrap_body
from stablehlo_tools.ir.symbols import functions_by_name
from stablehlo_tools.mpmd.manifest import Manifest
from stablehlo_tools.mpmd.proof.findings import Findings, Rule, numbers
from stablehlo_tools.mpmd.reading import Reading

_ENDS = [MANUAL_COMPUTATION, "func.return"]
_TRANSFERS = frozenset({"stablehlo.send", "stablehlo.recv"})
_PAIRS = "source_target_pairs"
_MESH = "sdy.mesh"


def check_devices(manifest: Manifest, readings: Sequence[Reading], findings: Findings) -> None:
    """M1 of all ranks, as far as devices are concerned."""
    for reading in readings:
        facts = ModuleFacts.of(reading.module)
        ranks, size = len(manifest.ranks), manifest.devices
        if facts.grid.size != ranks * size:
            said = f"the program is for {facts.grid.size} devices, not {ranks} ranks of {size}"
            findings.add(Rule.FORM, said, reading, reading.main)
            continue
        _check_wrapping(reading, facts, ranks, size, findings)
        _check_groups(reading, facts, size, findings)


def _check_wrapping(
    reading: Reading, facts: ModuleFacts, ranks: int, size: int, findings: Findings
) -> None:
    """The manual computation is all of `main`, and divides nothing over the ranks."""
    outer = reading.main.regions[0].blocks[0]
    if outer == reading.block:
        if size > 1:
            said = f"@main holds no manual computation over the {size} devices of the rank"
            findings.add(Rule.FORM, said, reading, reading.main)
        return
    ops = [view.operation for view in outer.operations]
    if [op.name for op in ops] != _ENDS:
        extra = next((op for op in ops if op.name not in _ENDS), ops[-1])
        message = f"{extra.name} stands in @main beside the manual computation"
        findings.add(Rule.FORM, message, reading, extra)
        return
    manual, end = ops
    said = _of_values(manual, end, outer) or _of_axes(manual, facts, ranks, size)
    if said:
        findings.add(Rule.FORM, f"the manual computation {said}", reading, manual)


def _of_values(manual: ir.Operation, end: ir.Operation, outer: ir.Block) -> str:
    if list(manual.operands) == list(outer.arguments) and list(end.operands) == list(
        manual.results
    ):
        return ""
    return "does not take all arguments, or give all results, in order"


def _of_axes(manual: ir.Operation, facts: ModuleFacts, ranks: int, size: int) -> str:
    names = ("in_shardings", "out_shardings")
    shardings = [sharding_axes(s) for n in names for s in sharding_per_value(manual.attributes[n])]
    meshes = list(dict.fromkeys(name for name, _ in shardings))
    if not meshes:
        return ""
    mesh = facts.meshes.get(meshes[0])
    if len(meshes) > 1 or mesh is None:
        return "is over several meshes, or one that is not there"
    if not _is_over_ranks(mesh, ranks, size):
        return f"is over a mesh whose slowest axis is not {ranks} ranks of {size} devices in order"
    if manual_axes(manual) != frozenset(name for name, _ in mesh.axes):
        return "is not over all axes of its mesh"
    over = mesh.axes[0][0]
    divided = any(over in axes for _, axes in shardings)
    return f'divides a value over the ranks, axis "{over}"' if divided else ""


def _is_over_ranks(mesh: DeviceMesh, ranks: int, size: int) -> bool:
    if not mesh.axes or mesh.axes[0][1] != ranks or mesh.size != ranks * size:
        return False
    ids = mesh.device_ids or tuple(range(mesh.size))
    first = ids[:size]
    wanted = tuple(rank * size + device for rank in range(ranks) for device in first)
    return sorted(first) == list(range(size)) and ids == wanted


def _check_groups(reading: Reading, facts: ModuleFacts, size: int, findings: Findings) -> None:
    """What functions communicate goes between the devices of a rank, the same on each rank."""
    try:
        own = [one for one in find_collectives(reading.module) if one.kind not in TRANSFERS]
        groups = [(one, facts.groups(one)) for one in own]
    except ToolError as error:
        findings.add(Rule.FORM, error.diagnostic.message, reading, reading.main)
        return
    for collective, each in groups:
        said = "" if each is None else _of_groups(each, facts.grid.size, size)
        if said:
            message = f"{collective.inner.name} {said}"
            findings.add(Rule.FORM, message, reading, collective.op)


def _of_groups(groups: ProcessGroups, devices: int, size: int) -> str:
    within: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in range(devices // size)}
    for group in groups:
        ranks = {device // size for device in group}
        if len(ranks) > 1:
            return f"has devices {numbers(group)} in a group, which are of several ranks"
        for rank in ranks:
            within[rank].append(tuple(device - rank * size for device in group))
    if len({tuple(each) for each in within.values()}) > 1:
        return "has other groups of devices for one rank than for another"
    return ""


def one_device(program: ir.Module, ranks: int, devices: int) -> ir.Module:
    """A copy for one device of each rank: functions compute nothing, and rank r is device r."""
    module = copy_module(program)
    main = entry_function(module)
    with module.context, ir.Location.unknown():
        for view in list(main.regions[0].blocks[0].operations):
            if view.operation.name == MANUAL_COMPUTATION:
                unwrap_body(main, view.operation)
                break
        for view in main.regions[0].blocks[0].operations:
            if view.operation.name in _TRANSFERS:
                _between_ranks(view.operation, devices)
        for function in functions_by_name(module).values():
            if function != main:
                _compute_nothing(function)
        for view in list(module.body.operations):
            if view.operation.name == _MESH:
                view.operation.erase()
        i32 = ir.IntegerType.get_signless(32)
        module.operation.attributes["mhlo.num_partitions"] = ir.IntegerAttr.get(i32, ranks)
    return module


def _between_ranks(transfer: ir.Operation, devices: int) -> None:
    pairs = [int(number) for number in ir.DenseIntElementsAttr(transfer.attributes[_PAIRS])]
    first = [number // devices for number in pairs[:2]]
    transfer.attributes[_PAIRS] = ir.Attribute.parse(f"dense<[{first}]> : tensor<1x2xi64>")


def _compute_nothing(function: ir.Operation) -> None:
    block = function.regions[0].blocks[0]
    end = terminator(block)
    build = Builder(ir.InsertionPoint(end), function.location)
    for position, value in enumerate(list(end.operands)):
        scalar = build.splat(0, [], element_of(value))
        end.operands[position] = build.broadcast(scalar, shape_of(value), [])
    for view in list(block.operations)[::-1]:
        op = view.operation
        if op != end and not any(list(result.uses) for result in op.results):
            op.erase()
