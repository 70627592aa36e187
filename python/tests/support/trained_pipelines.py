"""Training steps of the pipelines of `gpipe_programs`: a loss and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import gpipe_programs  # first: sets up the devices
import gpipe_variants
from gpipe_programs import Case, exported

import jax  # isort: skip


def trained(build: Callable[..., Case], *args: Any, inputs: bool = False, **options: Any) -> Case:
    """The step of a pipeline, with the gradients of the weights, and of the samples if asked."""

    def differentiated(function: Callable[..., Any]) -> Callable[..., Any]:
        def loss(weights: Any, *rest: Any) -> Any:
            return (function(weights, *rest) ** 2).mean()

        return jax.value_and_grad(loss, argnums=(0, 1) if inputs else 0)

    def step(function: Callable[..., Any], *rest: Any) -> Any:
        return exported(differentiated(function), *rest)

    with (
        mock.patch.object(gpipe_programs, "exported", step),
        mock.patch.object(gpipe_variants, "exported", step),
    ):
        case = build(*args, **options)
    return Case(case.exported, differentiated(case.plain), case.arguments)
