"""Custom calls of which nobody knows whether they communicate, while programs are compared.

A custom call without a side effect computes on its device as far as most passes are concerned. Of
one whose target is not known that is a guess: a library of the user's may well call NCCL in it. So
where an order is to be proved it counts as a collective of all devices.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.collectives import RAGGED_ALL_TO_ALL
from stablehlo_tools.dialect.custom_calls import (
    ASYNC_STARTS,
    MAY_COMMUNICATE,
    STAYS,
    stays_on_device,
    target_of,
)
from stablehlo_tools.dialect.names import CUSTOM_CALL
from stablehlo_tools.ir.walk import ops_named


@contextmanager
def unknown_calls_counted(module: ir.Module, local: Collection[str]) -> Generator[None]:
    """Counts what is not known to stay on its device as communication, for as long as it lasts.

    The targets that are `local` are taken to stay on their device, whatever they say themselves.
    """
    for op in _custom_calls(module):
        if target_of(op) in local:
            op.attributes[STAYS] = ir.UnitAttr.get(module.context)
        elif _is_unknown(op):
            op.attributes[MAY_COMMUNICATE] = ir.UnitAttr.get(module.context)
    try:
        yield
    finally:
        for op in _custom_calls(module):
            for mark in (STAYS, MAY_COMMUNICATE):
                if mark in op.attributes:
                    del op.attributes[mark]


def _is_unknown(op: ir.Operation) -> bool:
    """Whether nothing is known of a custom call; one without results is deleted by compilers."""
    target = target_of(op)
    is_collective = target in ASYNC_STARTS or target == RAGGED_ALL_TO_ALL
    return bool(len(op.results)) and not is_collective and not stays_on_device(op)


def _custom_calls(module: ir.Module) -> list[ir.Operation]:
    return ops_named(module.operation, {CUSTOM_CALL})
