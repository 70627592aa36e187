"""A compilation as a text table and as one JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from stablehlo_tools.diagnostics import table_lines
from stablehlo_tools.targets.compilation import Compilation
from stablehlo_tools.targets.scheduled_hlo import CollectiveEvent
from stablehlo_tools.targets.tagging import TaggedOp

_HEADER = ("at", "event", "collective", "id", "inside", "op of the program")


def to_text(compilation: Compilation, input_name: str) -> str:
    """The table of the schedule, the memory, and the verdict."""
    c = compilation
    lines = [f"{c.compiler}: {c.topology.describe()}, compiled in {c.seconds:.1f} s"]
    lines += [*(f"note: {remark}" for remark in c.remarks), ""]
    if c.schedule.events:
        by_id = {op.id: op for op in c.tagged}
        rows: list[tuple[str, ...]] = [_HEADER]
        for event in c.schedule.events:
            ids = ",".join(map(str, event.ids)) or "-"
            if len(event.ids) > 4:
                ids = f"{event.ids[0]},{event.ids[1]},… ({len(event.ids)})"
            source = f"added by XLA ({event.op_name})" if event.op_name else "added by XLA"
            if event.ids:
                op = by_id[event.ids[0]]
                other = "" if op.kind == event.kind.replace("-", "_") else f"{op.kind} at "
                more = f" and {len(event.ids) - 1} more" if len(event.ids) > 1 else ""
                source = other + op.place.render(input_name) + more
            nesting = "/".join(event.nesting)
            rows.append((str(event.position), event.phase.value, event.kind, ids, nesting, source))
        lines += [*table_lines(rows, _HEADER[1:]), ""]
    memory = c.memory
    peak = f", peak {memory.peak_bytes:,}" if memory.peak_bytes else ""
    lines.append(
        f"memory per device in bytes: arguments {memory.argument_bytes:,}, outputs "
        f"{memory.output_bytes:,} ({memory.alias_bytes:,} of them in arguments), temporaries "
        f"{memory.temp_bytes:,}, total {memory.total_bytes:,}{peak}"
    )
    return "\n".join([*lines, *verdict(c, input_name)])


def verdict(compilation: Compilation, input_name: str) -> list[str]:
    """Returns `order: …` and a line for each change that XLA made to the program's collectives."""
    order = compilation.order
    lines = [f"order: {_order(compilation, input_name)}"]
    for what, ids in (
        ("copied (unrolled, peeled or pipelined)", order.copied),
        ("moved to another loop depth", order.moved),
        ("split into several", order.split),
        *(("merged", ids) for ids in order.merged),
    ):
        listed = ", ".join(f"#{id_}" for id_ in ids)
        lines += [f"{what} by XLA: {listed}"] if ids else []
    lost = "" if not order.added else " (or renamed among the ones it added)"
    lines += [f"deleted by XLA{lost}: {_name(compilation, i, input_name)}" for i in order.deleted]
    lines += [f"#{i} may be merged with others that XLA does not name" for i in order.incomplete]
    if order.added and compilation.program_ids:
        lines.append(f"added by XLA: {order.added}")
    return lines


def to_json(compilation: Compilation, input_name: str) -> dict[str, Any]:
    """One object; sizes in bytes per device, times in seconds, positions counted in events."""
    c = compilation
    by_id = {op.id: op for op in c.tagged}
    return {
        "target": c.topology.target.value,
        "topology": c.topology.name,
        "chip": c.topology.chip.name if c.topology.chip is not None else None,
        "stand_in": c.stand_in or None,
        "devices": c.topology.devices,
        "compiler": c.compiler,
        "compiler_options": dict(c.options.values),
        "compile_seconds": round(c.seconds, 3),
        "same_order": c.order.same_order,
        "undecided": c.order.undecided,
        "difference": None
        if c.order.difference is None
        else asdict(c.order.difference) | {"expected": list(c.order.difference.expected)},
        "order": [
            entry
            for event in c.schedule.events
            if event.issues
            for entry in _issue_entries(c, event, by_id, input_name)
        ],
        "program_order": [
            {"id": i, "kind": by_id[i].kind, "location": by_id[i].place.render(input_name)}
            for i in c.program_ids
        ],
        "deleted": list(c.order.deleted),
        "merged": [list(ids) for ids in c.order.merged],
        "split": list(c.order.split),
        "copied": list(c.order.copied),
        "moved": list(c.order.moved),
        "incomplete": list(c.order.incomplete),
        "added": c.order.added,
        "memory": {
            "argument_bytes": c.memory.argument_bytes,
            "output_bytes": c.memory.output_bytes,
            "temp_bytes": c.memory.temp_bytes,
            "alias_bytes": c.memory.alias_bytes,
            "code_bytes": c.memory.code_bytes,
            "total_bytes": c.memory.total_bytes,
            "peak": c.memory.peak_bytes or None,
        },
    }


def _issue_entries(
    compilation: Compilation, event: CollectiveEvent, by_id: dict[int, TaggedOp], input_name: str
) -> list[dict[str, Any]]:
    """One entry for each op of the program that the event issues; one for XLA's own."""
    done = compilation.schedule.done_positions().get(event.position)
    common = {
        "position_start": event.position,
        "position_done": event.position if event.phase.value == "sync" else done,
        "hlo": event.kind,
        "instruction": event.instruction,
        "computation": event.computation,
        "nesting": list(event.nesting),
    }
    if not event.ids:
        kind = event.kind.replace("-", "_")
        return [{"id": None, "kind": kind, "location": event.op_name or None, **common}]
    return [
        {"id": i, "kind": by_id[i].kind, "location": by_id[i].place.render(input_name), **common}
        for i in event.ids
    ]


def _order(compilation: Compilation, input_name: str) -> str:
    order, difference = compilation.order, compilation.order.difference
    if not compilation.program_ids:
        own = f"; the {order.added} in the schedule are XLA's own" if order.added else ""
        return f"the program has no collectives{own}"
    if order.undecided:
        return "undecided: too many places where XLA may have deleted a collective"
    if difference is None:
        return "same as the program"
    after = "first" if difference.after is None else f"after #{difference.after}"
    issued = "issues no more"
    if difference.issued is not None:
        issued = f"issues {_name(compilation, difference.issued, input_name)}"
    expected = " or ".join(_name(compilation, i, input_name) for i in difference.expected)
    where = f"where the program issues {expected}" if expected else "where the program has ended"
    return f"differs from the program: {after} XLA {issued} {where}"


def _name(compilation: Compilation, id_: int, input_name: str) -> str:
    op = next(op for op in compilation.tagged if op.id == id_)
    return f"#{id_} {op.kind} at {op.place.render(input_name)}"
