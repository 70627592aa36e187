"""Every program whose layers run in a loop, by name, and what is known of each.

    case = CASES["llama-step"]
    after = stablehlo_tools.transform(case.build(stage=2), "expand-pipeline{microbatches=4}")
    assert_close(compare(case.reference(stage=2), after))

Programs are on eight devices at most; options are the fields of `LayerScan`. A `-forward` is the
forward pass, a `-evaluation` the loss, a `-gradients` the loss and its gradients, a `-step` the
training step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jax.export import Exported
from layer_scan_networks import (
    alternating_window,
    encoder_decoder,
    hidden_states,
    llama,
    mlp,
    shared_adapter,
    switched,
    tied_llama,
    time_major,
    two_stacks,
    vit,
)
from layer_scan_nnx import nnx_decoder
from layer_scan_programs import LayerScan, Network
from layer_scan_structures import (
    cast_before,
    chunked_loss,
    dynamic_depth,
    low_rank,
    nested,
    packed,
    paired,
    stacked_inside,
    statistics,
    teacher,
    two_streams,
    universal,
    until_settled,
)
from layer_scan_variants import (
    balanced_experts,
    batch_norm,
    chunked_attention,
    decode,
    experts,
    keyed_dropout,
    mamba,
    raw_arrays,
    read_twice,
    sample_dropout,
    split_dropout,
    summed_penalty,
)
from models.program import Tree
from pipeline_checks import Reference, reference


@dataclass(frozen=True)
class Case:
    """A program and its loops.

    `loops` are the trip counts of all loops, with the options of `config` and with calls inlined,
    as `pipeline_checks.shown` writes them: `8[4] 8` is a loop with one inside, and another after
    both. `refused` says why no pipeline can be made of it: something takes several samples at once
    in a way that no microbatch can do alone, or nobody knows how many layers there are.
    `waits` says why no backward can start before all forwards are done: with `1f1b` it is to be
    refused, with two loops it is not.
    """

    name: str
    config: LayerScan
    loops: str
    refused: str = ""
    waits: str = ""

    @property
    def training(self) -> bool:
        """Whether there is a backward loop."""
        return self.config.training

    def build(self, **options: Any) -> Exported:
        """The program with these options in place of its own; allocates nothing."""
        return replace(self.config, **options).program().export()

    def arguments(self, seed: int = 0, **options: Any) -> tuple[Tree, ...]:
        """Random arguments of the program with these options: pytrees of NumPy arrays."""
        return replace(self.config, **options).program().random_arguments(seed)

    def reference(self, seed: int = 0, **options: Any) -> Reference:
        """What it computes, and what it would without rounding: run once in a session."""
        return _reference(self, seed, **options)


@functools.cache
def _reference(case: Case, seed: int, **options: Any) -> Reference:
    alone = case.build(**options | {"stage": 1, "data": 1, "model": 1})
    return reference(case.build(**options), case.arguments(seed, **options), alone)


_STEPS = {
    "forward": "update",
    "evaluation": "evaluation",
    "gradients": "gradients",
    "step": "update",
}


def _case(
    name: str,
    network: Callable[[LayerScan], Network],
    loops: str,
    refused: str = "",
    waits: str = "",
    **options: Any,
) -> Case:
    kind = name.rpartition("-")[2]
    assert kind in _STEPS, f"{name} does not say what it computes"
    options["step"] = _STEPS[kind]
    config = LayerScan(training=kind != "forward", network=network, **options)
    return Case(name, config, loops, refused, waits)


_FORWARD, _TRAINING = "8", "8 8"
_CASES = (
    _case("mlp-forward", mlp, _FORWARD),
    _case("mlp-gradients", mlp, _TRAINING),
    _case("mlp-step", mlp, _TRAINING, optimizer="sgd", stage=2, data=2, model=2),
    _case("raw-forward", raw_arrays, _FORWARD),
    _case("raw-gradients", raw_arrays, _TRAINING, stage=8, staged=False),
    _case("llama-forward", llama, _FORWARD, stage=2, data=2, model=2),
    _case("llama-gradients", llama, _TRAINING, loss_form="sum"),
    _case("llama-step", llama, _TRAINING, stage=4, data=2, loss_form="masked"),
    _case("llama-clipped-step", llama, _TRAINING, stage=2, data=2, model=2),
    _case("llama-bf16-forward", llama, _FORWARD, dtype="bfloat16"),
    _case("llama-bf16-step", llama, _TRAINING, dtype="bfloat16", stage=2, data=4),
    _case("llama-remat-gradients", llama, _TRAINING, remat="full", stage=4, model=2),
    _case("llama-dots-gradients", llama, _TRAINING, remat="dots", loss_form="examples"),
    _case("llama-remat-bf16-step", llama, _TRAINING, remat="nothing-kept", dtype="bfloat16"),
    _case("llama-examples-step", llama, _TRAINING, loss_form="examples", optimizer="sgd"),
    _case("unrolled-forward", llama, "4", unroll=2),
    _case("unrolled-gradients", llama, "4 4", unroll=2),
    _case("remainder-forward", mlp, "2", unroll=3),
    _case("remainder-gradients", mlp, "2 2", unroll=3),
    _case("accumulate-gradients", llama, "2[8 8]", accumulate=2, loss_form="sum"),
    _case(
        "accumulate-fori-step", mlp, "2[8 8]", accumulate=2, accumulate_form="fori",
        optimizer="sgd",
    ),
    _case("fori-forward", llama, _FORWARD, form="fori"),
    _case("fori-gradients", mlp, _TRAINING, form="fori"),
    _case("reverse-forward", mlp, _FORWARD, form="reverse"),
    _case("reverse-gradients", llama, _TRAINING, form="reverse"),
    _case("encoder-decoder-forward", encoder_decoder, "4 4", stage=2, data=2),
    _case("encoder-decoder-gradients", encoder_decoder, "4 4 4 4", stage=4),
    _case("tied-gradients", tied_llama, _TRAINING),
    _case("tied-step", tied_llama, _TRAINING, stage=2, model=2, optimizer="adam"),
    _case("shared-adapter-forward", shared_adapter, _FORWARD),
    _case("shared-adapter-gradients", shared_adapter, _TRAINING),
    _case("split-dropout-forward", split_dropout, "8[5 5 5]"),
    _case("split-dropout-gradients", split_dropout, "8[5 5 5] 8"),
    _case("keyed-dropout-gradients", keyed_dropout, "5 8[5] 8"),
    _case("sample-dropout-gradients", sample_dropout, "5 8[5 5] 8"),
    _case("alternating-window-forward", alternating_window, _FORWARD),
    _case("alternating-window-gradients", alternating_window, _TRAINING),
    _case("switched-forward", switched, _FORWARD),
    _case("switched-gradients", switched, _TRAINING),
    _case("experts-forward", experts, _FORWARD, stage=2, model=4),
    _case("experts-step", experts, _TRAINING, optimizer="sgd"),
    _case("hidden-states-forward", hidden_states, _FORWARD),
    _case("hidden-states-gradients", hidden_states, _TRAINING),
    _case("decode-forward", decode, _FORWARD, stage=4, data=2),
    _case("nnx-forward", nnx_decoder, _FORWARD),
    _case("nnx-step", nnx_decoder, _TRAINING, stage=4, model=2),
    _case("mamba-forward", mamba, "8[8]"),
    _case("mamba-gradients", mamba, "8[8] 8[8]"),
    _case("chunked-attention-forward", chunked_attention, "8[4]"),
    _case("chunked-attention-gradients", chunked_attention, "4 8[4] 8[4]"),
    _case("vit-forward", vit, _FORWARD, stage=2, data=4),
    _case("vit-step", vit, _TRAINING, optimizer="adam", stage=4, data=2),
    _case("two-stacks-forward", two_stacks, "4 8"),
    _case("two-stacks-gradients", two_stacks, "4 8 8 4"),
    _case("uneven-forward", mlp, "6", layers=6),
    _case("uneven-gradients", llama, "7 7", layers=7),
    _case("twelve-gradients", mlp, _TRAINING, batch=12),
    _case("time-major-forward", time_major, _FORWARD, stage=2, data=2),
    _case("time-major-gradients", time_major, _TRAINING),
    _case("read-twice-gradients", read_twice, _TRAINING),
    _case("penalty-forward", summed_penalty, _FORWARD),
    _case("penalty-gradients", summed_penalty, _TRAINING),
    _case("mlp-evaluation", mlp, _FORWARD),
    _case("llama-evaluation", llama, _FORWARD, loss_form="masked", stage=2, data=4),
    _case("nested-forward", nested, "4[2]"),
    _case("nested-gradients", nested, "4[2] 4[2 2]"),
    _case("paired-gradients", paired, "4 4"),
    _case("two-streams-forward", two_streams, _FORWARD),
    _case("two-streams-gradients", two_streams, _TRAINING),
    _case("universal-forward", universal, _FORWARD),
    _case("universal-gradients", universal, _TRAINING),
    _case("stacked-inside-forward", stacked_inside, _FORWARD),
    _case("stacked-inside-gradients", stacked_inside, _TRAINING),
    _case("statistics-forward", statistics, _FORWARD, stage=4, data=2),
    _case("statistics-gradients", statistics, _TRAINING),
    _case("low-rank-gradients", low_rank, _TRAINING),
    _case("teacher-forward", teacher, "8 8"),
    _case("teacher-gradients", teacher, "8 8 8"),
    _case("packed-forward", packed, _FORWARD),
    _case("packed-gradients", packed, _TRAINING, loss_form="sum"),
    _case("chunked-loss-gradients", chunked_loss, "8 4 4 8"),
    _case("cast-before-gradients", cast_before, _TRAINING, dtype="bfloat16", loss_form="sum"),
    _case("dynamic-depth-forward", dynamic_depth, "?", refused="the depth is an input"),
    _case("until-settled-forward", until_settled, "?", refused="the depth follows from the data"),
    _case("batch-norm-forward", batch_norm, _FORWARD, refused="statistics of the batch"),
    _case("batch-norm-gradients", batch_norm, _TRAINING, refused="statistics of the batch"),
    _case("balanced-experts-forward", balanced_experts, _FORWARD, refused="a product of means"),
    _case("balanced-experts-gradients", balanced_experts, _TRAINING, refused="a product of means"),
    _case(
        "by-outputs-gradients", llama, _TRAINING, loss_form="outputs",
        waits="the loss is divided by a sum over all outputs",
    ),
)  # fmt: skip
CASES = {case.name: case for case in _CASES}
PIPELINES = {name: case for name, case in CASES.items() if not case.refused}
REFUSED = {name: case for name, case in CASES.items() if case.refused}
