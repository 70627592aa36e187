"""Finds values of a backward that equal values of the forward: equal ops on equal operands.

Every value gets a number, and two values with the same number are equal. The number of a result
depends on the op's attributes, its regions, and the numbers of its operands and captured values.

Barriers, sharding constraints, and reshapes that only add or drop dimensions of size one are
ignored. Such reshapes occur where rows of stacks are written and read: a gather before one equals
the gather after it. A scalar integer of a loop is numbered by its values in all iterations. So
indices are equal however they are computed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import copy

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    RESHAPE,
    SHARDING_CONSTRAINT,
    WHILE,
)
from stablehlo_tools.dialect.traits import ELEMENTWISE, Trait, ops_with
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.structural_key import block_key
from stablehlo_tools.ir.values import CONSTANTS, producer, value_text
from stablehlo_tools.ir.walk import values_used_outside

_UNSAID = ("sdy.", "stablehlo_tools.")  # shardings and our marks do not affect values
_UNSAID_NAMES = frozenset({"channel_handle", "mhlo.sharding"})
_NEVER_EQUAL = ops_with(Trait.EFFECT)
_ELEMENT_BY_ELEMENT = ELEMENTWISE | {ALL_GATHER, ALL_REDUCE}


class SameValues:
    """The numbers of values, in one program."""

    def __init__(self) -> None:
        self._number_of: dict[ir.Value, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._units: dict[int, tuple[int, tuple[int, ...]]] = {}  # the root, and its shape
        self._shapes: dict[int, tuple[int, ...]] = {}  # the first shape, by root

    def in_copy(self, values: Mapping[ir.Value, ir.Value]) -> SameValues:
        """Returns the numbers for the copies of values; `values` maps originals to copies."""
        copied = copy(self)
        copied._number_of = {
            values.get(value, value): number for value, number in self._number_of.items()
        }
        return copied

    def __getitem__(self, value: ir.Value) -> int:
        """Returns the number of a value; assigns a new one to an unknown value."""
        if value not in self._number_of:
            self._number_of[value] = self._number_for(("value", len(self._number_of), value))
        return self._number_of[value]

    def add_leading_to(self, value: ir.Value) -> None:
        """Numbers the ops that compute a value, back to arguments and loops."""
        pending = [value]
        while pending:
            op = producer(pending[-1])
            if op is None or pending[-1] in self._number_of or op.name == WHILE:
                pending.pop()
                continue
            missing = [
                v
                for v in values_used_outside(op)
                if v not in self._number_of
                and (maker := producer(v)) is not None
                and maker.name != WHILE
            ]
            if missing:
                pending += missing
                continue
            self.add(op)
            pending.pop()

    def root(self, number: int) -> int:
        """Returns the number of a value without regard to dimensions of size one."""
        return self._units.get(number, (number, ()))[0]

    def same(self, value: ir.Value, other: ir.Value) -> None:
        """Records that `value` equals `other`."""
        self._number_of[value] = self[other]

    def is_integers(self, value: ir.Value, integers: Sequence[int]) -> None:
        """Records the values of a scalar in each iteration."""
        self._number_of[value] = self._number_for(("integers", value.type, tuple(integers)))

    def add(self, op: ir.Operation) -> None:
        """Numbers the results of an op."""
        if any(result in self._number_of for result in op.results):
            return
        if op.name in (BARRIER, SHARDING_CONSTRAINT):
            for result, operand in zip(op.results, op.operands, strict=True):
                self._number_of[result] = self[operand]
            return
        if op.name in CONSTANTS:
            self._number_of[op.results[0]] = self._number_for(("constant", value_text(op)))
            return
        if _only_adds_units(op):
            # The root is the value before any dimensions of size one were added or dropped.
            shape = tuple(shape_of(op.results[0]))
            number = self[op.operands[0]]
            root, was = self._units.get(number, (number, tuple(shape_of(op.operands[0]))))
            is_first = shape == was
            self._number_of[op.results[0]] = root if is_first else self._units_of(root, was, shape)
            return
        is_by_elements = op.name in _ELEMENT_BY_ELEMENT and len(op.results) == 1
        if is_by_elements and all(
            isinstance(v.type, ir.RankedTensorType) and v.type.has_static_shape
            for v in (*op.operands, *op.results)
        ):
            self._number_of[op.results[0]] = self._by_elements(op)
            return
        # These may return other values each time, so each result gets a number of its own.
        if op.name in _NEVER_EQUAL or op.name.startswith("func."):
            for result in op.results:
                self[result]
            return
        key = self._key(op)
        for position, result in enumerate(op.results):
            self._number_of[result] = self._number_for((position, key))

    def _key(self, op: ir.Operation) -> Hashable:
        types = tuple(result.type for result in op.results)
        reads = tuple(self[value] for value in values_used_outside(op))
        return op.name, types, _said(op), reads, _inside(op)

    def _by_elements(self, op: ir.Operation) -> int:
        """Returns the number of an elementwise result, without regard to dimensions of size one."""
        said, along = _said(op), 0
        if op.name == ALL_GATHER:
            dim = ir.IntegerAttr(op.attributes["all_gather_dim"]).value
            before = shape_of(op.operands[0])
            # The place of such a dimension matters: the gather makes it larger than one.
            if before[dim] == 1:
                return self._number_for((0, self._key(op)))
            said = tuple((name, value) for name, value in said if name != "all_gather_dim")
            along = sum(size != 1 for size in before[:dim])
        roots = tuple(self.root(self[value]) for value in op.operands)
        key = (op.name, element_of(op.results[0]), said, along, roots, _inside(op))
        shape = tuple(shape_of(op.results[0]))
        first = self._number_for(("elements", key))
        was = self._shapes.setdefault(first, shape)
        return first if was == shape else self._units_of(first, was, shape)

    def _units_of(self, root: int, was: tuple[int, ...], shape: tuple[int, ...]) -> int:
        found = self._number_for(("units", root, shape))
        self._units[found] = (root, was)
        return found

    def _number_for(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _inside(op: ir.Operation) -> Hashable:
    """Returns a key for the regions of an op; values from outside of them are not distinguished."""
    blocks = [block for region in op.regions for block in region.blocks]
    return tuple(block_key(block, lambda value: "outside", is_said=_is_said) for block in blocks)


def _said(op: ir.Operation) -> tuple[tuple[str, ir.Attribute], ...]:
    """Returns the attributes that affect an op's results; MLIR sorts them by name."""
    attributes = op.attributes
    if not len(attributes):
        return ()
    return tuple((name, value) for name, value in attributes.items() if _is_said(name))


def _is_said(name: str) -> bool:
    return name not in _UNSAID_NAMES and not name.startswith(_UNSAID)


def _only_adds_units(op: ir.Operation) -> bool:
    """Returns True if an op keeps the order of elements and all dimensions except those of size
    one."""
    if op.name not in (RESHAPE, BROADCAST):
        return False
    types = (op.operands[0].type, op.results[0].type)
    if not all(isinstance(t, ir.RankedTensorType) and t.has_static_shape for t in types):
        return False
    before, after = (shape_of(value) for value in (op.operands[0], op.results[0]))
    if [size for size in before if size != 1] != [size for size in after if size != 1]:
        return False
    if op.name == RESHAPE:
        return True
    dims = list(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"]))
    moved = [dim for dim, size in zip(dims, before, strict=True) if size != 1]
    return moved == sorted(moved)
