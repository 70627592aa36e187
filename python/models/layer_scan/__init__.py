"""Every program whose layers run in a loop, by name, and what is known of each.

    program = LAYER_SCANS["llama-step"].build(stage=2)

Programs are on eight devices at most; options are the fields of `LayerScan`. A `-forward` is the
forward pass, a `-evaluation` the loss, a `-gradients` the loss and its gradients, a `-step` the
training step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from models.model import Model  # first: sets up the devices

from models.layer_scan.networks import (  # isort: skip
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
from models.layer_scan.nnx_decoder import nnx_decoder
from models.layer_scan.options import LayerScan, Network
from models.layer_scan.structures import (
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
from models.layer_scan.variants import (
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

if TYPE_CHECKING:
    from jax.export import Exported


@dataclass(frozen=True)
class LayerScanModel(Model):
    """A program and its loops.

    `loops` are the trip counts of all loops, with the options of `config` and with calls inlined,
    as `pipeline_checks.shown` writes them: `8[4] 8` is a loop with one inside, and another after
    both. `refused` says why no pipeline can be made of it: something takes several samples at once
    in a way that no microbatch can do alone, or nobody knows how many layers there are.
    `waits` says why no backward can start before all forwards are done: with `1f1b` it is to be
    refused, with two loops it is not.
    """

    build: Callable[..., Exported]
    config: LayerScan = field(default_factory=LayerScan)
    loops: str = ""
    refused: str = ""
    waits: str = ""

    @property
    def tags(self) -> frozenset[str]:
        """Those of a model, `refused`, and `waits`."""
        own = {"refused": self.refused, "waits": self.waits}
        return super().tags | {tag for tag, why in own.items() if why}


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
) -> LayerScanModel:
    kind = name.rpartition("-")[2]
    assert kind in _STEPS, f"{name} does not say what it computes"
    options["step"] = _STEPS[kind]
    config = LayerScan(training=kind != "forward", network=network, **options)
    return LayerScanModel.of(name, config, loops=loops, refused=refused, waits=waits)


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
LAYER_SCANS = {case.name: case for case in _CASES}
