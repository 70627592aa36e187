"""Every model by name, so that a test can run over all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from models.devices import DEVICES  # first: sets up the devices

from models import collectives, large, llama  # isort: skip
from models.config import Config
from models.convnet import ConvnetConfig
from models.decoder import DecoderConfig
from models.encoder_decoder import EncoderDecoderConfig
from models.mamba import MambaConfig
from models.moe import MoeConfig, MoeShardMapConfig
from models.nnx_llama import NnxLlamaConfig
from models.program import Tree
from models.vit import VitConfig

if TYPE_CHECKING:
    from jax.export import Exported


@dataclass(frozen=True)
class Model:
    """A program and what tests need to know of it.

    `build` takes options, each with a default, and returns an `Exported` or MLIR text; where it
    passes them on, `takes` is what they are the parameters of.
    `collectives` says whether the module holds any; `dead` whether compilers delete some of them.
    `large` ones take seconds to build and minutes to compile.

    A model of the zoo has a `config`, whose fields are its options, and a `family`. It is a plain
    `jit` that a partitioner has yet to split, or `partitioned_by` shard_map; and a `training` step
    or a forward pass.
    """

    name: str
    build: Callable[..., Exported | str]
    takes: Callable[..., Any] | None = None
    devices: int = DEVICES
    collectives: bool = True
    dead: bool = False
    large: bool = False
    config: Config | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options of `build` and their defaults."""
        if self.config is not None:
            return {field.name: getattr(self.config, field.name) for field in fields(self.config)}
        parameters = inspect.signature(self.takes or self.build).parameters
        return {name: parameter.default for name, parameter in parameters.items()}

    @property
    def family(self) -> str:
        """Which models of the zoo it is one of; empty for the others."""
        return self.config.family if self.config else ""

    @property
    def partitioned_by(self) -> Literal["jit", "shard_map"] | None:
        """Who splits it: a partitioner the plain `jit`, the user by `shard_map`; None unless of
        the zoo."""
        return self.config.partitioned_by if self.config else None

    @property
    def training(self) -> bool:
        """Whether it is a training step of the zoo."""
        return self.config is not None and self.config.training

    def full(self, **options: Any) -> Exported:
        """The size of a published model, on 64 devices; options override it. Allocates nothing.

        Raises ValueError for a model that has no full size.
        """
        if self.config is None:
            raise ValueError(f"{self.name} has no full size")
        return replace(self.config.full(), **options).program().export()

    def arguments(self, seed: int = 0, **options: Any) -> tuple[Tree, ...]:
        """Random arguments for what `build` exports with these options: pytrees of NumPy arrays.

        Raises ValueError for a model that is not of the zoo.
        """
        if self.config is None:
            raise ValueError(f"{self.name} has no example arguments")
        return replace(self.config, **options).program().random_arguments(seed)


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


def _zoo(name: str, config: Config) -> Model:
    return Model(
        name,
        lambda **options: replace(config, **options).program().export(),
        devices=config.devices,
        collectives=config.partitioned_by == "shard_map",
        config=config,
    )


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
