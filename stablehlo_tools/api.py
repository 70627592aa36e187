"""What a program calls: transform an `Exported`, or a function by way of one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from stablehlo_tools import artifact as artifacts
from stablehlo_tools.artifact import Artifact
from stablehlo_tools.diagnostics import Diagnostics, ToolError
from stablehlo_tools.passes import Instrumentation, Pipeline

if TYPE_CHECKING:
    from jax.export import Exported

    from stablehlo_tools.jitted import Jitted


def run_pipeline(
    artifact: Artifact,
    pipeline: Pipeline,
    diagnostics: Diagnostics | None = None,
    instrumentation: Instrumentation | None = None,
) -> Diagnostics:
    """Runs a pipeline on an artifact's module, in place; returns what the passes reported.

    Raises ToolError, naming the artifact, when a pass refuses. The module is then not to be used.
    """
    collected = diagnostics or Diagnostics()
    try:
        pipeline.run(artifact.module, collected, instrumentation)
    except ToolError as error:
        error.input_name = error.input_name or artifact.name
        raise
    return collected


@overload
def transform(program: Exported, pipeline: str | Pipeline) -> Exported: ...
@overload
def transform(program: Artifact, pipeline: str | Pipeline) -> Artifact: ...
def transform(program: Exported | Artifact, pipeline: str | Pipeline) -> Exported | Artifact:
    """The program after a pipeline; the given one stays as it is.

    The calling convention, shapes and shardings stay; the VJP that an `Exported` may have carried
    is dropped, since it would differentiate the old program. Raises ToolError. What the passes
    warn of is issued as Python warnings.
    """
    given_artifact = isinstance(program, Artifact)
    artifact = program.copy() if given_artifact else artifacts.from_exported(program)
    reported = run_pipeline(artifact, _parsed(pipeline))
    for diagnostic in reported.collected:
        warnings.warn(diagnostic.render(artifact.name), stacklevel=2)
    return artifact if given_artifact else artifact.to_exported()


def jit(function: Callable[..., Any], pipeline: str | Pipeline, **jit_options: Any) -> Jitted:
    """Like `jax.jit`, but through export and a pipeline: exports, transforms, calls.

    `jit_options` go to `jax.jit` (in_shardings, out_shardings, static_argnums, donate_argnums …).
    One artifact is made for each set of argument shapes, dtypes, shardings and static values, as
    `jax.jit` would compile one. Raises ToolError when a pass refuses.
    """
    from stablehlo_tools.jitted import Jitted

    return Jitted(function, _parsed(pipeline), jit_options)


def _parsed(pipeline: str | Pipeline) -> Pipeline:
    return pipeline if isinstance(pipeline, Pipeline) else Pipeline.parse(pipeline)
