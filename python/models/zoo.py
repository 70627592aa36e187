"""Every program for tests, golden and benchmarks: by name, and by what it does.

    programs(scan=True, training=True, bfloat16=False)

What a tag means is said by `Model.tags`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from models.model import Model  # first: sets up the devices

from models import collectives, large, llama  # isort: skip
from models.convnet import ConvnetConfig
from models.decoder import DecoderConfig
from models.encoder_decoder import EncoderDecoderConfig
from models.layer_scan import LAYER_SCANS
from models.mamba import MambaConfig
from models.moe import MoeConfig, MoeShardMapConfig
from models.nnx_llama import NnxLlamaConfig
from models.vit import VitConfig

if TYPE_CHECKING:
    from jax.export import Exported


def _llama(**options: Any) -> Exported:
    return llama.export_train_step(llama.LlamaConfig(**options))


def _llama_scan() -> Exported:
    return _llama(scan_layers=True)


def _llama_remat() -> Exported:
    return _llama(scan_layers=True, remat=True, optimizer="sgd", dtype="bfloat16")


def _llama_platforms() -> Exported:
    """For two platforms each all_gather becomes a `stablehlo.case`."""
    return _llama(layers=1, platforms=("cpu", "cuda"))


def _unrolled(layers: int = 400) -> Exported:
    return large.unrolled_step(layers)


def _wide(count: int = 10_000) -> str:
    return large.wide_program(count)


_MODELS = (
    Model("independent", collectives.independent),
    Model("control-flow", collectives.control_flow),
    Model("condition-collective", collectives.condition_collective),
    Model("inner-functions", collectives.inner_functions),
    Model("two-platforms", collectives.two_platforms),
    Model("silent", collectives.silent, collectives=False),
    Model("single-device", collectives.single_device, devices=1),
    Model("unsharded", collectives.unsharded, devices=1, collectives=False),
    Model("unpartitioned", collectives.unpartitioned, collectives=False),
    Model("unused-result", collectives.unused_result, dead=True),
    Model("barrier-result", collectives.barrier_result, dead=True),
    Model("permute-loop", collectives.permute_loop),
    Model("expert-exchange", collectives.expert_exchange),
    Model("disjoint-groups", collectives.disjoint_groups),
    Model("element-types", collectives.element_types),
    Model("llama", _llama, takes=llama.LlamaConfig),
    Model("llama-scan", _llama_scan),
    Model("llama-remat", _llama_remat),
    Model("llama-platforms", _llama_platforms),
    Model("unrolled", _unrolled, large=True),
    Model("wide", _wide, large=True),
)


_zoo = Model.of
_ZOO = (
    _zoo("decoder-fsdp-forward", DecoderConfig(fsdp=8, model=1, training=False)),
    _zoo("decoder-fsdp-step", DecoderConfig(fsdp=8, model=1)),
    _zoo("decoder-tp-forward", DecoderConfig(fsdp=1, model=8, training=False)),
    _zoo("decoder-tp-step", DecoderConfig(fsdp=1, model=8, optimizer="sgd")),
    _zoo("decoder-2d-step", DecoderConfig()),
    _zoo("decoder-2d-scan-step", DecoderConfig(scan_layers=True, donate=True)),
    _zoo("decoder-2d-remat-step", DecoderConfig(remat=True, dtype="bfloat16")),
    _zoo("moe-forward", MoeConfig(training=False)),
    _zoo("moe-step", MoeConfig()),
    _zoo("moe-shard-map-forward", MoeShardMapConfig(training=False)),
    _zoo("moe-shard-map-step", MoeShardMapConfig()),
    _zoo("vit-forward", VitConfig(training=False)),
    _zoo("vit-step", VitConfig()),
    _zoo("convnet-forward", ConvnetConfig(training=False)),
    _zoo("convnet-step", ConvnetConfig()),
    _zoo("convnet-channels-step", ConvnetConfig(data=4, model=2)),
    _zoo("mamba-forward", MambaConfig(training=False)),
    _zoo("mamba-scan-step", MambaConfig(optimizer="adam")),
    _zoo("mamba-associative-step", MambaConfig(scan="associative")),
    _zoo("encoder-decoder-forward", EncoderDecoderConfig(training=False)),
    _zoo("encoder-decoder-step", EncoderDecoderConfig()),
    _zoo("nnx-llama-forward", NnxLlamaConfig(training=False)),
    _zoo("nnx-llama-step", NnxLlamaConfig()),
)
ZOO = {model.name: model for model in _ZOO}
MODELS = {model.name: model for model in _MODELS} | ZOO
SMALL = {model.name: model for model in _MODELS if not model.large}


def programs(**tags: bool) -> list[Model]:
    """The programs that have each of these tags of `Model.tags`, or lack it if it is False.

    A dash of a tag is written as an underscore: `programs(layer_scan=True)`. Raises ValueError for
    a tag that no program has.
    """
    wanted = {tag.replace("_", "-"): has for tag, has in tags.items()}
    every = (*MODELS.values(), *LAYER_SCANS.values())
    if unknown := wanted.keys() - frozenset[str]().union(*(p.tags for p in every)):
        raise ValueError(f"no program has the tag {min(unknown)}")
    return [p for p in every if all((tag in p.tags) is has for tag, has in wanted.items())]
