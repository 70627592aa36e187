"""Checks the constraints under which collectives can be merged into one.

Constraints, each named in the reason that is given if it fails:
  C1   They are of one kind: all_gather, reduce_scatter, all_reduce, all_to_all or
       collective_permute.
  C2   They are in one block, none of them in an async_start.
  C3   Their operands have static shapes, of integers, floats or complex numbers. Those that run
       along a dimension have elements. An all_to_all has one operand, because XLA reads several as
       the parts of one.
  C4   They have the same process groups (the same pairs), whatever attribute gives them, and their
       ids count the same. All groups have one size, which fits the shapes. The order of members
       counts, except for an all_reduce.
  C5   They have the same reduction, of elements of one type.
  C6   Their other attributes are equal, with the frontend attributes that steer how XLA runs them.
       Shardy's shardings of their results, and their memory layouts, may differ.
  C7   Elements that they exchange unreduced are of one type, or of types of whole bytes, which a
       bitcast makes equal. No bitcast accepts booleans, complex numbers or less than a byte.
  C8   None of them is in a token chain already: tokens go in last.
  C9   None depends on another, and no op has to move past effects (see `placement`).
  C10  A manual computation around them leaves no mesh axis free: the joined operand would have to
       be gathered along such an axis first.
"""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.replica_groups import GroupMode
from stablehlo_tools.analysis.shardings import SHARDING
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.frontend_attributes import FRONTEND_ATTRIBUTES, LAYOUTS, steering
from stablehlo_tools.dialect.names import BARRIER
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.structural_key import block_key
from stablehlo_tools.ir.views import Combining

REDUCING = frozenset({"all_reduce", "reduce_scatter"})
EXCHANGING = frozenset({"all_gather", "all_to_all", "collective_permute"})
_ALONG = frozenset({"all_gather", "reduce_scatter", "all_to_all"})
_XLA_SHARDING = "mhlo.sharding"

# Attributes that the constraints judge separately, or that merging changes.
_JUDGED = frozenset(
    {"replica_groups", "source_target_pairs", "channel_handle", "use_global_device_ids", SHARDING}
    | {FRONTEND_ATTRIBUTES, *LAYOUTS}
    | {"all_gather_dim", "scatter_dimension", "split_dimension", "concat_dimension", "split_count"}
)


@dataclass(frozen=True)
class CollectiveTraits:
    """The traits that must be equal. `elements` is a type, or "whole bytes" for any of these."""

    kind: str
    mode: GroupMode | None
    groups: frozenset[tuple[int, ...]]
    reduction: object
    elements: str
    attributes: tuple[tuple[str, str], ...]

    @property
    def members(self) -> int:
        """The number of devices in a group."""
        return len(next(iter(self.groups), ()))


class Groups:
    """The process groups of a module's collectives; equal attributes are read once."""

    def __init__(self, facts: ModuleFacts) -> None:
        self._facts = facts
        self._known: dict[object, frozenset[tuple[int, ...]] | None] = {}

    def unordered_groups(self, collective: Collective) -> frozenset[tuple[int, ...]] | None:
        """Returns the groups, or the pairs, without order; None if they are unknown.

        Raises a located ToolError for groups that the module does not have.
        """
        key = (
            collective.kind,
            collective.group_mode,
            collective.group_attribute("replica_groups"),
            collective.group_attribute("source_target_pairs"),
        )
        if key not in self._known:
            groups = self._facts.groups(collective)
            if groups is not None and collective.kind == "all_reduce":
                groups = [tuple(sorted(group)) for group in groups]
            self._known[key] = None if groups is None else frozenset(groups)
        return self._known[key]


def traits_of(collective: Collective, known: Groups) -> CollectiveTraits | str:
    """Returns the traits that a merged collective must share, or why it is never merged.

    Raises a located ToolError for groups that the module does not have.
    """
    reason = _why_not_alone(collective)
    groups = None if reason else known.unordered_groups(collective)
    if reason or groups is None:
        return reason or "its process groups are unknown (C4)"
    if collective.kind != "collective_permute" and len({len(group) for group in groups}) != 1:
        return "its process groups differ in size (C4)"
    op = collective.op
    types = [element_of(value) for value in op.operands]
    # A bitcast can make integers of one, two, four or eight bytes of these.
    is_whole_bytes = all(
        isinstance(each, ir.IntegerType | ir.FloatType) and each.width in (8, 16, 32, 64)
        for each in types
    )
    is_exchanged = collective.kind in EXCHANGING and is_whole_bytes
    elements = "whole bytes" if is_exchanged else ", ".join(dict.fromkeys(map(str, types)))
    others = [(name, str(value)) for name, value in op.attributes.items() if name not in _JUDGED]
    others += ((f"{FRONTEND_ATTRIBUTES} {name}", value) for name, value in steering(op))
    return CollectiveTraits(
        collective.kind,
        collective.group_mode,
        groups,
        _reduction(op),
        elements,
        tuple(sorted(others)),
    )


def why_unfit(collective: Collective, traits: CollectiveTraits) -> str | None:
    """Says why a collective's shapes do not fit the size of its groups; None if they do."""
    op, parts = collective.op, None  # None if they do not depend on it
    if collective.kind == "all_to_all":
        parts = ir.IntegerAttr(op.attributes["split_count"]).value
    elif collective.kind in _ALONG:
        gathers = collective.kind == "all_gather"
        name = "all_gather_dim" if gathers else "scatter_dimension"
        dim = ir.IntegerAttr(op.attributes[name]).value
        small, large = shape_of(op.operands[0])[dim], shape_of(op.results[0])[dim]
        parts = large // small if gathers else small // max(1, large)
    if parts is None or all(len(group) == parts for group in traits.groups):
        return None
    return f"its shapes are for process groups of {parts}, but its groups have another size (C4)"


def why_not_alike(one: CollectiveTraits, other: CollectiveTraits) -> str | None:
    """Returns the first constraint that two collectives violate; None if there is none."""
    if one.kind != other.kind:
        return f"{one.kind} and {other.kind} are different kinds (C1)"
    if one.mode != other.mode:
        return f"they count ids differently: {_mode(one)} and {_mode(other)} (C4)"
    if one.groups != other.groups:
        named = "pairs" if one.kind == "collective_permute" else "process groups"
        return f"their {named} differ (C4)"
    if one.reduction != other.reduction:
        return "they reduce differently (C5)"
    if one.elements != other.elements:
        rule = "C5" if one.kind in REDUCING else "C7"
        return f"their element types differ: {one.elements} and {other.elements} ({rule})"
    if one.attributes != other.attributes:
        names = {name for name, _ in set(one.attributes) ^ set(other.attributes)}
        return f"they differ in {', '.join(sorted(names))} (C6)"
    return None


def _why_not_alone(collective: Collective) -> str | None:
    op = collective.op
    if collective.is_async:
        return "it is an async_start (C2)"
    if collective.kind not in REDUCING | EXCHANGING:
        return f"{collective.kind} is never merged (C1)"
    if not all(
        isinstance(value.type, ir.RankedTensorType)
        and value.type.has_static_shape
        and isinstance(value.type.element_type, ir.IntegerType | ir.FloatType | ir.ComplexType)
        for value in (*op.operands, *op.results)
    ):
        return "it has a symbolic shape, or elements that are not plain numbers (C3)"
    if collective.kind in _ALONG and any(0 in shape_of(value) for value in op.operands):
        return "it moves no elements (C3)"
    if collective.kind == "all_to_all" and len(op.operands) != 1:
        return "it is an all_to_all of several operands (C3)"
    if _XLA_SHARDING in op.attributes:
        return f"it has an {_XLA_SHARDING} (C6)"
    # A barrier may tie an operand or a result to a token.
    around = [value.owner for value in op.operands]
    around += [use.owner for result in op.results for use in result.uses]
    barriers = [x for x in around if not isinstance(x, ir.Block) and x.operation.name == BARRIER]
    tied = [value for barrier in barriers for value in barrier.operands]
    if not all(isinstance(value.type, ir.ShapedType) for value in tied):
        return "it is in a token chain, and thread-tokens runs last (C8)"
    return None


def _mode(traits: CollectiveTraits) -> str:
    return "nothing" if traits.mode is None else traits.mode.value


def _reduction(op: ir.Operation) -> object:
    """Returns a key of what a collective's region computes; None without a region.

    It includes the result types, because some reductions promote their operands.
    """
    if not len(op.regions):
        return None
    results = tuple(dict.fromkeys(str(element_of(value)) for value in op.results))
    block = Combining(op).combiner
    types = tuple(str(argument.type) for argument in block.arguments)
    return results, types, reducer_kind(block) or block_key(block, lambda value: value, str)
