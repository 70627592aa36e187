"""What the inputs of a chain of stages are: the batch, the stacked weights, what all share."""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools.transforms.parts.fold_pipeline.chains import Chains, Term
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import UnresolvedError

Terms = tuple[Term, ...]


@dataclass(frozen=True)
class Inputs:
    """The inputs of a segment by number.

    `batch`: one term a microbatch; for a link, what the first stage takes. `layered`: one term a
    stage. `fixed`: one for all.
    """

    batch: dict[int, Terms]
    layered: dict[int, Terms]
    fixed: dict[int, Term]


def sorted_inputs(chains: Chains) -> Inputs:
    """The inputs of chains by what they depend on. Raises UnresolvedError."""
    linked = {link.input for link in chains.links}
    batch: dict[int, Terms] = {}
    layered: dict[int, Terms] = {}
    fixed: dict[int, Term] = {}
    for number in range(len(chains.segment.inputs)):
        table = [[inputs[number] for inputs in chain] for chain in chains.terms]
        if number in linked:
            batch[number] = tuple(row[0] for row in table)
        elif all(row == table[0] for row in table):
            if all(term == table[0][0] for term in table[0]):
                fixed[number] = table[0][0]
            else:
                layered[number] = tuple(table[0])
        elif all(term == row[0] for row in table for term in row):
            batch[number] = tuple(row[0] for row in table)
        else:
            raise UnresolvedError(
                "what a stage takes here depends on the stage and the microbatch both: the stages "
                "are no layers of one loop",
                chains.last_op,
                5,
            )
    return Inputs(batch, layered, fixed)
