"""Moves rows that a loop over layers writes and others read to the host's memory.

  while (%i, %x, %rows) {
    %rows' = dynamic_update_slice %rows, %y, %i
  }
  while (%j, %d) { … dynamic_slice %rows, %j … }
==>
  while (%i, %x, %rows, %y0) {                   // the rows are in the host's memory
    %h = custom_call @annotate_device_placement(%y0)  "pinned_host"     // of the iteration before
    %rows' = dynamic_update_slice %rows, %h, %i
  }                                              // yields %y for %y0
  while (%j, %d, %y) {
    %h = dynamic_slice %rows, %j
    %y' = custom_call @annotate_device_placement(%h)  "device"          // for the next iteration
  }

Row k is at index k + 1, and the last row is never stored, so that the indices do not change.
XLA:GPU recognizes only a loop's counter by iteration, and mistakes a carry of the counter's last
value for it.
"""

from __future__ import annotations

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.device_placement import DEVICE, HOST, annotate_memory, placement
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.carriers import add_carries
from stablehlo_tools.ir.values import key_of, producer, splat_of, stand_in
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import functions_by_name, terminator
from stablehlo_tools.transforms.parts.rematerialize.passages import KeptRows, blocks_of, kept_rows


def movable(module: ir.Module) -> list[KeptRows]:
    """Returns the rows that can be moved, the largest first."""
    effects = Effects(functions_by_name(module))
    found: list[KeptRows] = []
    for rows in (rows for block in blocks_of(module) for rows in kept_rows(block, effects)):
        makers = [producer(update.operands[1]) for update in rows.updates]
        if all(maker is None or placement(maker) is None for maker in makers):
            found.append(rows)  # they are not in the host's memory yet
    return sorted(found, key=lambda rows: -bytes_of_rows(rows))


def bytes_of_rows(rows: KeptRows) -> float:
    """Returns the bytes of all rows, by their type."""
    return rows.trips * sum(bytes_of(update.operands[1]) for update in rows.updates)


def move(rows: KeptRows) -> None:
    """Moves rows to the host's memory."""
    pairs = [
        (update, reader, piece)
        for number, update in enumerate(rows.updates)
        for reader in rows.readers
        for piece in reader.slices[number]
    ]
    # Rows can be copied an iteration later, and back an iteration earlier, if they are read in the
    # reverse order of writing: then the last row can stay on the device.
    is_ahead = all(
        reader.takes_last_first
        and piece.results[0].type == update.operands[1].type
        and all(splat_of(v) is not None for v in (*update.operands[3:], *piece.operands[2:]))
        for update, reader, piece in pairs
    )
    if is_ahead:
        last = {key_of(update): _write_later(update) for update in rows.updates}
        for update, _, piece in pairs:
            # Each iteration reads the row of the next one, which is at its own index. The first
            # iteration gets the last row that was computed.
            back = _place_behind(piece)
            made = _loop_of(update).results[last[key_of(update)]]
            (row,) = add_carries(_loop_of(piece), [made], [back])
            back.replace_all_uses_except(row, [terminator(piece.block)])
        return
    for update in rows.updates:
        row, point = update.operands[1], ir.InsertionPoint(update)
        update.operands[1] = annotate_memory(row, HOST, update.location, point)
    for _, _, piece in pairs:
        _place_behind(piece)


def _write_later(update: ir.Operation) -> int:
    """Makes each iteration write the previous iteration's row, so that a whole iteration hides the
    copy.

    Returns the number of the loop's result that is the last row. The row that the first iteration
    writes is never read.
    """
    row = update.operands[1]
    loop = _loop_of(update)
    before = Builder(ir.InsertionPoint(loop), update.location)
    (late,) = add_carries(loop, [before.splat(0, shape_of(row), element_of(row))], [row])
    # Adding the carry has replaced the loop.
    loop = _loop_of(update)
    first = While(loop).body.operations[0].operation
    update.operands[1] = annotate_memory(late, HOST, update.location, ir.InsertionPoint(first))
    return len(loop.results) - 1


def _place_behind(piece: ir.Operation) -> ir.Value:
    """Copies a slice of rows in the host's memory to the device; all its users read the copy."""
    (result,) = piece.results
    back = annotate_memory(result, DEVICE, piece.location, ir.InsertionPoint.after(piece))
    stand_in(result, back)
    return back


def _loop_of(op: ir.Operation) -> ir.Operation:
    """Returns the loop whose body an op is in; adding carries replaces that loop."""
    return op.block.owner.operation
