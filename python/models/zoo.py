"""Every model by name, so that a test can run over all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.devices import DEVICES  # first: sets up the devices

from models import collectives, large, llama  # isort: skip

if TYPE_CHECKING:
    from jax.export import Exported


@dataclass(frozen=True)
class Model:
    """A program and what tests need to know of it.

    `build` takes options, each with a default, and returns an `Exported` or MLIR text; where it
    passes them on, `takes` is what they are the parameters of.
    `collectives` says whether the module holds any; `dead` whether compilers delete some of them.
    `large` ones take seconds to build and minutes to compile.
    """

    name: str
    build: Callable[..., Exported | str]
    takes: Callable[..., Any] | None = None
    devices: int = DEVICES
    collectives: bool = True
    dead: bool = False
    large: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The options of `build` and their defaults."""
        parameters = inspect.signature(self.takes or self.build).parameters
        return {name: parameter.default for name, parameter in parameters.items()}


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
MODELS = {model.name: model for model in _MODELS}
SMALL = {model.name: model for model in _MODELS if not model.large}
