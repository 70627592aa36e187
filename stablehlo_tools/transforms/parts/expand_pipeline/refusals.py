"""What to say where a program cannot be cut into microbatches."""

from __future__ import annotations

from stablehlo_tools.analysis.dimension_propagation.graph import Node
from stablehlo_tools.analysis.partial_sums import PartialSums
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION

_OPAQUE = frozenset({"stablehlo.custom_call", MANUAL_COMPUTATION})


def mixing_refusal(terms: PartialSums, node: Node) -> ToolError:
    """Names the op that needs the whole batch, and the sum over samples that it takes, if any."""
    source = source_of(terms, node)
    if source is None and node.name in _OPAQUE:
        return ToolError(
            f"expand-pipeline: {node.name} takes samples of the batch, and nobody knows what it "
            "does with each, so that it cannot run on one microbatch (P4)",
            node.op.location,
        )
    if source is None:
        return ToolError(
            f"expand-pipeline: {node.name} mixes samples of the batch, so that it cannot run on "
            "one microbatch (P4): statistics of each sample by itself can, or `arguments` and "
            "`dimension` name another batch",
            node.op.location,
        )
    return ToolError(
        f"expand-pipeline: {source.name} mixes samples of the batch, and {node.name} needs the "
        "outcome for the whole batch before the next layer (P4): take statistics of each sample by "
        "itself, or name another batch with `arguments` and `dimension`",
        source.op.location,
        (note("it is needed whole here", node.op.location),),
    )


def source_of(terms: PartialSums, node: Node) -> Node | None:
    """The op that made the first term which an op takes."""
    makers = {number: maker for maker in terms.dims.graph.nodes for number in maker.results}
    pending = [n for n in node.inputs if n in terms.terms]
    seen: set[int] = set()
    while pending:
        number = pending.pop()
        maker = makers.get(number)
        if maker is None or number in seen:
            continue
        seen.add(number)
        step = terms.dims.op_tilings.get(maker)
        if step is not None and (step.combine is not None or step.chained):
            return maker
        pending += [n for n in maker.inputs if n in terms.terms]
    return None
