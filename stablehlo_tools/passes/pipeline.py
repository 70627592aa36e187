"""Parses pass pipelines from text, and runs them.

The text `pass,pass{option=value other=value}` parses, prints and round-trips. If no Python pass has
a name, it is looked up among MLIR's registered C++ passes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import (
    Diagnostic,
    Diagnostics,
    Severity,
    ToolError,
    capture_diagnostics,
    first_line,
    from_mlir_error,
    nearest,
    note,
)
from stablehlo_tools.ir.grouped_products import write_products
from stablehlo_tools.passes.base import Option, Pass, RoadStage, options_of
from stablehlo_tools.passes.parser import PassText, parse_pipeline_text
from stablehlo_tools.passes.registry import NAMED, find_pass, unknown_pass
from stablehlo_tools.processes.activity import busy
from stablehlo_tools.processes.ending import native_stderr

if TYPE_CHECKING:
    from stablehlo_tools.artifacts.artifact import Artifact


@dataclass(frozen=True)
class RegisteredPass(Pass):
    """A C++ pass of MLIR, Shardy or StableHLO, by the name it is registered under."""

    name: ClassVar[str] = "<registered>"
    pass_name: str
    options: str = ""

    def __str__(self) -> str:
        return self.pass_name + ("{" + self.options + "}" if self.options else "")

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Runs the pass on the module, or on each function, depending on its anchor op."""
        manager = self.manager(module.context)
        with capture_diagnostics(module.context) as reported:
            try:
                manager.run(module.operation)
            except ir.MLIRError as error:
                raise from_mlir_error(error, f"{self.pass_name}: ") from None
        diagnostics.collected.extend(reported)

    def manager(self, context: ir.Context) -> bindings.PassManager:
        """Returns MLIR's pass manager; raises ToolError without such a pass or option."""
        failures: list[str] = []
        # A C++ pass is registered for one kind of op: some run on modules, some on functions.
        for anchor in ("builtin.module({})", "builtin.module(func.func({}))"):
            with native_stderr() as said:  # MLIR's option parser writes its errors there
                try:
                    return bindings.parse_pass_pipeline(anchor.format(self), context)
                except ValueError as error:
                    refused = error
            failures.append(said.text or str(refused))
        told = next((text for text in failures if "no such option" in text), failures[0])
        if "does not refer to a registered pass" in told:
            raise unknown_pass(self.pass_name)
        for speaker in ("MLIR Textual PassPipeline Parser:", "<Pass-Options-Parser>:"):
            told = told.replace(speaker, "")
        raise ToolError(
            f"pass {self}: {first_line(told).strip(':, ')}",
            instead=(str(self), self.pass_name) if self.options else None,
        )


@dataclass(frozen=True)
class Pipeline:
    """Passes in order; `text` is the text that they were parsed from."""

    passes: tuple[Pass, ...]
    text: str = field(default="", compare=False, repr=False)

    @staticmethod
    def parse(text: str) -> Pipeline:
        """Parses pipeline text, expands named pipelines. Raises ToolError on the first mistake."""
        passes: list[Pass] = []
        for part in _expand_named_pipelines(parse_pipeline_text(text)):
            pass_class = find_pass(part.name)
            if pass_class is not None:
                passes.append(pass_class(**_parsed_options(pass_class, part)))
                continue
            registered = RegisteredPass(part.name, part.options_text)
            registered.manager(bindings.new_context())  # raises ToolError if MLIR refuses the text
            passes.append(registered)
        return Pipeline(tuple(passes), text)

    def __str__(self) -> str:
        return ",".join(str(step) for step in self.passes)

    def run(
        self, module: ir.Module, diagnostics: Diagnostics, instrumentation: Instrumentation | None
    ) -> None:
        """Runs the passes, and verifies the module before the first and after each.

        Raises a located ToolError if a pass refuses the module or breaks it.
        """
        observer = instrumentation or Instrumentation()
        _verify(module, "the input is invalid: ")
        for place, step in enumerate(self.passes):
            said = len(diagnostics.collected)
            with (
                busy("the pipeline", f"running {step.name}"),
                observer.around(step, module),
                module.context,
                self._saying_what_to_try(place),
            ):
                step.run(module, diagnostics)
                write_products(module)
            for told in diagnostics.collected[said:]:
                self._refuse_in_vain(place, told)
            diagnostics.settle(step.name)
            _verify(module, f"after {step.name} the module is invalid (a bug in it): ")
        errors = [each for each in diagnostics.collected if each.severity is Severity.ERROR]
        if errors:  # which no later pass has settled
            diagnostics.collected[:] = [e for e in diagnostics.collected if e not in errors]
            first = errors[0]
            raise ToolError(first.message, first.place, first.notes, first.hint)

    @contextmanager
    def _saying_what_to_try(self, place: int) -> Generator[None]:
        """Completes a refusal that has no hint: with the right order, or the help of the pass."""
        try:
            yield
        except ToolError as error:
            step, told = self.passes[place], error.diagnostic
            late = self._too_late(place, error)
            if late is not None:
                raise late from None
            if told.hint or isinstance(step, RegisteredPass):
                raise
            error.diagnostic = replace(told, hint=_help_of(step.name))
            raise

    def _too_late(self, place: int, refusal: ToolError) -> ToolError | None:
        """Returns the error for a refused pass on whole programs that runs after partitioning.

        It suggests the right order. None for other refusals.
        """
        step, told = self.passes[place], refusal.diagnostic
        behind = [
            number
            for number, earlier in enumerate(self.passes[:place])
            if earlier.milestone is not None and earlier.milestone.stage is RoadStage.PARTITION
        ]
        is_global = step.milestone is not None and step.milestone.stage < RoadStage.PARTITION
        if not behind or not is_global or told.instead is not None:
            return None
        first = self.passes[behind[0]].name
        others = [*self.passes[:place], *self.passes[place + 1 :]]
        ordered = Pipeline((*others[: behind[0]], step, *others[behind[0] :]))
        return ToolError(
            f"{step.name}: {first} ran before it and made the program of one device, but "
            f"{step.name} needs the whole program: run {step.name} first, then {first}",
            told.place,
            (note(told.message, told.place), *told.notes),
            instead=(self.text or str(self), str(ordered)),
        )

    def _refuse_in_vain(self, place: int, told: Diagnostic) -> None:
        """Raises ToolError if a pass found nothing because the pass that it depends on runs later.

        Does not raise if it runs again after that pass.
        """
        step, later = self.passes[place], [each.name for each in self.passes[place + 1 :]]
        if not told.in_vain_before or told.in_vain_before not in later:
            return
        if step.name in later[later.index(told.in_vain_before) :]:
            return
        ordered = Pipeline((*self.passes[:place], *self.passes[place + 1 :], step))
        raise ToolError(
            f"{step.name} runs before {told.in_vain_before} and has no effect there: "
            f"{told.message}: run {step.name} last",
            told.place,
            instead=(self.text or str(self), str(ordered)),
        )


@dataclass
class Instrumentation:
    """Options for printing while a pipeline runs, and the seconds of each pass."""

    print_ir_after_all: bool = False
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    seconds: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])

    @contextmanager
    def around(self, step: Pass, module: ir.Module) -> Generator[None]:
        """Times a pass, and prints the module after it unless it raised."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds.append((str(step), time.perf_counter() - started))
        if self.print_ir_after_all:
            header = f"// -----// IR after {step} //----- //"
            print(header, module, sep="\n", file=self.stream)

    def time_report(self) -> str:
        """Returns a table of the passes with time and share of time."""
        total = sum(seconds for _, seconds in self.seconds) or 1e-9
        rows = [f"{s:10.4f} s {100 * s / total:5.1f}%  {name}" for name, s in self.seconds]
        return "\n".join(["time by pass:", *rows, f"{total:10.4f} s        total"])


def run_pipeline(
    artifact: Artifact,
    pipeline: Pipeline,
    diagnostics: Diagnostics | None = None,
    instrumentation: Instrumentation | None = None,
) -> Diagnostics:
    """Runs a pipeline on an artifact's module, in place; returns the passes' diagnostics.

    Raises ToolError, with the artifact's name, if a pass refuses. Do not use the module afterwards.
    """
    collected = diagnostics or Diagnostics()
    try:
        pipeline.run(artifact.module, collected, instrumentation)
    except ToolError as error:
        error.input_name = error.input_name or artifact.name
        raise
    return collected


def _verify(module: ir.Module, prefix: str) -> None:
    with capture_diagnostics(module.context):
        try:
            module.operation.verify()
        except ir.MLIRError as error:
            raise from_mlir_error(error, prefix) from None


def _expand_named_pipelines(parts: Sequence[PassText]) -> Iterator[PassText]:
    for part in parts:
        named = NAMED.get(part.name)
        if named is None:
            yield part
            continue
        taken = list(dict.fromkeys(name for step in named for name in step.takes))
        for name, _ in part.options:
            if not taken:
                raise ToolError(
                    f"pipeline {part.name!r} has no options; list its passes instead",
                    hint=_help_of(part.name),
                )
            if name not in taken:
                near = nearest(name, taken)
                raise ToolError(
                    f"pipeline {part.name!r} has no option {name!r}; it has: {', '.join(taken)}; "
                    "for others list its passes instead",
                    hint=_help_of(part.name),
                    instead=(name, near) if near else None,
                )
        for step in named:
            given = tuple(option for option in part.options if option[0] in step.takes)
            stated = {name for name, _ in given}
            for inner in parse_pipeline_text(step.text):
                own = tuple(option for option in inner.options if option[0] not in stated)
                yield replace(inner, options=(*own, *given))


def _parsed_options(pass_class: type[Pass], part: PassText) -> dict[str, Any]:
    known = {option.name: option for option in options_of(pass_class)}
    values: dict[str, Any] = {}
    for name, text in part.options:
        if name not in known:
            near = nearest(name, known)
            meant = f"did you mean {near!r}? " if near else ""
            raise ToolError(
                f"pass {part.name!r} has no option {name!r}; {meant}it has: "
                f"{', '.join(known) or 'none'}",
                hint=_help_of(part.name),
                instead=(name, near) if near else None,
            )
        option = known[name]
        if option.attribute in values:
            raise ToolError(
                f"pass {part.name!r}: option {name!r} is given twice", hint=_help_of(part.name)
            )
        try:
            values[option.attribute] = option.parse(text)
        except ValueError as error:
            said = f"pass {part.name!r}: option {name!r} {error}"
            raise _wrong_value(pass_class, part, option, said) from None
    for name, option in known.items():
        if option.is_needed and option.attribute not in values:
            said = f"pass {part.name!r} needs the option {name!r}"
            raise ToolError(said, hint=_help_of(part.name))
    return values


def _wrong_value(pass_class: type[Pass], part: PassText, option: Option, said: str) -> ToolError:
    """Returns the error for a value that an option does not accept, with a likely correction."""
    options = {name: text or "" for name, text in part.options}
    text = options[option.name]
    elsewhere = pass_class.done_elsewhere(options, option.name)
    if elsewhere is not None:
        return ToolError(f"{said}; {elsewhere[0]}", hint=elsewhere[1])
    if "," in text and not option.is_list:
        said += "; spaces separate options, not commas"
    near = nearest(text.lower(), option.choices)
    if not near:
        return ToolError(said, hint=_help_of(pass_class.name))
    given, meant = f"{option.name}={text}", f"{option.name}={near}"
    return ToolError(f"{said}; did you mean {near!r}?", instead=(given, meant))


def _help_of(pass_name: str) -> str:
    return f"stablehlo-tools opt --help {pass_name}"
