"""Writes a plan: a permute becomes an `if` or a `case` on the counter of its loop.

    %y = permute(%x) [[0,1],[1,2]]
==>
    %y = if (%counter < 3) { permute(%x) [[0,1],[1,2]] } else { zeros }

The counter is the same on all devices, so all of them take the same branch and a permute always
meets its partners. Where no edge runs the result is zeros, as of a permute without pairs.

A permute in a branch overlaps nothing outside of it: XLA:GPU, which splits one in the plain into a
start and a done, runs it in one piece there. So this pays where the transfer is exposed anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stablehlo_tools.analysis.demand import Counter, Ranges
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.transforms.parts.decompose_collective_permute.validity.planning import (
    Edges,
    ValidityPlan,
)

_PAIRS = "source_target_pairs"
_MOST_COMPARED = 2  # ranges of a condition that is written with comparisons


def write(plan: ValidityPlan) -> ir.Value:
    """Replaces the permute of a plan; returns what stands for its result.

    The handle to the permute becomes invalid, those to its loop and to other permutes do not.
    """
    op = plan.demand.op
    forms = plan.forms
    if len(forms) == 1:
        result = _form(op, plan, forms[0], ir.InsertionPoint(op))
    else:
        result = _Writer(plan).write()
    op.results[0].replace_all_uses_with(result)
    op.erase()
    return result


class _Writer:
    def __init__(self, plan: ValidityPlan) -> None:
        self.plan = plan
        self.op = plan.demand.op
        self.builder = Builder(ir.InsertionPoint(self.op), self.op.location)
        counter = plan.demand.counter
        assert counter is not None, "a plan of several forms has a loop of several iterations"
        self.counter: Counter = counter
        self.value: ir.Value = plan.demand.loop.regions[1].blocks[0].arguments[counter.position]

    def write(self) -> ir.Value:
        forms = self.plan.forms
        if len(forms) == 2:
            windows = [self._windows(form) for form in forms]
            first = 0 if len(windows[0]) <= len(windows[1]) else 1
            if len(windows[first]) <= _MOST_COMPARED:
                chosen = (forms[first], forms[1 - first])
                return self._branch("if", self._within(windows[first]), chosen)
        return self._branch("case", self._looked_up(), forms)

    def _windows(self, form: Edges) -> Ranges:
        return tuple((p.first, p.last) for p in self.plan.phases if p.edges == form)

    def _branch(self, name: str, choice: ir.Value, forms: Sequence[Edges]) -> ir.Value:
        branch = ir.Operation.create(
            f"stablehlo.{name}",
            results=[self.op.results[0].type],
            operands=[choice],
            regions=len(forms),
            loc=self.op.location,
            ip=ir.InsertionPoint(self.op),
        )
        for region, form in zip(branch.regions, forms, strict=True):
            inside = ir.InsertionPoint(region.blocks.append())
            result = _form(self.op, self.plan, form, inside)
            ir.Operation.create(
                "stablehlo.return", operands=[result], loc=self.op.location, ip=inside
            )
        return branch.results[0]

    def _within(self, windows: Ranges) -> ir.Value:
        """Whether the iteration is in one of the windows."""
        tests = [self._inside(first, last) for first, last in windows]
        found = tests[0]
        for test in tests[1:]:
            found = self.builder.same("or", found, test)
        return found

    def _inside(self, first: int, last: int) -> ir.Value:
        at_least, at_most = ("GE", "LE") if self.counter.step > 0 else ("LE", "GE")
        tests: list[ir.Value] = []
        if first > 0:
            tests.append(self.builder.compare(at_least, self.value, self._counted(first)))
        if last < self.plan.demand.trips - 1:
            tests.append(self.builder.compare(at_most, self.value, self._counted(last)))
        assert tests, "a window of all iterations is no condition"
        return tests[0] if len(tests) == 1 else self.builder.same("and", *tests)

    def _counted(self, iteration: int) -> ir.Value:
        """What the counter is in an iteration."""
        return self._number(self.counter.start + iteration * self.counter.step)

    def _number(self, number: int) -> ir.Value:
        kind = self.value.type
        value = ir.Attribute.parse(f"dense<{number}> : {kind}", self.op.context)
        return self.builder.op("constant", [], kind, value=value)

    def _looked_up(self) -> ir.Value:
        """The number of the form, out of a table by the iteration."""
        forms = {form: n for n, form in enumerate(self.plan.forms)}
        table = [forms[p.edges] for p in self.plan.phases for _ in range(p.length)]
        looked = self.builder.dynamic_slice(self.builder.table(table), [self._iteration()], [1])
        return self.builder.reshape(looked, [])

    def _iteration(self) -> ir.Value:
        start, step = self.counter.start, self.counter.step
        found = self.value
        if step < 0:
            found = self.builder.same("subtract", self._number(start), found)
        elif start:
            found = self.builder.same("subtract", found, self._number(start))
        if abs(step) > 1:
            found = self.builder.same("divide", found, self._number(abs(step)))
        return found


def _form(op: ir.Operation, plan: ValidityPlan, form: Edges, at: ir.InsertionPoint) -> ir.Value:
    """The permute with some of its edges; zeros without any."""
    kind = op.results[0].type
    if not form:
        return ir.Operation.create(
            "stablehlo.constant",
            results=[kind],
            attributes={"value": ir.Attribute.parse(f"dense<{_zero(kind)}> : {kind}", op.context)},
            loc=op.location,
            ip=at,
        ).results[0]
    copy = op.clone(ip=at)
    pairs = [pair for edge, pair in enumerate(plan.demand.pairs) if edge in form]
    copy.attributes[_PAIRS] = ir.DenseElementsAttr.get(
        np.array(pairs, dtype=np.int64), context=op.context
    )
    return copy.results[0]


def _zero(kind: ir.Type) -> str:
    element = ir.RankedTensorType(kind).element_type
    if isinstance(element, ir.ComplexType):
        return "(0.0, 0.0)" if isinstance(element.element_type, ir.FloatType) else "(0, 0)"
    if isinstance(element, ir.FloatType):
        return "0.0"
    return "false" if ir.IntegerType(element).width == 1 else "0"
