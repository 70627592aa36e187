"""The block that one device of a rank runs."""

from __future__ import annotations

from stablehlo_tools.analysis.communication import MANUAL_COMPUTATION
from stablehlo_tools.analysis.entry import entry_function
from stablehlo_tools.bindings import ir


def manual_computation(module: ir.Module) -> ir.Operation | None:
    """The manual computation that is all of `main`; None where it has none."""
    main = entry_function(module)
    views = list(main.regions[0].blocks[0].operations)
    found = [view.operation for view in views if view.operation.name == MANUAL_COMPUTATION]
    return found[0] if len(found) == 1 and len(views) == len(found) + 1 else None


def region_block(module: ir.Module) -> ir.Block:
    """The body of the manual computation that is all of `main`, or that of `main` itself."""
    manual = manual_computation(module)
    owner = entry_function(module) if manual is None else manual
    return owner.regions[0].blocks[0]
