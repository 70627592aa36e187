"""A residual convolutional network with batch norm: data parallel, and if asked also by channels.

Bottleneck blocks as in ResNet-50. In training, batch norm takes mean and variance over the whole
global batch, and the step updates their running averages; the forward pass uses those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from jax import lax

from models import layers
from models.config import Parts
from models.network import Metrics, Network
from models.program import Array, Tree

DATA, MODEL = "data", "model"
EXPANSION = 4  # channels out of a block for each of those inside
MOMENTUM = 0.9
Norm = Callable[[jax.Array, Tree, Tree], tuple[jax.Array, Tree]]


@dataclass(frozen=True)
class ConvnetConfig(Network):
    """Sizes of the model, of the batch and of the mesh.

    `blocks` has an entry for each stage; a stage has twice the channels of the one before it and
    half its height and width.
    """

    optimizer: Literal["adamw", "adam", "sgd"] = "sgd"
    blocks: tuple[int, ...] = (1, 2)
    width: int = 8
    image: int = 32
    classes: int = 10
    batch: int = 16
    data: int = 8
    model: int = 1

    family: ClassVar[str] = "convnet"

    def axes(self) -> dict[str, int]:
        return {DATA: self.data, MODEL: self.model}

    def full(self) -> Self:
        """ResNet-50 on ImageNet."""
        return replace(
            self,
            blocks=(3, 4, 6, 3),
            width=64,
            image=224,
            classes=1000,
            batch=4096,
            dtype="bfloat16",
            data=64 if self.model == 1 else 16,
            model=1 if self.model == 1 else 4,
        )

    def inputs(self) -> dict[str, Array]:
        return {
            "images": Array((self.batch, self.image, self.image, 3), (DATA,)),
            "labels": Array((self.batch,), (DATA,), "int32", self.classes),
        }

    def output_axes(self) -> tuple[Any, ...]:
        return (DATA,)

    def weights(self) -> Tree:
        blocks: list[Tree] = []
        for entering, inner, stride in self._plan():
            leaving = EXPANSION * inner
            block = {
                "reduce": _kernel(1, entering, inner),
                "spatial": _kernel(3, inner, inner),
                "expand": _kernel(1, inner, leaving),
                **{f"norm{number}": _affine(inner) for number in (1, 2)},
                "norm3": _affine(leaving),
            }
            if stride > 1 or entering != leaving:
                block |= {
                    "shortcut": _kernel(1, entering, leaving),
                    "shortcut_norm": _affine(leaving),
                }
            blocks.append(block)
        features = EXPANSION * self.width * 2 ** (len(self.blocks) - 1)
        return {
            "stem": _kernel(7, 3, self.width),
            "stem_norm": _affine(self.width),
            "blocks": blocks,
            "head": Array((features, self.classes), (MODEL,)),
            "head_bias": Array((self.classes,)),
        }

    def statistics(self) -> Tree:
        """Running mean and variance of every norm, in the tree of the weights."""

        def running(weights: Tree) -> Tree:
            return {
                name: {"mean": weights[name]["bias"], "variance": weights[name]["scale"]}
                for name in weights
                if "norm" in name
            }

        weights = self.weights()
        return running(weights) | {"blocks": [running(block) for block in weights["blocks"]]}

    def _forward_pass(self) -> Parts:
        _, function, results = super()._forward_pass()
        arrays = {"parameters": self.weights(), "statistics": self.statistics()}
        return self.described(arrays), function, results

    def forward(self, parameters: Tree, batch: Tree) -> jax.Array:
        """Logits, (batch, classes), from weights and running averages."""
        return self._logits(
            parameters["parameters"], parameters["statistics"], batch, _normed_by_averages
        )[0]

    def loss_and_statistics(
        self, parameters: Tree, statistics: Tree, batch: Tree
    ) -> tuple[jax.Array, tuple[Metrics, Tree]]:
        logits, statistics = self._logits(parameters, statistics, batch, _normed_by_batch)
        loss, metrics = layers.classification(logits, batch["labels"])
        return loss, (metrics, statistics)

    def _plan(self) -> Iterator[tuple[int, int, int]]:
        """Channels into a block, channels inside it, and its stride."""
        entering = self.width
        for stage, count in enumerate(self.blocks):
            inner = self.width * 2**stage
            for number in range(count):
                yield entering, inner, 2 if stage > 0 and number == 0 else 1
                entering = EXPANSION * inner

    def _logits(
        self, weights: Tree, statistics: Tree, batch: Tree, norm: Norm
    ) -> tuple[jax.Array, Tree]:
        hidden = self._convolved(batch["images"].astype(self.dtype), weights["stem"], 2)
        hidden, stem = norm(hidden, weights["stem_norm"], statistics["stem_norm"])
        hidden = lax.reduce_window(
            jax.nn.relu(hidden), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"
        )
        blocks: list[Tree] = []
        for (_, _, stride), block, running in zip(
            self._plan(), weights["blocks"], statistics["blocks"], strict=True
        ):
            hidden, updated = self._block(hidden, block, running, stride, norm)
            blocks.append(updated)
        features = hidden.mean((1, 2))
        logits = features @ weights["head"].astype(self.dtype) + weights["head_bias"]
        return logits, {"stem_norm": stem, "blocks": blocks}

    def _block(
        self, hidden: jax.Array, block: Tree, running: Tree, stride: int, norm: Norm
    ) -> tuple[jax.Array, Tree]:
        updated: dict[str, Tree] = {}

        def convolved(x: jax.Array, kernel: str, name: str, stride: int = 1) -> jax.Array:
            y, updated[name] = norm(
                self._convolved(x, block[kernel], stride), block[name], running[name]
            )
            return y

        inner = jax.nn.relu(convolved(hidden, "reduce", "norm1"))
        inner = jax.nn.relu(convolved(inner, "spatial", "norm2", stride))
        inner = convolved(inner, "expand", "norm3")
        if "shortcut" in block:
            hidden = convolved(hidden, "shortcut", "shortcut_norm", stride)
        return jax.nn.relu(hidden + inner), updated

    def _convolved(self, images: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
        result = lax.conv_general_dilated(
            images,
            kernel.astype(self.dtype),
            window_strides=(stride, stride),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return self.constrain(result, DATA, None, None, MODEL)


def _normed_by_batch(images: jax.Array, affine: Tree, running: Tree) -> tuple[jax.Array, Tree]:
    """By mean and variance over the global batch; also the running averages they lead to."""
    wide = images.astype(jnp.float32)
    mean = wide.mean((0, 1, 2))
    variance = jnp.square(wide).mean((0, 1, 2)) - jnp.square(mean)
    new = {"mean": mean, "variance": variance}
    averages = jax.tree.map(lambda old, now: MOMENTUM * old + (1 - MOMENTUM) * now, running, new)
    return _normed(images, affine, new), averages


def _normed_by_averages(images: jax.Array, affine: Tree, running: Tree) -> tuple[jax.Array, Tree]:
    return _normed(images, affine, running), running


def _normed(images: jax.Array, affine: Tree, moments: Tree) -> jax.Array:
    slope = affine["scale"] * lax.rsqrt(moments["variance"] + 1e-5)
    shifted = (images.astype(jnp.float32) - moments["mean"]) * slope + affine["bias"]
    return shifted.astype(images.dtype)


def _kernel(size: int, entering: int, leaving: int) -> Array:
    return Array((size, size, entering, leaving), (None, None, None, MODEL))


def _affine(channels: int) -> dict[str, Array]:
    return {"scale": Array((channels,), (MODEL,)), "bias": Array((channels,), (MODEL,))}
