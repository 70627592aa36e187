"""Replaces a collective over many devices by two or three over fewer, one after the other.

The members of a group form a table of rows, in their order. An all_gather runs first over the rows,
then over the columns.

    %g = "stablehlo.all_gather"(%x) {replica_groups = [[0, 1, 2, 3]]}
    ==>
    %r = "stablehlo.all_gather"(%x) {replica_groups = [[0, 1], [2, 3]]}
    %g = "stablehlo.all_gather"(%r) {replica_groups = [[0, 2], [1, 3]]}

A reduce_scatter runs over the columns first, with all of its bytes, and then over the rows. An
all_reduce becomes a reduce_scatter over the rows, an all_reduce over the columns and an all_gather
over the rows, if rows divide one of its dimensions.

Preconditions:
  P1  Every communicating op is of a dialect that is understood.
  P2  Replica groups name processes and mesh axes that the module has, none of them twice.
  P3  No op has a token yet: thread-tokens comes after this pass.
  P4  `rows` is at least 2, or 0 to choose.

Guarantees: the signature stays. Gathers, maxima, minima and sums of integers are bitwise as before.
A sum of n floats is added in another order. It differs by at most 2 (n - 1) u (|x1| + … + |xn|),
where u is the unit roundoff of its type, as long as nothing on the way overflows.

Left unchanged, with a note of the reason under `explain`: collectives that no table makes 5 %
faster by the cost model (on switches, only a table whose rows stay within the fast link and whose
columns only cross it counts); collectives with several operands; sums of complex numbers, which
XLA:TPU cannot scatter; groups of different sizes, or that the channel of the collective cannot
express; async pairs; collectives that a frontend attribute steers. All stay if XLA is not expected
to be faster with the steps, unless `rows` is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.analysis.collectives import (
    Channels,
    Collective,
    ModuleFacts,
    find_collectives,
    tensor_bytes,
)
from stablehlo_tools.analysis.replica_groups import ProcessGroups
from stablehlo_tools.analysis.tasks.graph import is_faster
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.emitted_collectives import as_compiled
from stablehlo_tools.cost.hardware import Hardware, load_hardware
from stablehlo_tools.cost.network_times import transfer_time
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer, TransferTime
from stablehlo_tools.diagnostics import Diagnostics, ToolError, duration, note
from stablehlo_tools.dialect.communication_kinds import refusal
from stablehlo_tools.dialect.dimensions import integer
from stablehlo_tools.dialect.frontend_attributes import steering
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.passes.base import Milestone, Pass, RoadStage
from stablehlo_tools.transforms.parts.create_reduce_scatter.smaller_collectives import (
    GroupForms,
    collective_like,
    with_shape,
)

_DIMENSION = {"all_gather": "all_gather_dim", "reduce_scatter": "scatter_dimension"}
_KINDS = frozenset({*_DIMENSION, "all_reduce"})
_PAYS = 0.95  # of the time: the cost model is not more accurate


@dataclass(frozen=True)
class HierarchicalCollectivesPass(Pass):
    """Collectives over many devices become several over fewer if that is faster.

    `hardware`: the name or the file of the profile that times are predicted for. `rows`: the number
    of members in a row, for every group that it divides; 0 (the default) chooses the fastest, if it
    is faster than the whole. `explain`: a note for each collective of more than two members.
    """

    name: ClassVar[str] = "hierarchical-collectives"
    milestone: ClassVar[Milestone | None] = Milestone(RoadStage.HIERARCHY)
    hardware: str = "h100"
    rows: int = 0
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place."""
        hardware = load_hardware(self.hardware)
        if self.rows < 0 or self.rows == 1:
            raise ToolError(
                f"{self.name}: rows={self.rows} is too few: use at least 2, or 0 to choose (P4)",
                module.operation.location,
            )
        refuse_tokens(module, self.name, "P3")
        draft, notes = copy_module(module), Diagnostics()
        if self._rewrite(draft, hardware, notes):
            # XLA may hide or combine the whole collectives better than the steps.
            if self.rows or is_faster(draft, module, hardware):
                take_over(module, draft)
            else:
                notes.collected = [
                    note(
                        f"{self.name}: all stay whole: XLA is expected to be as fast by itself",
                        module.operation.location,
                    )
                ]
        if self.explain:
            diagnostics.collected += notes.collected

    def _rewrite(self, module: ir.Module, hardware: Hardware, notes: Diagnostics) -> bool:
        """Rewrites a module in place; returns True if anything changed."""
        collectives = find_collectives(module)
        facts = ModuleFacts.from_module(module, collectives)
        forms, channels = GroupForms(facts), Channels(module)
        changed = False
        with ir.Location.unknown(module.context):
            for collective in collectives:
                groups = forms.groups(collective) if collective.kind in _KINDS else None
                if groups is None or max(map(len, groups)) < 3:
                    continue
                location = collective.op.location
                said = _why_left(collective, groups)
                if said is None:
                    size = tensor_bytes(_payload_type(collective)) or 0
                    pricing = _Pricing(collective.kind, size, groups, hardware, facts.grid.size)
                    plan = pricing.best(_tables(collective, groups, forms, self.rows), self.rows)
                    before = duration(pricing.whole)
                    if plan is not None:
                        counts = " and ".join(str(len(step.groups[0])) for step in plan)
                        said = f"over {counts} in {duration(pricing.of_plan(plan))}, not {before}"
                        _write(collective, plan, channels)
                        changed = True
                    else:
                        rows = f"of {self.rows} fit" if self.rows else f"are faster than {before}"
                        said = f"unchanged: no rows {rows}"
                name = f"{self.name}: {collective.kind} over {len(groups[0])}"
                notes.collected.append(note(f"{name}: {said}", location))
        return changed


def _why_left(collective: Collective, groups: ProcessGroups) -> str | None:
    """Says why a collective cannot be decomposed; None if it can."""
    if collective.is_async:
        return "unchanged: it is asynchronous: the program places its start and its done"
    if len(collective.op.operands) > 1:
        return "unchanged: it has several operands"
    if len({len(group) for group in groups}) > 1:
        return "unchanged: its groups differ in size"
    if steering(collective.op):
        return f"unchanged: {steering(collective.op)[0][0]} steers it"
    if tensor_bytes(_payload_type(collective)) is None:
        return "unchanged: its size is unknown"
    is_gather = collective.kind == "all_gather"
    refused = refusal("reduce_scatter", str(_payload_type(collective).element_type))
    return None if is_gather or refused is None else f"unchanged: {refused}"


@dataclass(frozen=True, slots=True)
class _HierarchyStep:
    """One collective of a plan: its kind, groups, result type, and the type of the data it
    moves."""

    kind: str
    groups: ProcessGroups
    replica_groups: ir.Attribute
    result: ir.RankedTensorType
    sent: ir.RankedTensorType
    dimension: int


type _Plan = Sequence[_HierarchyStep]  # the collectives that replace one


def _tables(
    collective: Collective, groups: ProcessGroups, forms: GroupForms, rows: int
) -> Iterator[_Plan]:
    """Yields all plans of a collective; if `rows` is not 0, only those with rows of that length."""
    members = len(groups[0])
    for length in range(2, members):
        if members % length or (rows and rows != length):
            continue
        along = tuple(
            group[first : first + length] for group in groups for first in range(0, members, length)
        )
        across = tuple(group[place::length] for group in groups for place in range(length))
        formed = [forms.express(table, collective) for table in (along, across)]
        if formed[0] is None or formed[1] is None:
            continue
        steps = _steps(collective, (along, formed[0]), (across, formed[1]), length)
        if steps is not None:
            yield steps


type _Groups = tuple[ProcessGroups, ir.Attribute]


def _steps(
    collective: Collective, along: _Groups, across: _Groups, length: int
) -> Sequence[_HierarchyStep] | None:
    """Returns the collectives in order; None for an all_reduce without a dimension to divide."""
    source = ir.RankedTensorType(collective.op.operands[0].type)
    result = ir.RankedTensorType(collective.op.results[0].type)
    members = len(along[0][0]) * len(across[0][0])
    if collective.kind == "all_reduce":
        # Each member of a row holds an equal part between the steps.
        dimension = next((d for d, size in enumerate(source.shape) if size % length == 0), None)
        if dimension is None:
            return None
        part = _scale_dimension(source, dimension, 1, length)
        return (
            _HierarchyStep("reduce_scatter", *along, part, source, dimension),
            _HierarchyStep("all_reduce", *across, part, part, dimension),
            _HierarchyStep("all_gather", *along, source, source, dimension),
        )
    dimension = integer(collective.op, _DIMENSION[collective.kind])
    if collective.kind == "all_gather":
        middle = _scale_dimension(source, dimension, length, 1)
        return (
            _HierarchyStep("all_gather", *along, middle, middle, dimension),
            _HierarchyStep("all_gather", *across, result, result, dimension),
        )
    middle = _scale_dimension(source, dimension, length, members)
    return (
        _HierarchyStep("reduce_scatter", *across, middle, source, dimension),
        _HierarchyStep("reduce_scatter", *along, result, middle, dimension),
    )


def _scale_dimension(
    type_: ir.RankedTensorType, dimension: int, times: int, parts: int
) -> ir.RankedTensorType:
    shape = list(type_.shape)
    shape[dimension] = shape[dimension] * times // parts
    return with_shape(type_, shape)


@dataclass(frozen=True, slots=True)
class _Pricing:
    """Predicts the ns of a collective and of its plans, each without other work."""

    kind: str
    size: float
    groups: ProcessGroups
    hardware: Hardware
    devices: int

    def best(self, plans: Iterator[_Plan], rows: int) -> _Plan | None:
        """Returns the fastest plan if it is worth it; any plan if its rows are asked for."""
        # The user's choice is written whatever it costs.
        if rows:
            return next(plans, None)
        # On switches rows help only if rows and columns share no kind of link. Otherwise the
        # libraries' own algorithms need no more steps.
        fitting: list[_Plan] = []
        for plan in plans:
            links = [set(self._time(step.kind, 1.0, step.groups).links) for step in plan[:2]]
            if self.hardware.is_torus or links[0].isdisjoint(links[1]):
                fitting.append(plan)
        best = min(fitting, key=self.of_plan, default=None)
        return best if best is not None and self.of_plan(best) <= _PAYS * self.whole else None

    @property
    def whole(self) -> float:
        """The ns of the collective as the compiler runs it."""
        return self._time(self.kind, self.size, self.groups).ns

    def of_plan(self, plan: _Plan) -> float:
        """Returns the ns of all collectives of a plan, one after the other."""
        return sum(
            self._time(step.kind, tensor_bytes(step.sent) or 0, step.groups).ns for step in plan
        )

    def _time(self, kind: str, size: float, groups: ProcessGroups) -> TransferTime:
        transfer = DeviceTransfer(kind, size, groups)
        compiled = as_compiled(transfer, self.hardware, self.devices)
        return transfer_time(compiled.transfer, self.hardware, self.devices)


def _payload_type(collective: Collective) -> ir.ShapedType:
    """Returns the type whose bytes count: the result of a gather, the operand of a reduction."""
    op = collective.op
    value = op.results[0] if collective.kind == "all_gather" else op.operands[0]
    return ir.ShapedType(value.type)


def _write(collective: Collective, plan: _Plan, channels: Channels) -> None:
    """Replaces a collective by the collectives of a plan."""
    op = collective.op
    value = op.operands[0]
    for step in plan:
        changed: dict[str, ir.Attribute] = {"replica_groups": step.replica_groups}
        named = _DIMENSION.get(step.kind)
        if named is not None:
            changed[named] = Builder(ir.InsertionPoint(op), op.location).integer(step.dimension)
        kind = f"stablehlo.{step.kind}"
        dropped = tuple(_DIMENSION.values())
        value = collective_like(op, kind, value, step.result, changed, dropped=dropped)
        channels.renew(maker_of(value))
    op.results[0].replace_all_uses_with(value)
    op.erase()
