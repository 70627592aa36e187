"""Collectives in scheduled HLO: the bytes that each sends, and the devices of its groups.

Replica groups come in four spellings: `{{0,1},{2,3}}`, `[2,4]<=[4,2]T(1,0)`,
`mesh['a'=4,'b'=2] {'b'}`, and nothing or `{}` for all devices. Pure Python.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from stablehlo_tools.analysis.replica_groups import (
    AxisRef,
    DeviceMesh,
    ProcessGroups,
    exchange_group_mode,
    mesh_axes_groups,
    permute_groups,
    process_groups,
    reduction_group_mode,
)
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer
from stablehlo_tools.hlo_input.async_forms import (
    ISSUED,
    TRANSFERS,
    AsyncPhase,
    result_shape,
    tpu_marks,
)
from stablehlo_tools.hlo_input.instructions import HloInstruction
from stablehlo_tools.hlo_input.shapes import arrays, stablehlo_type
from stablehlo_tools.targets.hlo.module import HloComputation, HloModule
from stablehlo_tools.targets.hlo.work import fused_instructions, through_views


@dataclass(frozen=True)
class Fused:
    """A collective inside a fusion, and the phase of it that the fusion runs.

    `early`: the phase comes before the compute of the fusion. Then the fusion needs the result of
    a collective that it finishes, or does not produce the operand of one that it starts.
    """

    collective: HloInstruction
    computation: HloComputation
    phase: AsyncPhase
    chain: str
    early: bool


def fused_collectives(fusion: HloInstruction, module: HloModule) -> list[Fused]:
    """Returns the collectives that a fusion starts, finishes or runs; not those only in flight."""
    inside = list(fused_instructions(fusion, module))
    marks = tpu_marks(inner for inner, _ in inside)
    parts: list[Fused] = []
    for inner, computation in inside:
        if inner.opcode not in ISSUED:
            continue
        # The collective neither starts nor ends here: this fusion computes while it runs.
        if inner.name not in marks and inner.chain is not None:
            continue
        phase, mark = marks.get(inner.name, (AsyncPhase.SYNC, inner))
        readers = [u for u in computation.users.get(mark.name, []) if u.opcode != "tuple"]
        operand = through_views(computation.by_name[inner.operands[0]], computation)
        early = bool(readers) if phase is AsyncPhase.DONE else operand.opcode == "parameter"
        parts.append(Fused(inner, computation, phase, f"{inner.opcode} {inner.chain}", early))
    return parts


_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_DENSE = re.compile(r"\{([\d,-]*)\}")
_MESH = re.compile(r"mesh\[([^\]]*)\](.*?) \{([^}]*)\}$")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_AXIS_REF = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_DEVICE_IDS = re.compile(r"device_ids=\[?\(?([\d,\s]+)\)?\]?$")
_PAIRS = re.compile(r'_xla_send_recv_source_target_pairs="?(\{\{.*?\}\})')


@dataclass(frozen=True)
class IssuedCollective:
    """One collective of a schedule."""

    instruction: HloInstruction
    transfer: DeviceTransfer
    axes: tuple[str, ...]
    dtype: str
    reduction: str | None


def issued_transfer(
    instruction: HloInstruction, computation: HloComputation, module: HloModule
) -> IssuedCollective:
    """Returns the transfer of a collective, its start or a send. Raises ToolError if unknown."""
    opcode = instruction.opcode.removesuffix("-start")
    operands = [
        array
        for name in instruction.operands
        for array in computation.by_name[name].results
        if array.bits
    ]
    if opcode == "ragged-all-to-all":
        operands = operands[:1]  # the others: the result to fill, offsets and sizes
    gathered = opcode in ("all-gather", "recv")
    sent = arrays(result_shape(instruction)) if gathered else operands
    kind = opcode.replace("-", "_")
    if opcode == "all-reduce" and _only_sliced(instruction, computation):
        kind = "reduce_scatter"
    dtypes = dict.fromkeys(stablehlo_type(array.element_type) for array in sent)
    mesh = _MESH.match(instruction.groups)
    axes = tuple(name for name, _, _ in _AXIS_REF.findall(mesh[3])) if mesh else ()
    applied = module.computations.get(
        next(iter(instruction.callees_by_attribute().get("to_apply", ())), "")
    )
    return IssuedCollective(
        instruction,
        DeviceTransfer(
            kind, float(sum(array.bytes for array in sent)), _groups(instruction, opcode, module)
        ),
        axes,
        ", ".join(dtypes),
        None if applied is None else applied.root.opcode.replace("-", "_"),
    )


def parse_groups(text: str) -> list[list[int]] | None:
    """The rows of replica groups as printed, None for all devices.

    Raises ValueError for a form that is not known.
    """
    if text in ("", "{}"):
        return None
    iota = _IOTA.match(text)
    if iota:
        groups, dims, order = (
            [int(part) for part in numbers.split(",")] if numbers else []
            for numbers in iota.groups()
        )
        ids = np.arange(int(np.prod(dims))).reshape(dims)
        if order:
            ids = ids.transpose(order)
        return [[int(i) for i in row] for row in ids.reshape(groups).reshape(-1, groups[-1])]
    if text.startswith("{{"):
        return [[int(i) for i in row.split(",") if i] for row in _DENSE.findall(text)]
    mesh = _MESH.match(text)
    if mesh:
        axes, between, named = mesh.groups()
        device_ids: tuple[int, ...] = ()
        if between.strip(" ,"):
            listed = _DEVICE_IDS.search(between.strip(" ,"))
            if listed is None:
                said = between.strip()
                raise ValueError(f"device ids of a mesh in an unknown form: {said}")
            device_ids = tuple(int(i) for i in listed.group(1).split(","))
        sizes = tuple((name, int(size)) for name, size in _MESH_AXIS.findall(axes))
        refs = [
            AxisRef(name, int(pre or 1), int(size) if size else None)
            for name, pre, size in _AXIS_REF.findall(named)
        ]
        return [list(row) for row in mesh_axes_groups(DeviceMesh(sizes, device_ids), refs)]
    raise ValueError(f"replica groups in an unknown form: {text}")


def _groups(instruction: HloInstruction, opcode: str, module: HloModule) -> ProcessGroups:
    """The participants as flattened device ids."""
    text = instruction.groups
    if opcode in TRANSFERS:
        pairs = _PAIRS.search(instruction.line)
        if pairs is None:
            raise instruction.error("it does not state its source and target devices")
        text = pairs.group(1)
    channel = sum(instruction.numbers("channel_id")[:1])
    try:
        rows = parse_groups(text)
        if opcode in ("collective-permute", *TRANSFERS):
            mode = exchange_group_mode(max(channel, int(module.grid.num_replicas == 1)))
            return permute_groups(rows or [], mode, module.grid)
        mode = exchange_group_mode(channel)
        if opcode in ("all-gather", "all-reduce", "reduce-scatter"):
            is_global = "use_global_device_ids=true" in instruction.line
            mode = reduction_group_mode(channel, is_global)
        return process_groups(rows or [], mode, module.grid)
    except ValueError as error:
        raise instruction.error(str(error)) from None


def _only_sliced(instruction: HloInstruction, computation: HloComputation) -> bool:
    """Returns True if an all-reduce is only sliced: XLA:TPU writes reduce-scatters like that."""
    users = computation.users.get(instruction.name, [])
    return bool(users) and all(
        _only_sliced(user, computation)
        if user.opcode in ("bitcast", "get-tuple-element")
        else user.opcode == "dynamic-slice" and user.operands[0] == instruction.name
        for user in users
    )
