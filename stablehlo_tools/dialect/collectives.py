"""The kinds of communication, by the names that plans, costs and reports use. Pure Python.

A kind is an op's name without its dialect, and `ragged_all_to_all`, which jax writes as a custom
call. StableHLO's `cross-replica-sum` is an all_reduce as it was written once; it keeps its hyphens.
"""

from __future__ import annotations

from stablehlo_tools.dialect.traits import Trait, ops_with, short_names

RAGGED_ALL_TO_ALL = "ragged_all_to_all"
CROSS_REPLICA_SUM = "cross-replica-sum"

TRANSFERS = short_names(ops_with(Trait.TRANSFER))
PAIRWISE = frozenset({"collective_permute", "send", "recv"})

# `replica_groups` count ids by the channel: of reductions and all_gather with
# `use_global_device_ids`, of the others without.
EXCHANGE_GROUPED = frozenset({"all_to_all", "collective_broadcast"})
REDUCTION_GROUPED = short_names(ops_with(Trait.GROUPED)) - EXCHANGE_GROUPED - {CROSS_REPLICA_SUM}

# All that devices meet in, as lists of them are shown.
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

# The attributes that say along which dimensions a collective divides or joins tensors.
DIMENSIONS = {
    "all_gather": ("all_gather_dim",),
    "reduce_scatter": ("scatter_dimension",),
    "all_to_all": ("split_dimension", "concat_dimension", "split_count"),
}

# The kinds that a compiler refuses of element types that begin so.
_REFUSED = {("reduce_scatter", "complex"): "XLA:TPU"}


def refusal(kind: str, element: str) -> str | None:
    """The reason not to write a collective, if a compiler refuses its kind of its elements."""
    compiler = _REFUSED.get((kind, element.partition("<")[0]))
    return compiler and f"{compiler} has no {kind} of {element}"
