"""Plans which edges of a permute run in which iterations, and writes the branch that skips the
others.

The needed windows of the edges split the iterations into phases. Each phase has one permute with
only its edges. So an iteration still runs at most one permute, however many windows there are.

    %y = permute(%x) [[0,1],[1,2]]
==>
    %y = if (%counter < 3) { permute(%x) [[0,1],[1,2]] } else { zeros }

The counter is the same on all devices, so all of them take the same branch, and a permute always
meets its partners. If no edge runs the result is zeros, as for a permute without pairs.

A permute in a branch overlaps no op outside of it. XLA:GPU splits other permutes into a start and a
done, but runs this one in one piece. So the rewrite pays if the transfer is exposed anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from stablehlo_tools.analysis.collectives import ModuleFacts, tensor_bytes
from stablehlo_tools.analysis.demand import DemandCounter, PermuteDemand, Ranges, permute_demand
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, note
from stablehlo_tools.dialect.traits import BRANCHES
from stablehlo_tools.ir.builder import Builder, device_table
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.ir.views import Case, While

Strategy = Literal["edges", "whole"]
Edges = frozenset[int]  # positions in the pairs of a permute

MOST_FORMS = 8  # the most permutes that replace one: each costs a branch and its code
SYMBOLIC = "its result has a symbolic dimension, so no zeros of its shape can be written"
NOT_PLAIN = "its elements are not integers, floats or complex numbers, so their zero is unknown"
WRITTEN = "it is in a branch on the iteration already"
NEVER = "it never runs, or has no pairs"
ALL_NEEDED = "every edge is needed in every iteration"


@dataclass(frozen=True)
class IterationPhase:
    """The edges that run in the iterations from `first` to `last`."""

    first: int
    last: int
    edges: Edges

    @property
    def length(self) -> int:
        """The number of iterations."""
        return self.last - self.first + 1


@dataclass(frozen=True)
class ValidityPlan:
    """The plan for one permute; its phases cover all iterations of the loop."""

    demand: PermuteDemand
    phases: tuple[IterationPhase, ...]

    @property
    def forms(self) -> tuple[Edges, ...]:
        """The distinct sets of edges, in order of appearance."""
        return tuple(dict.fromkeys(phase.edges for phase in self.phases))

    @property
    def before(self) -> int:
        """The number of transfers of the original permute, one for each edge and iteration."""
        return len(self.demand.pairs) * sum(_lengths(self.demand.executed))

    @property
    def needed(self) -> int:
        """The number of transfers that an output depends on."""
        return sum(sum(_lengths(windows)) for windows in self.demand.needed)

    @property
    def after(self) -> int:
        """The number of transfers that stay; more than needed if phases were joined."""
        runs = set(_iterations(self.demand.executed))
        return sum(
            len(phase.edges)
            for phase in self.phases
            for n in range(phase.first, phase.last + 1)
            if n in runs
        )


def plan(
    demand: PermuteDemand, strategy: Strategy = "edges", most_forms: int = MOST_FORMS
) -> ValidityPlan | str:
    """Plans the forms of a permute, or says why it does not change.

    `edges`: each edge runs in the iterations that need it. It also runs in others if there would be
    more than `most_forms` sets of edges. `whole`: all edges that are ever needed run in the
    iterations that need any.
    """
    if demand.reason:
        return demand.reason
    branch = demand.op.parent
    if branch is not None and branch.name in BRANCHES:
        blocks = Case(branch).branches
        held = {view.operation.name for block in blocks for view in block.operations}
        if held <= {demand.op.name, "stablehlo.constant", "stablehlo.return"}:
            return WRITTEN
    type_ = ir.RankedTensorType(demand.op.results[0].type)
    if not type_.has_static_shape:
        return SYMBOLIC
    if not isinstance(type_.element_type, ir.IntegerType | ir.FloatType | ir.ComplexType):
        return NOT_PLAIN
    if not demand.executed or not demand.pairs:
        return NEVER
    phases = _phases(demand, strategy)
    while len({phase.edges for phase in phases}) > max(most_forms, 1):
        # Joins the two neighbouring phases for which that adds the fewest transfers.
        added = [
            one.length * len(two.edges - one.edges) + two.length * len(one.edges - two.edges)
            for one, two in pairwise(phases)
        ]
        at = added.index(min(added))
        one, two = phases[at], phases[at + 1]
        joined = IterationPhase(one.first, two.last, one.edges | two.edges)
        phases = _join_equal([*phases[:at], joined, *phases[at + 2 :]])
    every = frozenset(range(len(demand.pairs)))
    if all(phase.edges == every for phase in phases):
        return ALL_NEEDED
    return ValidityPlan(demand, tuple(phases))


def describe(chosen: ValidityPlan | PermuteDemand) -> str:
    """Returns the needed windows of the edges as text for a note; iterations count from 0."""
    demand = chosen.demand if isinstance(chosen, ValidityPlan) else chosen
    alike: dict[Ranges, list[str]] = {}
    for (source, target), windows in zip(demand.pairs, demand.needed, strict=True):
        alike.setdefault(windows, []).append(f"{source}>{target}")
    told = [_told(names, windows, demand.trips) for windows, names in alike.items()]
    if not isinstance(chosen, ValidityPlan):
        return "; ".join(told)
    skipped = f"{chosen.before - chosen.after} of {chosen.before} transfers are skipped"
    return "; ".join([*told, skipped])


def _told(names: Sequence[str], windows: Ranges, trips: int) -> str:
    edges = f"edge {names[0]} is" if len(names) == 1 else f"edges {', '.join(names)} are"
    if not windows:
        return f"{edges} never needed"
    parts = [str(a) if a == b else f"{a} to {b}" for a, b in windows]
    plural = "" if len(windows) == 1 and windows[0][0] == windows[0][1] else "s"
    return f"{edges} needed in iteration{plural} {', '.join(parts)} of {trips}"


def _phases(demand: PermuteDemand, strategy: Strategy) -> list[IterationPhase]:
    """Returns phases of successive iterations with equal edges.

    Iterations without the permute belong to the phase before them.
    """
    wanted: list[set[int]] = [set() for _ in range(demand.trips)]
    for edge, windows in enumerate(demand.needed):
        for n in _iterations(windows):
            wanted[n].add(edge)
    if strategy == "whole":
        union = set[int]().union(*wanted)
        wanted = [union if edges else set() for edges in wanted]
    runs = _iterations(demand.executed)
    phases = _join_equal([IterationPhase(n, n, frozenset(wanted[n])) for n in runs])
    ends = [phase.first - 1 for phase in phases[1:]] + [demand.trips - 1]
    starts = [0] + [end + 1 for end in ends[:-1]]
    return [IterationPhase(a, b, p.edges) for a, b, p in zip(starts, ends, phases, strict=True)]


def _join_equal(phases: Sequence[IterationPhase]) -> list[IterationPhase]:
    """Joins successive phases with equal edges."""
    joined: list[IterationPhase] = []
    for phase in phases:
        if joined and joined[-1].edges == phase.edges:
            joined[-1] = IterationPhase(joined[-1].first, phase.last, phase.edges)
        else:
            joined.append(phase)
    return joined


def _lengths(windows: Ranges) -> list[int]:
    return [last - first + 1 for first, last in windows]


def _iterations(windows: Ranges) -> list[int]:
    return [n for first, last in windows for n in range(first, last + 1)]


_PAIRS = "source_target_pairs"
_MOST_COMPARED = 2  # ranges of a condition that is written with comparisons


def write(plan: ValidityPlan) -> ir.Value:
    """Replaces the permute of a plan; returns the new result.

    The handle to the permute becomes invalid; those to its loop and to other permutes stay valid.
    """
    op = plan.demand.op
    forms = plan.forms
    if len(forms) == 1:
        result = _form(op, plan, forms[0], ir.InsertionPoint(op))
    else:
        result = _SkippingWriter(plan).write()
    op.results[0].replace_all_uses_with(result)
    op.erase()
    return result


class _SkippingWriter:
    def __init__(self, plan: ValidityPlan) -> None:
        self.plan = plan
        self.op = plan.demand.op
        self.builder = Builder(ir.InsertionPoint(self.op), self.op.location)
        counter = plan.demand.counter
        assert counter is not None, "a plan of several forms has a loop of several iterations"
        self.counter: DemandCounter = counter
        self.value = While(plan.demand.loop).carries[counter.position]

    def write(self) -> ir.Value:
        forms = self.plan.forms
        if len(forms) == 2:
            windows = [
                [(p.first, p.last) for p in self.plan.phases if p.edges == form] for form in forms
            ]
            first = 0 if len(windows[0]) <= len(windows[1]) else 1
            if len(windows[first]) <= _MOST_COMPARED:
                chosen = (forms[first], forms[1 - first])
                within, *others = [self._inside(start, end) for start, end in windows[first]]
                for test in others:
                    within = self.builder.same("or", within, test)
                return self._branch("if", within, chosen)
        # A table maps the iteration to the number of its form.
        numbers = {form: n for n, form in enumerate(forms)}
        table = [numbers[p.edges] for p in self.plan.phases for _ in range(p.length)]
        elements = self.builder.table(table)
        # The position in the table is (counter - start) / step, also if the loop counts down.
        iteration, start, step = self.value, self.counter.start, self.counter.step
        if step < 0:
            iteration = self.builder.same("subtract", self._number(start), iteration)
        elif start:
            iteration = self.builder.same("subtract", iteration, self._number(start))
        if abs(step) > 1:
            iteration = self.builder.same("divide", iteration, self._number(abs(step)))
        looked = self.builder.dynamic_slice(elements, [iteration], [1])
        return self._branch("case", self.builder.reshape(looked, []), forms)

    def _branch(self, name: str, choice: ir.Value, forms: Sequence[Edges]) -> ir.Value:
        kind, types = f"stablehlo.{name}", [self.op.results[0].type]
        branch = self.builder.create(kind, [choice], types, regions=len(forms))
        for region, form in zip(branch.regions, forms, strict=True):
            inside = ir.InsertionPoint(region.blocks.append())
            result = _form(self.op, self.plan, form, inside)
            Builder(inside, self.op.location).end_region([result])
        return branch.results[0]

    def _inside(self, first: int, last: int) -> ir.Value:
        at_least, at_most = ("GE", "LE") if self.counter.step > 0 else ("LE", "GE")
        tests: list[ir.Value] = []
        if first > 0:
            start = self._number(self.counter.start + first * self.counter.step)
            tests.append(self.builder.compare(at_least, self.value, start))
        if last < self.plan.demand.trips - 1:
            end = self._number(self.counter.start + last * self.counter.step)
            tests.append(self.builder.compare(at_most, self.value, end))
        assert tests, "a window of all iterations needs no condition"
        return tests[0] if len(tests) == 1 else self.builder.same("and", *tests)

    def _number(self, number: int) -> ir.Value:
        return self.builder.splat_like(number, self.value)


def _form(op: ir.Operation, plan: ValidityPlan, form: Edges, at: ir.InsertionPoint) -> ir.Value:
    """Writes the permute with only the edges of a form; zeros without any."""
    if not form:
        return Builder(at, op.location).splat_like(0, op.results[0])
    copy = op.clone(ip=at)
    pairs = [pair for edge, pair in enumerate(plan.demand.pairs) if edge in form]
    copy.attributes[_PAIRS] = device_table(pairs, op.context)
    return copy.results[0]


def skip_unneeded(module: ir.Module, least_bytes: int, name: str) -> list[Diagnostic]:
    """Rewrites the module, with inlined calls, if there is a transfer to skip.

    Returns a note for each permute of a loop. Permutes of fewer than `least_bytes` bytes do not
    change. Raises a located ToolError in the name of the pass `name` if a module to rewrite has
    tokens.
    """
    draft = copy_module(module)
    inline_all_calls(draft)
    notes: list[Diagnostic] = []
    written: list[ValidityPlan] = []
    for demand in permute_demand(draft, ModuleFacts.from_module(draft)):
        size = tensor_bytes(ir.ShapedType(demand.op.operands[0].type))
        is_small = size is not None and size < least_bytes
        outcome = f"its {size} bytes are less than min-bytes" if is_small else plan(demand)
        if isinstance(outcome, ValidityPlan):
            written.append(outcome)
            verdict = describe(outcome)
        else:
            verdict = outcome if outcome == ALL_NEEDED else f"no transfer is skipped: {outcome}"
        notes.append(note(f"collective_permute: {verdict}", demand.op.location))
    for outcome in written:
        write(outcome)
    if written:
        # A module without a transfer to skip may have tokens: it does not change.
        refuse_tokens(module, name, "P3")
        take_over(module, draft)
    return notes
