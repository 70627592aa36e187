"""Simplifies a module to the parts that its test needs, so that a person can read it.

Each simplification is tried with the pass pipeline. It is kept only if a test of the simpler module
would state the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stablehlo_tools import bindings
from stablehlo_tools.artifacts.artifact import Artifact, to_text
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import CONSTANT
from stablehlo_tools.ir.values import value_of
from stablehlo_tools.ir.walk import FUNCTION, ops_named, ops_where
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.testing.outcome import TestOutcome, check_words, outcome_of
from stablehlo_tools.testing.shown_ops import is_noise

_READABLE = 80  # characters of a constant


def minimise_module(loaded: Artifact, pipeline: Pipeline) -> str:
    """Returns the simplified module's text, without locations. The artifact is not changed."""
    trial = _MinimiserTrial(pipeline, loaded.name, loaded.copy().module)
    unused = bindings.parse_pass_pipeline("builtin.module(symbol-dce)", trial.module.context)
    trial.keep_if_same(lambda module: unused.run(module.operation), _same_but_fewer_lines)
    trial.keep_if_same(_drop_noise)
    if not trial.keep_if_same(_splat_constants(None)):
        position = 0
        while position < len(_unreadable_constants(trial.module)):
            position += not trial.keep_if_same(_splat_constants(position))
    return to_text(trial.module)


@dataclass
class _MinimiserTrial:
    """The simplest module so far."""

    pipeline: Pipeline
    name: str
    module: ir.Module
    outcome: TestOutcome | None = None

    def keep_if_same(
        self,
        simplify: Callable[[ir.Module], None],
        same: Callable[[TestOutcome, TestOutcome], bool] = TestOutcome.is_like,
    ) -> bool:
        """Simplifies the module if the outcome stays the same; returns True if it did."""
        data = bindings.write_bytecode(self.module)
        simpler = bindings.parse_module(data, self.module.context)
        simplify(simpler)
        if to_text(simpler) == to_text(self.module):
            return True
        before = self.outcome or self._run(self.module)
        try:
            after = self._run(simpler)
        except ToolError:  # the simpler module is invalid
            return False
        if same(before, after):
            self.module, self.outcome = simpler, after
            return True
        return False

    def _run(self, module: ir.Module) -> TestOutcome:
        text = to_text(module).encode()
        return outcome_of(text, self.name, self.pipeline, everything=False)


def _same_but_fewer_lines(before: TestOutcome, after: TestOutcome) -> bool:
    """Returns True if all checks of `after` are among those of `before`, in the same order."""
    lines = iter(check_words(before.checks))
    fewer = all(line in lines for line in check_words(after.checks))
    messages = [[d.message for d in outcome.said] for outcome in (before, after)]
    return before.effect is after.effect and fewer and messages[0] == messages[1]


def _drop_noise(module: ir.Module) -> None:
    for op in ops_where(module.operation, lambda op: True):
        for name in [name for name in op.attributes if is_noise(name)]:
            del op.attributes[name]
        for listed in ("arg_attrs", "res_attrs"):
            if op.name == FUNCTION and listed in op.attributes:
                kept = [
                    ir.DictAttr.get(
                        {a.name: a.attr for a in ir.DictAttr(entry) if not is_noise(a.name)},
                        op.context,
                    )
                    for entry in ir.ArrayAttr(op.attributes[listed])
                ]
                op.attributes[listed] = ir.ArrayAttr.get(kept, op.context)


def _splat_constants(position: int | None) -> Callable[[ir.Module], None]:
    """Returns a simplification that replaces an unreadable constant by zeros; None: all of them."""

    def simplify(module: ir.Module) -> None:
        constants = _unreadable_constants(module)
        for op in constants if position is None else constants[position : position + 1]:
            value = ir.DenseElementsAttr(op.attributes["value"])
            type_ = ir.ShapedType(value.type)
            number = "0.0" if isinstance(type_.element_type, ir.FloatType) else "0"
            zero = ir.Attribute.parse(f"{number} : {type_.element_type}", op.context)
            op.attributes["value"] = ir.DenseElementsAttr.get_splat(type_, zero)

    return simplify


def _unreadable_constants(module: ir.Module) -> list[ir.Operation]:
    """Returns the long constants of an element type that has a zero."""
    unreadable: list[ir.Operation] = []
    for op in ops_named(module.operation, (CONSTANT,)):
        value = value_of(op)
        if isinstance(value, ir.DenseElementsAttr) and len(str(value)) > _READABLE:
            element = ir.ShapedType(value.type).element_type
            if isinstance(element, ir.FloatType | ir.IntegerType):
                unreadable.append(op)
    return unreadable
