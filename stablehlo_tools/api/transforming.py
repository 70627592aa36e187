"""Transforms an `Exported` or an artifact by a pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stablehlo_tools.artifacts import artifact as artifacts
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import Severity, ToolError, put_right, render_diagnostics
from stablehlo_tools.passes.pipeline import Pipeline, run_pipeline

if TYPE_CHECKING:
    from jax.export import Exported


def transform[Program: (Exported, Artifact)](program: Program, pipeline: str | Pipeline) -> Program:
    """The program after a pipeline; the given one does not change.

    The calling convention, shapes and shardings stay; the VJP that an `Exported` may have carried
    is dropped, since it would differentiate the old program. Raises ToolError. Warnings of the
    passes become Python warnings.
    """
    is_artifact = isinstance(program, Artifact)
    artifact = program.copy() if is_artifact else artifacts.from_exported(program)
    with _saying_what_to_try(pipeline):
        reported = run_pipeline(artifact, as_pipeline(pipeline))
    for text in render_diagnostics(reported.collected, artifact.name, Severity.WARNING):
        warnings.warn(text, stacklevel=2)
    transformed: Any = artifact if is_artifact else artifact.to_exported()
    return transformed


def as_pipeline(pipeline: str | Pipeline) -> Pipeline:
    """A pipeline that is given as text or as such. Raises ToolError on the first mistake."""
    if isinstance(pipeline, Pipeline):
        return pipeline
    with _saying_what_to_try(pipeline):
        return Pipeline.parse(pipeline)


@contextmanager
def _saying_what_to_try(pipeline: str | Pipeline) -> Generator[None]:
    """Gives a refusal that knows what was meant the call with the whole pipeline."""
    try:
        yield
    except ToolError as error:
        told = error.diagnostic
        meant = put_right(str(pipeline), *told.instead) if told.instead else ""
        if meant and meant != str(pipeline):
            hint = f"stablehlo_tools.transform(program, {meant!r})"
            error.diagnostic = replace(told, hint=hint, instead=None)
        raise
