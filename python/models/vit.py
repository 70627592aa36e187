"""A vision transformer, data × model: patches by a convolution, a class token in front, labels.

The class token makes the sequence one longer than the patches, a length that no mesh divides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax

from models import layers
from models.network import Metrics, Network
from models.program import Array, Tree

DATA, MODEL = "data", "model"


@dataclass(frozen=True)
class VitConfig(Network):
    """Sizes of the model, of the batch and of the mesh; `image` and `patch` in pixels."""

    layers: int = 2
    d_model: int = 48
    heads: int = 4
    d_feed_forward: int = 96
    image: int = 16
    patch: int = 4
    classes: int = 10
    batch: int = 16
    data: int = 4
    model: int = 2

    family: ClassVar[str] = "vit"

    def axes(self) -> dict[str, int]:
        return {DATA: self.data, MODEL: self.model}

    def full(self) -> Self:
        """ViT-L/16 on ImageNet."""
        return replace(
            self,
            layers=24,
            d_model=1024,
            heads=16,
            d_feed_forward=4096,
            image=224,
            patch=16,
            classes=1000,
            batch=4096,
            dtype="bfloat16",
            data=16,
            model=4,
        )

    def inputs(self) -> dict[str, Array]:
        return {
            "images": Array((self.batch, self.image, self.image, 3), (DATA,)),
            "labels": Array((self.batch,), (DATA,), "int32", self.classes),
        }

    def output_axes(self) -> tuple[Any, ...]:
        return (DATA,)

    def weights(self) -> Tree:
        width, inner = self.d_model, self.d_feed_forward
        heads = (self.heads, width // self.heads)
        column = (None, MODEL)
        layer = {
            "attention_norm": {"scale": Array((width,)), "bias": Array((width,))},
            "projection": Array((3, width, *heads), (None, None, MODEL)),
            "projection_bias": Array((3, *heads), column),
            "output": Array((*heads, width), (MODEL,)),
            "output_bias": Array((width,)),
            "feed_forward_norm": {"scale": Array((width,)), "bias": Array((width,))},
            "up": Array((width, inner), column),
            "up_bias": Array((inner,), (MODEL,)),
            "down": Array((inner, width), (MODEL,)),
            "down_bias": Array((width,)),
        }
        return {
            "patches": Array((self.patch, self.patch, 3, width), (None, None, None, MODEL)),
            "patches_bias": Array((width,), (MODEL,)),
            "class_token": Array((1, 1, width)),
            "positions": Array((1, (self.image // self.patch) ** 2 + 1, width)),
            "layers": [layer] * self.layers,
            "final_norm": {"scale": Array((width,)), "bias": Array((width,))},
            "head": Array((width, self.classes)),
            "head_bias": Array((self.classes,)),
        }

    def forward(self, parameters: Tree, batch: Tree) -> jax.Array:
        """Logits, (batch, classes)."""
        weights = self.cast(parameters)
        hidden = self._embedded(weights, batch["images"].astype(self.dtype))
        for layer in weights["layers"]:
            hidden = self._stream(hidden + self._attention(hidden, layer))
            normed = layers.layer_norm(hidden, **layer["feed_forward_norm"])
            inner = jax.nn.gelu(normed @ layer["up"] + layer["up_bias"])
            hidden = self._stream(hidden + inner @ layer["down"] + layer["down_bias"])
        token = layers.layer_norm(hidden, **weights["final_norm"])[:, 0]
        return token @ weights["head"] + weights["head_bias"]

    def loss(self, parameters: Tree, batch: Tree) -> tuple[jax.Array, Metrics]:
        return layers.classification(self.forward(parameters, batch), batch["labels"])

    def _embedded(self, weights: Tree, images: jax.Array) -> jax.Array:
        """(batch, 1 + patches, width)."""
        patches = lax.conv_general_dilated(
            images,
            weights["patches"],
            window_strides=(self.patch, self.patch),
            padding="VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        tokens = patches.reshape(images.shape[0], -1, self.d_model) + weights["patches_bias"]
        first = jnp.broadcast_to(weights["class_token"], (images.shape[0], 1, self.d_model))
        return self._stream(jnp.concatenate([first, tokens], axis=1) + weights["positions"])

    def _attention(self, hidden: jax.Array, layer: Tree) -> jax.Array:
        normed = layers.layer_norm(hidden, **layer["attention_norm"])
        projected = jnp.einsum("bsd,pdnh->pbsnh", normed, layer["projection"])
        projected += layer["projection_bias"][:, None, None]
        query, key, value = self.constrain(projected, None, DATA, None, MODEL)
        mixed = layers.attention(query, key, value)
        return jnp.einsum("bsnh,nhd->bsd", mixed, layer["output"]) + layer["output_bias"]

    def _stream(self, hidden: jax.Array) -> jax.Array:
        return self.constrain(hidden, DATA)
