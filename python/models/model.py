"""A program of the zoo, and how it is built from its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from models.devices import DEVICES  # first: sets up the devices

from models.config import Config  # isort: skip
from models.program import Tree

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

    @classmethod
    def of(cls, name: str, config: Config, **more: Any) -> Self:
        """The program of a configuration, whose fields are its options."""
        return cls(
            name,
            lambda **options: replace(config, **options).program().export(),
            devices=config.devices,
            collectives=config.partitioned_by == "shard_map",
            config=config,
            **more,
        )

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

    @property
    def tags(self) -> frozenset[str]:
        """What it can be selected by: its family, who splits it, its element type, and those of
        `training`, `collectives`, `dead`, `large` and of the options `scan`, `remat` and `donate`
        that hold."""
        holds = {
            "training": self.training,
            "collectives": self.collectives,
            "dead": self.dead,
            "large": self.large,
            "scan": bool(getattr(self.config, "scan_layers", self.family == "layer-scan")),
            "remat": bool(getattr(self.config, "remat", False)),
            "donate": self.config is not None and self.config.donate,
        }
        words = {tag for tag, holding in holds.items() if holding}
        if self.config is not None:
            words |= {self.family, self.config.partitioned_by, self.config.dtype}
        return frozenset(words)

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
