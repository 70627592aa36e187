"""Which ops a generated test checks, and which of their attributes are noise.

What matters by default is communication, its order, and whatever control flow stands around it;
all other ops may change without the test noticing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.collectives import RAGGED_ALL_TO_ALL
from stablehlo_tools.dialect.custom_calls import ASYNC_STARTS, is_async_done, target_of
from stablehlo_tools.dialect.traits import CALLS
from stablehlo_tools.ir.symbols import FUNCTION, callee_name, functions_by_name, symbol_name
from stablehlo_tools.ir.walk import walk

_COMMUNICATION = re.compile(
    r"(?:stablehlo|mhlo|sdy)\.(?:all_(?:gather|reduce|to_all|slice)|reduce_scatter|"
    r"collective_\w+|cross-replica-sum|send|recv|infeed|outfeed|async_\w+|partition_id|"
    r"replica_id|sharded_to_unreduced|replicated_to_unreduced)"
)
_CONTROL_FLOW = frozenset(
    {
        *("stablehlo.while", "stablehlo.if", "stablehlo.case"),
        *("sdy.manual_computation", "sdy.named_computation"),
    }
)
_REDUCING = re.compile(r"stablehlo\.(?:all_reduce|reduce_scatter)")
_TERMINATORS = frozenset({"stablehlo.return", "sdy.return", "func.return"})
_NEEDED = frozenset(
    {
        *("mhlo.num_partitions", "mhlo.num_replicas", "mhlo.sharding", "mhlo.memory_kind"),
        *("mhlo.backend_config", "jax.buffer_donor", "jax.global_constant"),
    }
)
_TOKEN = "!stablehlo.token"


def is_noise(attribute: str) -> bool:
    """Whether an attribute says nothing about what the program does, going by its name."""
    if attribute in _NEEDED:
        return False
    return attribute.startswith(("jax.", "mhlo.")) or attribute == "stablehlo.mesh"


def is_terminator(op: ir.Operation) -> bool:
    """Whether the op ends a block."""
    return op.name in _TERMINATORS


def is_barrier(op: ir.Operation) -> bool:
    """Whether the op only ties values together."""
    return op.name == "stablehlo.optimization_barrier"


def is_in_reduction(op: ir.Operation) -> bool:
    """Whether the op stands in the region that a collective reduces by."""
    parent = op.parent
    return parent is not None and bool(_REDUCING.fullmatch(parent.operation.name))


def communicates(op: ir.Operation) -> bool:
    """Whether the op exchanges data, or by a custom call may."""
    if op.name in ("stablehlo.partition_id", "stablehlo.replica_id"):
        return False
    return bool(_COMMUNICATION.fullmatch(op.name)) or _is_effectful_call(op)


def is_control_flow(op: ir.Operation) -> bool:
    """Whether the op decides how often what it holds runs, or where."""
    return op.name in _CONTROL_FLOW


@dataclass(frozen=True)
class Selection:
    """The ops to check: all of them, or what matters."""

    everything: bool
    functions: frozenset[str]  # the names of those to check

    @staticmethod
    def of(module: ir.Module, everything: bool) -> Selection:
        """Decides which functions there is something to check in: the public ones always."""
        functions = functions_by_name(module)
        if everything:
            return Selection(True, frozenset(functions))
        shown = {name for name, op in functions.items() if "sym_visibility" not in op.attributes}
        shown |= {name for name, op in functions.items() if _visibility(op) == "public"}
        shown |= {name for name, op in functions.items() if _holds_shown(op)}
        calls = {name: _callees(op) for name, op in functions.items()}
        while more := {n for n, called in calls.items() if n not in shown and called & shown}:
            shown |= more
        return Selection(False, frozenset(shown))

    def shows(self, op: ir.Operation) -> bool:
        """Whether the op's own line is checked."""
        if self.everything:
            return True
        if op.name == FUNCTION:
            return symbol_name(op) in self.functions
        if op.name == "sdy.mesh" or _matters(op):
            return True
        if op.name in CALLS:
            return callee_name(op) in self.functions
        return is_terminator(op) and self._shows_end_of(op.parent)

    def _shows_end_of(self, parent: ir.Operation | ir.OpView | None) -> bool:
        """What leaves a reduction or an async pair is in no doubt."""
        if parent is None:
            return False
        op = parent.operation
        return op.name in _CONTROL_FLOW or (op.name == FUNCTION and self.shows(op))

    def shows_name_only(self, op: ir.Operation) -> bool:
        """Whether the op is what a checked collective reduces by."""
        return not self.everything and not is_terminator(op) and is_in_reduction(op)


def _matters(op: ir.Operation) -> bool:
    if _COMMUNICATION.fullmatch(op.name) or op.name in _CONTROL_FLOW:
        return True
    if _is_effectful_call(op):
        return True
    if is_terminator(op):
        return False
    return any(str(value.type) == _TOKEN for value in (*op.operands, *op.results))


def _is_effectful_call(op: ir.Operation) -> bool:
    if op.name != "stablehlo.custom_call":
        return False
    effect = op.attributes.get("has_side_effect")
    if effect is not None and ir.BoolAttr(effect).value:
        return True
    return target_of(op) in (RAGGED_ALL_TO_ALL, *ASYNC_STARTS) or is_async_done(op)


def _visibility(function: ir.Operation) -> str:
    attribute = function.attributes.get("sym_visibility")
    return "public" if attribute is None else ir.StringAttr(attribute).value


def _holds_shown(function: ir.Operation) -> bool:
    found = False

    def visit(op: ir.Operation) -> ir.WalkResult:
        nonlocal found
        found = found or _matters(op)
        return ir.WalkResult.INTERRUPT if found else ir.WalkResult.ADVANCE

    walk(function, visit)
    return found


def _callees(function: ir.Operation) -> set[str]:
    found: set[str] = set()

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name in CALLS:
            found.add(callee_name(op))
        return ir.WalkResult.ADVANCE

    walk(function, visit)
    return found
