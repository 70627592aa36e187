"""What to say where a training step cannot run on one microbatch after the other."""

from __future__ import annotations

from stablehlo_tools.analysis.dimension_propagation.graph import Node
from stablehlo_tools.analysis.dimension_propagation.seeds import Trial
from stablehlo_tools.analysis.entry import argument_name
from stablehlo_tools.analysis.partial_sums import PartialSums, source_of
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.transforms.parts.accumulate_gradients.beforehand import OPAQUE


def mixing_refusal(terms: PartialSums, waits: Node, used: Node, trial: Trial) -> ToolError:
    """Names the op that needs all samples, and one that works on samples and hangs on it."""
    source = source_of(terms, waits) or waits
    batch = seeds_text(trial)
    if source.name in OPAQUE:
        return ToolError(
            f"accumulate-gradients: {source.name} takes samples of the batch ({batch}), and nobody "
            "knows what it does with each, so that it cannot run on one microbatch (P4)",
            source.op.location,
            (note(f"{used.name} works on samples and hangs on it", used.op.location),),
        )
    return ToolError(
        f"accumulate-gradients: {source.name} takes all samples of the batch ({batch}), and what "
        "follows from it is used with samples again, so that no microbatch can run before all "
        "others have come as far (P4): take statistics of each sample by itself, or name another "
        "batch with `arguments` and `dimension`",
        source.op.location,
        (note(f"{used.name} works on samples and hangs on it", used.op.location),),
    )


def seeds_text(trial: Trial) -> str:
    """The dimensions that are cut, of arguments as the caller of the program knows them."""
    values = trial.dims.graph.values
    return ", ".join(
        f"dimension {layout.dim} of {argument_name(values[number])}"
        for number, layout in sorted(trial.seeds.items())
    )
