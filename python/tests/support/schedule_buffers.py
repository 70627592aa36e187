"""How many messages the channels of a schedule must hold, by search."""

from stablehlo_tools.schedules.table import Table
from stablehlo_tools.schedules.validator import _structural, runs


def least_buffers(table: Table) -> int | None:
    """The fewest messages that channels have to hold for the run to end; 0 for rendezvous.

    None where the run ends with no number of them, or the table breaks another rule. 0 for a valid
    table that names no transfers.
    """
    if _structural(table)[0].count:
        return None
    most = max(map(len, table.rows))  # with so many, no send ever waits
    if not runs(table, most):
        return None
    fewest, enough = 0, 0
    while not runs(table, enough):
        fewest, enough = enough + 1, min(2 * enough + 1, most)
    while fewest < enough:
        middle = (fewest + enough) // 2
        if runs(table, middle):
            enough = middle
        else:
            fewest = middle + 1
    return enough
