"""Names the kinds of communication for plans, costs and reports. Pure Python.

A kind is an op's name without its dialect, or `ragged_all_to_all`, which jax writes as a custom
call. StableHLO's `cross-replica-sum` is an older form of all_reduce; it keeps its hyphens.
"""

from __future__ import annotations

from stablehlo_tools.dialect.traits import Trait, ops_with, short_names

RAGGED_ALL_TO_ALL = "ragged_all_to_all"
CROSS_REPLICA_SUM = "cross-replica-sum"

TRANSFERS = short_names(ops_with(Trait.TRANSFER))
PAIRWISE = frozenset({"collective_permute", "send", "recv"})

# The channel decides what the ids in `replica_groups` number: together with
# `use_global_device_ids` for reductions and all_gather, alone for the others.
EXCHANGE_GROUPED = frozenset({"all_to_all", "collective_broadcast"})
REDUCTION_GROUPED = short_names(ops_with(Trait.GROUPED)) - EXCHANGE_GROUPED - {CROSS_REPLICA_SUM}

# All collectives and transfers, in the order in which lists show them.
MEETINGS = (
    "all_gather",
    "all_reduce",
    CROSS_REPLICA_SUM,
    "reduce_scatter",
    "all_to_all",
    RAGGED_ALL_TO_ALL,
    "collective_broadcast",
    "collective_permute",
    "send",
    "recv",
)

# The attributes with the dimensions along which a collective divides or joins tensors.
DIMENSIONS = {
    "all_gather": ("all_gather_dim",),
    "reduce_scatter": ("scatter_dimension",),
    "all_to_all": ("split_dimension", "concat_dimension", "split_count"),
}

# Pairs of a kind and a prefix of element types, and the compiler that rejects them.
_REFUSED = {("reduce_scatter", "complex"): "XLA:TPU"}


def refusal(kind: str, element: str) -> str | None:
    """Returns the reason not to write a collective of these elements, or None."""
    compiler = _REFUSED.get((kind, element.partition("<")[0]))
    return compiler and f"{compiler} has no {kind} of {element}"
